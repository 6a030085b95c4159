"""NICO++: 60 classes in six public contexts, with the authors' list files or without.

The lists, ``autumn_train.txt`` and so on, say which images of a context are for training, for
validation and for testing. The public archive of images comes without them: a dataset read from
folders alone has random splits, and says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

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
    lists = _find_lists(root)
    if lists is not None:
        return _read_lists(root, lists)
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


class _Line(NamedTuple):
    """What a line of a list says."""

    where: str
    path: str
    label: int

    @property
    def class_name(self) -> str:
        return PurePosixPath(self.path).parent.name


def _find_lists(root: Path) -> Path | None:
    """The folder with the lists: all of them, or it is an error."""
    names = [f"{domain}_{subset}.txt" for domain in DOMAINS for subset in SUBSETS]
    for folder in (root / place for place in LIST_FOLDERS):
        missing = [name for name in names if not (folder / name).is_file()]
        if not missing:
            return folder
        if len(missing) < len(names):
            raise UserError(
                f"NICO++ in {folder} has {len(names) - len(missing)} of its {len(names)} list "
                f"files, missing are {', '.join(missing)}. Add them, or remove the others to have "
                "random splits."
            )
    return None


def _read_lists(root: Path, lists: Path) -> Contents:
    parts = {
        domain: {subset: _parse(lists / f"{domain}_{subset}.txt") for subset in SUBSETS}
        for domain in DOMAINS
    }
    classes = _class_names(
        line for domain in parts.values() for lines in domain.values() for line in lines
    )
    return classes, tuple(_domain(root, name, subsets) for name, subsets in parts.items())


def _parse(path: Path) -> list[_Line]:
    """The lines ``PATH LABEL`` of a list; a path may have blanks in it."""
    lines = []
    for number, text in enumerate(lines_of(path), start=1):
        if not text.strip():
            continue
        *image, label = text.rsplit(maxsplit=1)
        line = _Line(
            f"{path}:{number}",
            "".join(image),
            int(label) if label.isdecimal() and len(label) < 9 else -1,
        )
        if line.label < 0 or not line.class_name:
            raise UserError(f"{line.where}: expected 'CLASS/IMAGE LABEL', found {text!r}")
        require_text(path.parent / line.class_name)
        if not PurePosixPath(line.path).name.startswith("."):  # what a Mac leaves in every folder
            lines.append(line)
    if not lines:
        raise UserError(f"{path} lists no images")
    return lines


def _class_names(lines: Iterable[_Line]) -> tuple[str, ...]:
    """The classes in the order of their labels, which the lists must agree on."""
    names: dict[int, str] = {}
    labels: dict[str, int] = {}
    for line in lines:
        name, label = line.class_name, line.label
        if names.setdefault(label, name) != name or labels.setdefault(name, label) != label:
            raise UserError(
                f"{line.where}: class {name!r} has label {label}, but elsewhere "
                f"{names[label]!r} has label {labels[names[label]]}"
            )
    missing = sorted(set(range(len(names))) - set(names))
    if missing:
        raise UserError(
            f"the lists of NICO++ have {len(names)} classes, but none has label {missing[0]}"
        )
    return tuple(names[label] for label in sorted(names))


def _domain(root: Path, name: str, subsets: Mapping[str, Sequence[_Line]]) -> Domain:
    # One entry for an image, however often it is listed.
    labels = {line.path: line.label for lines in subsets.values() for line in lines}
    index = {path: i for i, path in enumerate(labels)}
    indices = {
        subset: np.array([index[line.path] for line in lines], dtype=np.int64)
        for subset, lines in subsets.items()
    }
    repeated = sum(map(len, subsets.values())) - len(index)
    if repeated:
        _log.warning("the lists of NICO++'s %s name %d images more than once", name, repeated)
    files = Files(_base(root, next(iter(index))), tuple(index))
    return Domain(name, files, np.array(list(labels.values()), dtype=np.int64), indices)


def _base(root: Path, path: str) -> Path:
    """The folder that listed paths start from: where the first of them is found, or else `root`."""
    places = (root / place for place in IMAGE_FOLDERS)
    return next((place for place in places if (place / path).is_file()), root)


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
