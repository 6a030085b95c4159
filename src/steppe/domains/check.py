"""Whether a dataset on disk is whole: layout, counts, every image, copies, the pack.

A *problem* fails the check, a *note* does not. Where all domains have exactly the published number
of images, identical images and classes that a domain lacks are how the benchmark was published;
removing or adding any would make results incomparable, so these are notes. Everywhere else they are
problems: a copy in another domain shows the target to the training, one under another class
contradicts itself, and one beside its original may be trained on and validated with.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from steppe.console import Console, RenderableType, table, text
from steppe.errors import UserError, reason
from steppe.strangers import command, plain

from . import pack
from .dataset import Domain, Files, UnreadableImage, decode
from .folder import SUFFIXES, read_folder, subfolders
from .pool import map_files
from .spec import DatasetSpec

_SHOWN = 20
"""Copies that the terminal and a summary list; all are in the report."""
_CLASS_ROWS = 80
"""Classes that the terminal has a table for."""


@dataclass(frozen=True)
class Finding:
    """Something that a person should know."""

    problem: bool
    text: str


@dataclass(frozen=True)
class DomainCount:
    """How many images a domain has, and each of its classes."""

    name: str
    images: int
    expected: int | None
    classes: Mapping[str, int]


@dataclass(frozen=True)
class Copies:
    """Files with the same bytes, as ``domain/class/image``."""

    kind: str
    """``across domains``, ``under different classes`` or ``within a class``."""
    files: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What a check found."""

    dataset: str
    where: str
    domains: tuple[DomainCount, ...]
    findings: tuple[Finding, ...]
    unreadable: tuple[str, ...]
    """Paths of images that cannot be decoded to the end."""
    copies: tuple[Copies, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong."""
        return tuple(finding.text for finding in self.findings if finding.problem)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth knowing and not wrong."""
        return tuple(finding.text for finding in self.findings if not finding.problem)

    def to_json(self) -> dict[str, object]:
        """The report as plain values."""
        report = asdict(self)
        del report["findings"]
        return {"ok": self.ok, **report, "problems": self.problems, "notes": self.notes}


@dataclass(frozen=True)
class _Listed:
    """A domain with the classes that its labels count."""

    classes: Sequence[str]
    domain: Domain

    def class_of(self, index: int) -> str:
        return self.classes[int(self.domain.labels[index])]


def check(
    spec: DatasetSpec, home: Path, *, jobs: int | None = None, console: Console | None = None
) -> Report:
    """Looks at every file of a dataset.

    Args:
        spec: the dataset.
        home: the data folder.
        jobs: processes that decode images; as many as there are cores unless given.
        console: where to show progress; nowhere unless given.
    """
    where, listed, findings = _open(spec, home)
    counts = tuple(_count(spec, item, listed) for item in listed)
    published = spec.counts is not None and spec.counts == tuple(count.images for count in counts)
    findings += _check_counts(spec, home, counts)
    findings += _check_classes(spec, counts, published)
    findings += _check_layout(spec, home, listed)
    unreadable, copies = _look_at_images(spec, listed, jobs, console)
    findings += [Finding(True, text) for text in unreadable.values()]
    findings += _check_copies(copies, published)
    findings += _check_pack(spec, home, listed, console)
    return Report(spec.name, where, counts, tuple(findings), tuple(unreadable), copies)


def _open(spec: DatasetSpec, home: Path) -> tuple[str, list[_Listed], list[Finding]]:
    """Lists the images: of all domains, of those that are there, or of the pack alone."""
    folder = spec.where(home)
    try:
        classes, domains = spec.read(folder)
    except UserError as error:
        if not folder.is_dir() and (packed := pack.find(spec, home)) is not None:
            listed = [_Listed(packed.classes, domain) for domain in packed.domains]
            note = f"{folder} is not there: the pack serves alone, its images are not checked again"
            return packed.origin, listed, [Finding(False, note)]
        return _open_partly(spec, folder, error)
    origin = f"files in {folder}" if spec.folder is not None else "in memory"
    return origin, [_Listed(classes, domain) for domain in domains], []


def _open_partly(
    spec: DatasetSpec, folder: Path, error: UserError
) -> tuple[str, list[_Listed], list[Finding]]:
    here = subfolders(folder) if folder.is_dir() else []
    present = [name for name in spec.domains if name in here]
    if not present:
        reason = str(error).replace("'steppe data get'", f"'steppe data get {spec.name}'")
        return f"not found in {folder}", [], [Finding(True, reason)]
    findings = []
    missing = [name for name in spec.domains if name not in here]
    if missing:
        text = f"domain folders are missing in {folder}: {', '.join(missing)}"
        findings.append(Finding(True, text))
    listed = []
    for name in present:
        try:
            classes, (domain,) = read_folder(folder, [name])
            listed.append(_Listed(classes, domain))
        except UserError as reason:
            findings.append(Finding(True, str(reason)))
    if not findings:  # each domain can be read, and still the whole cannot
        findings.append(Finding(True, str(error)))
    return f"files in {folder}", listed, findings


def _count(spec: DatasetSpec, item: _Listed, listed: Sequence[_Listed]) -> DomainCount:
    found = Counter(item.domain.labels.tolist())
    by_class = {name: found[label] for label, name in enumerate(item.classes)}
    everywhere = sorted({name for other in listed for name in other.classes} - set(by_class))
    return DomainCount(
        item.domain.name,
        len(item.domain),
        dict(zip(spec.domains, spec.counts or (), strict=False)).get(item.domain.name),
        by_class | dict.fromkeys(everywhere, 0),
    )


def _check_counts(
    spec: DatasetSpec, home: Path, counts: Sequence[DomainCount]
) -> Iterator[Finding]:
    hint = ""
    if (listed := spec.left_out) is not None:
        there = (spec.where(home) / listed).exists()
        hint = f" ({listed}, which says what to leave out, is {'' if there else 'not '}there)"
    for count in counts:
        if count.expected is not None and count.images != count.expected:
            yield Finding(
                True,
                f"domain {count.name!r} has {count.images:,} images instead of "
                f"{count.expected:,}{hint}",
            )


def _check_classes(
    spec: DatasetSpec, counts: Sequence[DomainCount], published: bool
) -> Iterator[Finding]:
    if not counts:
        return
    classes = list(counts[0].classes)
    if len(classes) != spec.n_classes:
        names = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
        text = f"there are {len(classes)} classes instead of {spec.n_classes}: {names}"
        yield Finding(True, text)
    for count in counts:
        lacking = [name for name, images in count.classes.items() if not images]
        if lacking:
            yield Finding(
                not published,
                f"domain {count.name!r} has no images of {', '.join(lacking[:8])}"
                + (f" and {len(lacking) - 8} more classes" if len(lacking) > 8 else ""),
            )


def _check_layout(spec: DatasetSpec, home: Path, listed: Sequence[_Listed]) -> Iterator[Finding]:
    """Files and folders that reading a dataset passes over."""
    folder = spec.where(home)
    images: dict[Path, set[str]] = defaultdict(set)
    for item in listed:
        if isinstance(item.domain.images, Files):
            images[item.domain.images.root].update(item.domain.images.names)
    classes = {name for item in listed for name in item.classes}
    if folder / spec.domains[0] in images:  # else its folders are laid out in another way
        for name in subfolders(folder):
            if name not in spec.domains:
                # A folder with the same classes was meant as a domain, any other as something else.
                a_domain = bool(classes.intersection(subfolders(folder / name)))
                what = "an unexpected domain" if a_domain else "no domain, and passed over"
                yield Finding(a_domain, f"the folder {folder / name} is {what}")
    for root, names in images.items():
        yield from _check_strays(root, names)


def _check_strays(root: Path, names: set[str]) -> Iterator[Finding]:
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
    for found, problem, what in (
        (loose, True, "images outside the class folders are not read"),
        (left_out, False, "images are left out by the dataset's lists"),
        (strays, False, "files that are not images are passed over"),
    ):
        if found:
            yield Finding(problem, f"{what}, {len(found):,} in {root}: {_some(sorted(found))}")


def _some(names: Sequence[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more:,} more" if more > 0 else "")


def _look(path: str) -> tuple[bytes, str]:
    """Decodes a file to its end: the checksum of its bytes, or why it cannot be read."""
    try:
        decode(Path(path))
        with plain(path) as file:
            return hashlib.file_digest(file, "blake2b").digest(), ""
    except UnreadableImage as error:
        return b"", str(error)
    except OSError as error:  # deleted this moment
        return b"", f"image {path} cannot be read: {reason(error)}"


def _look_at_images(
    spec: DatasetSpec, listed: Sequence[_Listed], jobs: int | None, console: Console | None
) -> tuple[dict[str, str], tuple[Copies, ...]]:
    """The images that cannot be read, by path, and those with the same bytes."""
    places = [
        (item, index, f"{item.domain.images.root}/{item.domain.images.names[index]}")
        for item in listed
        if isinstance(item.domain.images, Files)
        for index in range(len(item.domain))
    ]
    unreadable = {}
    by_content = defaultdict(list)
    paths = [path for _, _, path in places]
    looks = map_files(_look, paths, title=f"checking {spec.name}", jobs=jobs, console=console)
    for (item, index, path), (checksum, error) in zip(places, looks, strict=True):
        if error:
            unreadable[path] = error
        else:
            by_content[checksum].append((item, index))
    return unreadable, tuple(_copies(same) for same in by_content.values() if len(same) > 1)


def _copies(same: Sequence[tuple[_Listed, int]]) -> Copies:
    if len({item.domain.name for item, _ in same}) > 1:
        kind = "across domains"
    elif len({item.class_of(index) for item, index in same}) > 1:
        kind = "under different classes"
    else:
        kind = "within a class"
    return Copies(
        kind, tuple(f"{item.domain.name}/{item.domain.images.name(index)}" for item, index in same)
    )


def _check_copies(copies: Sequence[Copies], published: bool) -> Iterator[Finding]:
    by_kind = defaultdict(list)
    for same in copies:
        by_kind[same.kind].append(" = ".join(same.files))
    for kind, found in sorted(by_kind.items()):
        times = "once" if len(found) == 1 else f"{len(found):,} times"
        yield Finding(not published, f"identical images {kind}, {times}: {_some(found)}")


def _check_pack(
    spec: DatasetSpec, home: Path, listed: Sequence[_Listed], console: Console | None
) -> Iterator[Finding]:
    if spec.folder is None or (path := pack.present(spec, home)) is None:
        return
    again = command("steppe", "data", "pack", spec.name, "--force")
    remedy = f"Delete it, or make it again: {again}"
    problems = pack.verify(path, console)
    files = [item for item in listed if isinstance(item.domain.images, Files)]
    if not problems and files:
        changed = pack.outdated(path, files[0].classes, [item.domain for item in files])
        problems = [f"pack {path} is out of date: {changed}"] if changed else []
    yield from (Finding(True, f"{problem}. {remedy}") for problem in problems)
    if not problems:
        yield Finding(False, f"pack {path} is valid")


def tables(report: Report) -> list[RenderableType]:
    """The report for a terminal: counts, what was found, and the verdict."""
    shown: list[RenderableType] = [text(f"{report.dataset}: {report.where}", style="bold")]
    domains = report.domains
    if domains:
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
            shown.append(text(f"{len(classes)} classes: see --json for the images of each"))
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
