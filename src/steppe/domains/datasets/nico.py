"""NICO++: 60 classes in six public contexts, with the authors' list files or without.

The lists, ``autumn_train.txt`` and so on, say which images of a context are for training, for
validation and for testing. The public archive of images comes without them: a dataset read from
folders alone has random splits, and says so.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np

from steppe.domains.dataset import Contents, Domain, Files
from steppe.domains.folder import lines as lines_of, read_folder, require_text
from steppe.domains.spec import DatasetSpec, Source
from steppe.errors import UserError
from steppe.strangers import parse, read as read_file

DOMAINS = ("autumn", "dim", "grass", "outdoor", "rock", "water")
SUBSETS = ("train", "val", "test")
LIST_FOLDERS = (".", "NICO_DG_official")
IMAGE_FOLDERS = (".", "NICO_DG", "track_1/public_dg_0416/train", "public_dg_0416/train")
LABELS = "dg_label_id_mapping.json"
"""Comes with the public archive: the label of each class, by name."""

_log = logging.getLogger("steppe")


def read(root: Path) -> Contents:
    """From list files where there are any, or else from folders; below `root` at several places."""
    names = [f"{domain}_{subset}.txt" for domain in DOMAINS for subset in SUBSETS]
    for lists in (root / place for place in LIST_FOLDERS):
        missing = [name for name in names if not (lists / name).is_file()]
        if not missing:
            return _read_lists(root, lists)
        if len(missing) < len(names):
            raise UserError(
                f"NICO++ in {lists} has {len(names) - len(missing)} of its {len(names)} list "
                f"files, missing are {', '.join(missing)}. Add them, or remove the others to have "
                "random splits."
            )
    for images in (root / place for place in IMAGE_FOLDERS):
        if (images / DOMAINS[0]).is_dir():
            _log.warning(
                "NICO++ in %s has no list files (%s_train.txt, ...): its splits are random ones, "
                "not the official ones",
                root,
                DOMAINS[0],
            )
            return _in_official_order(root, *read_folder(images, DOMAINS))
    raise UserError(
        f"NICO++ not found at {root}: expected the list files {DOMAINS[0]}_train.txt, ... or the "
        f"folders {', '.join(DOMAINS)}, there or in {', '.join(IMAGE_FOLDERS[1:])}. See "
        "'steppe data get NICO++'."
    )


class _Classes:
    """The classes by label, which all lists must agree on."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.labels: dict[str, int] = {}

    def add(self, where: str, name: str, label: int) -> None:
        known, number = self.names.setdefault(label, name), self.labels.setdefault(name, label)
        if (known, number) != (name, label):
            raise UserError(
                f"{where}: class {name!r} has label {label}, but elsewhere "
                f"{known!r} has label {self.labels[known]}"
            )

    def in_order(self) -> tuple[str, ...]:
        for label in range(len(self.names)):
            if label not in self.names:
                raise UserError(
                    f"the lists of NICO++ have {len(self.names)} classes, but none has label "
                    f"{label}"
                )
        return tuple(self.names[label] for label in sorted(self.names))


def _read_lists(root: Path, lists: Path) -> Contents:
    classes, domains = _Classes(), []
    for name in DOMAINS:
        listed = {subset: _parse(lists / f"{name}_{subset}.txt", classes) for subset in SUBSETS}
        # One entry for an image, however often it is listed.
        labels = {path: label for lines in listed.values() for path, label in lines}
        index = {path: i for i, path in enumerate(labels)}
        subsets = {
            subset: np.array([index[path] for path, _ in lines], dtype=np.int64)
            for subset, lines in listed.items()
        }
        if repeated := sum(map(len, listed.values())) - len(index):
            _log.warning("the lists of NICO++'s %s name %d images more than once", name, repeated)
        # Paths start from where the first of them is found, or else from `root`.
        first, places = next(iter(index)), (root / place for place in IMAGE_FOLDERS)
        base = next((place for place in places if (place / first).is_file()), root)
        numbers = np.array(list(labels.values()), dtype=np.int64)
        domains.append(Domain(name, Files(base, tuple(index)), numbers, subsets))
    return classes.in_order(), tuple(domains)


def _parse(path: Path, classes: _Classes) -> list[tuple[str, int]]:
    """The lines ``PATH LABEL`` of a list; a path may have blanks in it."""
    lines = []
    for number, text in enumerate(lines_of(path), start=1):
        if not text.strip():
            continue
        *words, label = text.rsplit(maxsplit=1)
        image = PurePosixPath("".join(words))
        if not (label.isdecimal() and len(label) < 9 and image.parent.name):
            raise UserError(f"{path}:{number}: expected 'CLASS/IMAGE LABEL', found {text!r}")
        require_text(path.parent / image.parent.name)
        if not image.name.startswith("."):  # what a Mac leaves in every folder
            classes.add(f"{path}:{number}", image.parent.name, int(label))
            lines.append(("".join(words), int(label)))
    if not lines:
        raise UserError(f"{path} lists no images")
    return lines


def _in_official_order(
    root: Path, classes: tuple[str, ...], domains: tuple[Domain, ...]
) -> Contents:
    """Numbers the classes, sorted by name so far, as the archive's own file does where present."""
    path = next((p for p in (root / LABELS, root / "track_1" / LABELS) if p.is_file()), None)
    if path is None:
        return classes, domains
    try:
        official = parse(read_file(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    labels = list(official.values()) if isinstance(official, dict) else []
    if not labels or sorted(map(str, labels)) != sorted(map(str, range(len(labels)))):
        raise UserError(f"{path} should be an object from class names to the labels 0, 1, 2, ...")
    unmatched = sorted(set(official) ^ set(classes))
    if unmatched:
        raise UserError(
            f"{path} and the folders do not have the same classes: {', '.join(unmatched)} only in "
            "one of them"
        )
    order = sorted(range(len(classes)), key=lambda label: int(official[classes[label]]))
    renumbered = np.argsort(order)
    return (
        tuple(classes[label] for label in order),
        tuple(replace(domain, labels=renumbered[domain.labels]) for domain in domains),
    )


NICO = DatasetSpec(
    name="NICO++",
    domains=DOMAINS,
    labels=DOMAINS,
    n_classes=60,
    citation="Zhang et al., NICO++: Towards Better Benchmarking for Domain Generalization, "
    "CVPR 2023",
    read=read,
    folder="NICO++",
    steps=10001,
    target_sets=(("autumn", "rock"), ("dim", "grass"), ("outdoor", "water")),
    source=Source(
        elsewhere=(
            "https://nicochallenge.com/dataset and https://github.com/xxgege/NICO-plus (the "
            "authors' pages; the folders wanted are track_1/public_dg_0416/train/DOMAIN)",
            "https://huggingface.co/datasets/2018LZY/NICOplusplus",
        ),
    ),
)
