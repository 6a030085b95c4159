"""Check a dataset on disk: layout, counts, every image, duplicates, the pack.

A *problem* fails the check, a *note* does not. Duplicate images and missing classes are notes if
every domain has exactly the published number of images: the benchmark was published that way, and
changing it would make results incomparable. Otherwise they are problems. A duplicate in another
domain leaks the target into training, one under another class contradicts its label, and one in the
same class may be in both training and validation.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from steppe.console import Console, RenderableType, table, text
from steppe.errors import UserError, reason
from steppe.strangers import command, plain

from . import pack
from .dataset import Domain, Files, UnreadableImage, decode
from .folder import SUFFIXES, class_names, read_domain, subfolders
from .pool import map_files
from .spec import DatasetSpec

_SHOWN = 20
"""Maximum number of duplicates in the terminal; the JSON has all."""
_CLASS_ROWS = 80
"""Maximum number of classes in the terminal's table."""


@dataclass(frozen=True)
class DomainCount:
    """The number of images of a domain and of each of its classes."""

    name: str
    images: int
    expected: int | None
    classes: Mapping[str, int]


@dataclass(frozen=True)
class Copies:
    """Identical files, as ``domain/class/image``."""

    kind: str
    """``across domains``, ``under different classes`` or ``within a class``."""
    files: tuple[str, ...]


@dataclass(frozen=True)
class CheckResult:
    dataset: str
    where: str
    domains: tuple[DomainCount, ...]
    unreadable: tuple[str, ...]
    """Paths of images that cannot be decoded to the end."""
    copies: tuple[Copies, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, object]:
        return {"ok": self.ok, **asdict(self)}


def check(
    spec: DatasetSpec, home: Path, *, jobs: int | None = None, console: Console | None = None
) -> CheckResult:
    """Check every file of a dataset below the data folder `home`, in `jobs` processes."""
    found = _Check(spec, home)
    where = found.open()
    counts = found.check_counts()
    found.check_layout()
    unreadable, copies = found.check_images(jobs, console)
    found.check_pack(console)
    problems, notes = tuple(found.problems), tuple(found.notes)
    return CheckResult(spec.name, where, counts, unreadable, copies, problems, notes)


class _Check:
    """The findings about a dataset so far."""

    def __init__(self, spec: DatasetSpec, home: Path) -> None:
        self.spec, self.home, self.folder = spec, home, spec.where(home)
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.classes: Sequence[str] = ()
        self.domains: list[Domain] = []
        self.published = False

    def open(self) -> str:
        """List the images of all domains, of those found, or of the pack; return where they are."""
        spec, folder = self.spec, self.folder
        try:
            self.classes, domains = spec.read(folder)
        except UserError as error:
            if folder.is_dir() or (packed := pack.find(spec, self.home)) is None:
                return self._open_partly(error)
            self.classes, self.domains = packed.classes, [*packed.domains]
            self.notes.append(
                f"{folder} does not exist: only the pack is checked, not the original images"
            )
            return packed.origin
        self.domains = [*domains]
        return f"files in {folder}" if spec.folder is not None else "in memory"

    def _open_partly(self, error: UserError) -> str:
        spec, folder = self.spec, self.folder
        there = subfolders(folder) if folder.is_dir() else []
        here = [name for name in spec.domains if name in there]
        if not here:
            self.problems.append(str(error))
            return f"not found in {folder}"
        if missing := [name for name in spec.domains if name not in here]:
            self.problems.append(f"{folder} has no folders for the domains {', '.join(missing)}")
        for name in here:
            try:
                self.classes = self.classes or class_names(folder, here)
                self.domains.append(read_domain(folder / name, name, self.classes))
            except UserError as said:
                if str(said) not in self.problems:
                    self.problems.append(str(said))
        if not self.problems:  # every domain can be read, but not all of them together
            self.problems.append(str(error))
        return f"files in {folder}"

    def check_counts(self) -> tuple[DomainCount, ...]:
        """Compare the number of images of each domain and class with the expected number."""
        spec = self.spec
        expected = dict(zip(spec.domains, spec.counts or (), strict=False))
        counts = []
        for domain in self.domains:
            found = Counter(domain.labels.tolist())
            by_class = {name: found[label] for label, name in enumerate(self.classes)}
            count = DomainCount(domain.name, len(domain), expected.get(domain.name), by_class)
            counts.append(count)
        self.published = bool(spec.counts) and spec.counts == tuple(c.images for c in counts)
        hint = ""
        if spec.left_out is not None:
            verb = "exists" if (self.folder / spec.left_out).exists() else "is missing"
            hint = f" ({spec.left_out}, which lists images to exclude, {verb})"
        self.problems += [
            f"domain {c.name!r} has {c.images:,} images instead of {c.expected:,}{hint}"
            for c in counts
            if c.expected is not None and c.images != c.expected
        ]
        if counts and len(self.classes) != spec.n_classes:
            names = _some(self.classes, 8)
            self.problems.append(
                f"there are {len(self.classes)} classes instead of {spec.n_classes}: {names}"
            )
        for count in counts:
            if lacking := [name for name, images in count.classes.items() if not images]:
                finding = f"domain {count.name!r} has no images of {_some(lacking, 8)}"
                self._unless_published(finding)
        return tuple(counts)

    def _unless_published(self, finding: str) -> None:
        (self.notes if self.published else self.problems).append(finding)

    def _files(self) -> list[tuple[Domain, Files]]:
        """Return the domains that are stored as image files."""
        return [(d, d.images) for d in self.domains if isinstance(d.images, Files)]

    def check_layout(self) -> None:
        """Report files and folders that reading the dataset ignores."""
        images: dict[Path, set[str]] = defaultdict(set)
        for _, files in self._files():
            images[files.root].update(files.names)
        if self.folder / self.spec.domains[0] in images:  # otherwise the layout is a different one
            for name in subfolders(self.folder):
                if name in self.spec.domains:
                    continue
                # A folder that contains one of the classes was probably meant as a domain.
                if set(self.classes).intersection(subfolders(self.folder / name)):
                    self.problems.append(f"the folder {self.folder / name} is an unexpected domain")
                else:
                    self.notes.append(
                        f"ignored the folder {self.folder / name}: it is not a domain"
                    )
        for root, names in images.items():
            self._check_strays(root, names)

    def _check_strays(self, root: Path, names: set[str]) -> None:
        strays: list[str] = []
        loose: list[str] = []
        left_out: list[str] = []
        for path, _, files in os.walk(root, followlinks=True):
            for file in files:
                name = os.path.relpath(os.path.join(path, file), root).replace(os.sep, "/")
                if name in names:
                    continue
                if not file.lower().endswith(SUFFIXES):
                    strays.append(name)
                else:
                    (left_out if "/" in name else loose).append(name)
        for found, findings, what in (
            (loose, self.problems, "images outside the class folders, which are not read"),
            (left_out, self.notes, "images that the dataset's lists exclude"),
            (strays, self.notes, "ignored files that are not images"),
        ):
            if found:
                findings.append(f"{what}: {len(found):,} in {root}: {_some(sorted(found))}")

    def check_images(
        self, jobs: int | None, console: Console | None
    ) -> tuple[tuple[str, ...], tuple[Copies, ...]]:
        """Decode every image; return the paths of unreadable images, and the duplicates."""
        images = [
            (domain, index, f"{files.root}/{name}")
            for domain, files in self._files()
            for index, name in enumerate(files.names)
        ]
        paths, title = [path for _, _, path in images], f"checking {self.spec.name}"
        looks = map_files(_look, paths, title=title, jobs=jobs, console=console)
        unreadable = []
        same: dict[bytes, list[tuple[Domain, int]]] = defaultdict(list)
        for (domain, index, path), (checksum, error) in zip(images, looks, strict=True):
            if error:
                unreadable.append(path)
                self.problems.append(error)
            else:
                same[checksum].append((domain, index))
        copies = tuple(_copies(found) for found in same.values() if len(found) > 1)
        for kind in sorted({copy.kind for copy in copies}):
            of_kind = [" = ".join(copy.files) for copy in copies if copy.kind == kind]
            times = "once" if len(of_kind) == 1 else f"{len(of_kind):,} times"
            self._unless_published(f"identical images {kind}, {times}: {_some(of_kind)}")
        return tuple(unreadable), copies

    def check_pack(self, console: Console | None) -> None:
        spec = self.spec
        if (path := pack.present(spec, self.home)) is None:
            return
        files = [domain for domain, _ in self._files()]
        problems = pack.verify(path, (self.classes, files) if files else None, console)
        again = command("steppe", "data", "pack", spec.name, "--force")
        self.problems += [f"{found}. Delete the pack, or rebuild it: {again}" for found in problems]
        if not problems:
            self.notes.append(f"pack {path} is valid")


def _some(names: Sequence[str], shown: int = 3) -> str:
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more:,} more" if more > 0 else "")


def _look(path: str) -> tuple[bytes, str]:
    """Decode a whole file; return the checksum of its bytes, or why it cannot be read."""
    try:
        decode(Path(path))
        with plain(path) as file:
            return hashlib.file_digest(file, "blake2b").digest(), ""
    except UnreadableImage as error:
        return b"", str(error)
    except OSError as error:  # deleted in the meantime
        return b"", f"image {path} cannot be read: {reason(error)}"


def _copies(same: Sequence[tuple[Domain, int]]) -> Copies:
    if len({domain.name for domain, _ in same}) > 1:
        kind = "across domains"
    elif len({int(domain.labels[index]) for domain, index in same}) > 1:
        kind = "under different classes"
    else:
        kind = "within a class"
    return Copies(
        kind, tuple(f"{domain.name}/{domain.images.name(index)}" for domain, index in same)
    )


def tables(report: CheckResult) -> list[RenderableType]:
    """Render a check for a terminal: counts, findings, and the verdict."""
    shown: list[RenderableType] = [text(f"{report.dataset}: {report.where}", style="bold")]
    if domains := report.domains:
        counts = (
            (
                domain.name,
                f"{domain.images:,}",
                "" if domain.expected is None else f"{domain.expected:,}",
                sum(1 for images in domain.classes.values() if images),
            )
            for domain in domains
        )
        shown.append(table(("domain", "images", "expected", "classes"), counts))
        classes = list(domains[0].classes)
        if len(classes) <= _CLASS_ROWS:
            rows = ((name, *(f"{d.classes[name]:,}" for d in domains)) for name in classes)
            shown.append(table(("class", *(domain.name for domain in domains)), rows))
        else:
            shown.append(text(f"{len(classes)} classes: see --json for the counts of each"))
    if report.copies:
        copies = ((same.kind, "\n".join(same.files)) for same in report.copies[:_SHOWN])
        shown.append(table(("identical images", "files"), copies, labels=2))
        if len(report.copies) > _SHOWN:
            shown.append(text(f"and {len(report.copies) - _SHOWN:,} more: see --json"))
    shown += [text(f"note: {note}") for note in report.notes]
    shown += [text(f"problem: {problem}", style="red") for problem in report.problems]
    n = len(report.problems)
    verdict = "no problems" if report.ok else f"{n} problem{'s' if n > 1 else ''}"
    shown.append(text(f"{report.dataset}: {verdict}", style="green" if report.ok else "bold red"))
    return shown
