"""NICO++: 60 classes in six public contexts, with or without the authors' list files.

The lists, ``autumn_train.txt`` and so on, divide the images of a context into training, validation
and test images. The public image archive does not include them. Without them, splits are random,
and a warning says so.
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
"""A file in the public archive that maps class names to labels."""

_log = logging.getLogger("steppe")


def read(root: Path) -> Contents:
    """Read the list files, or folders if there are no lists; both may be in several places."""
    names = [f"{domain}_{subset}.txt" for domain in DOMAINS for subset in SUBSETS]
    for lists in (root / place for place in LIST_FOLDERS):
        missing = [name for name in names if not (lists / name).is_file()]
        if not missing:
            return _read_lists(root, lists)
        if len(missing) < len(names):
            raise UserError(
                f"NICO++ in {lists} has {len(names) - len(missing)} of its {len(names)} list "
                f"files; missing: {', '.join(missing)}. Add them, or delete the others to use "
                "random splits."
            )
    for images in (root / place for place in IMAGE_FOLDERS):
        if (images / DOMAINS[0]).is_dir():
            _log.warning(
                "NICO++ in %s has no list files (%s_train.txt, ...): using random splits, not the "
                "official ones",
                root,
                DOMAINS[0],
            )
            return _in_official_order(root, *read_folder(images, DOMAINS))
    raise UserError(
        f"NICO++ not found at {root}: expected the list files {DOMAINS[0]}_train.txt, ... or the "
        f"folders {', '.join(DOMAINS)}, there or in {', '.join(IMAGE_FOLDERS[1:])}. Run "
        "'steppe data get NICO++' for instructions."
    )


def _read_lists(root: Path, lists: Path) -> Contents:
    classes: dict[str, int] = {}
    domains = []
    for name in DOMAINS:
        listed = {subset: _parse(lists / f"{name}_{subset}.txt", classes) for subset in SUBSETS}
        # One entry per image, however often it is listed.
        labels = {path: label for lines in listed.values() for path, label in lines}
        index = {path: i for i, path in enumerate(labels)}
        subsets = {
            subset: np.array([index[path] for path, _ in lines], dtype=np.int64)
            for subset, lines in listed.items()
        }
        if repeated := sum(map(len, listed.values())) - len(index):
            _log.warning("the NICO++ lists of %s repeat %d images", name, repeated)
        # Paths are relative to the place where the first image is found, `root` by default.
        first, places = next(iter(index)), (root / place for place in IMAGE_FOLDERS)
        base = next((place for place in places if (place / first).is_file()), root)
        numbers = np.array(list(labels.values()), dtype=np.int64)
        domains.append(Domain(name, Files(base, tuple(index)), numbers, subsets))
    unused = sorted({*range(len(classes))} - {*classes.values()})
    if unused:
        raise UserError(
            f"the lists of NICO++ have {len(classes)} classes, but none has label {unused[0]}"
        )
    return tuple(sorted(classes, key=classes.__getitem__)), tuple(domains)


def _parse(path: Path, classes: dict[str, int]) -> list[tuple[str, int]]:
    """Read the lines ``PATH LABEL`` of a list, and add its classes; paths may contain spaces."""
    lines = []
    for number, text in enumerate(lines_of(path), start=1):
        if not text.strip():
            continue
        *words, label = text.rsplit(maxsplit=1)
        image = PurePosixPath("".join(words))
        if not (label.isdecimal() and len(label) < 9 and image.parent.name):
            raise UserError(f"{path}:{number}: expected 'CLASS/IMAGE LABEL', found {text!r}")
        require_text(path.parent / image.parent.name)
        if not image.name.startswith("."):  # macOS metadata
            class_name, found = image.parent.name, int(label)
            if classes.get(class_name) != found:  # new, or a contradiction
                by_label = {known: other for other, known in classes.items()}
                other = by_label.get(found, class_name)
                if other in classes:
                    raise UserError(
                        f"{path}:{number}: class {class_name!r} has label {found}, but elsewhere "
                        f"{other!r} has label {classes[other]}"
                    )
                classes[class_name] = found
            lines.append(("".join(words), found))
    if not lines:
        raise UserError(f"{path} lists no images")
    return lines


def _in_official_order(
    root: Path, classes: tuple[str, ...], domains: tuple[Domain, ...]
) -> Contents:
    """Renumber the classes as the archive's label file does, if there is one."""
    path = next((p for p in (root / LABELS, root / "track_1" / LABELS) if p.is_file()), None)
    if path is None:
        return classes, domains
    try:
        official = parse(read_file(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    labels = list(official.values()) if isinstance(official, dict) else []
    if not labels or sorted(map(str, labels)) != sorted(map(str, range(len(labels)))):
        raise UserError(f"{path} should map class names to the labels 0, 1, 2, ...")
    unmatched = sorted(set(official) ^ set(classes))
    if unmatched:
        raise UserError(
            f"{path} and the folders have different classes: only one of them has "
            f"{', '.join(unmatched)}"
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
            "authors' pages; use the folders track_1/public_dg_0416/train/DOMAIN)",
            "https://huggingface.co/datasets/2018LZY/NICOplusplus",
        ),
    ),
)
