"""Datasets as folders `root/domain/class/image`: DomainBed's layout, and that of your own data."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from steppe.errors import UserError
from steppe.strangers import printable, read

from .dataset import Contents, Domain, Files

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".tif", ".tiff", ".webp", ".pgm")
"""Files with these suffixes, in any case, are images; all others are ignored."""


def subfolders(root: Path) -> list[str]:
    """Return the names of the folders in `root` in DomainBed's order, without hidden ones."""
    with os.scandir(root) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def image_names(folder: Path, suffixes: tuple[str, ...] = SUFFIXES) -> Iterator[str]:
    """Yield the images below a class folder at any depth, in torchvision's order, as paths."""
    for path, below_it, files in sorted(os.walk(folder, followlinks=True)):
        loops = [name for name in below_it if _leads_up(os.path.join(path, name))]
        if loops:
            raise UserError(f"{os.path.join(path, loops[0])} is a link to one of its own parents")
        below = os.path.relpath(path, folder).replace(os.sep, "/")
        for name in sorted(files):
            if name.lower().endswith(suffixes):
                yield name if below == "." else f"{below}/{name}"


def _leads_up(path: str) -> bool:
    """Return whether a folder is a link to one of its parents, which would make a walk endless."""
    if not os.path.islink(path):
        return False
    here, there = os.path.realpath(os.path.dirname(path)), os.path.realpath(path)
    return os.path.commonpath([here, there]) == there


def lines(path: Path) -> list[str]:
    """Return the lines of an image list; names need not be UTF-8."""
    return read(path).decode(errors="surrogateescape").splitlines()


def class_names(root: Path, domains: Sequence[str]) -> tuple[str, ...]:
    """Return the sorted union of the domains' classes.

    With the union, a class missing from one domain does not shift the other classes' indices.
    """
    found = {name: root / domain / name for domain in domains for name in subfolders(root / domain)}
    for path in found.values():
        require_text(path)
    return tuple(sorted(found))


def require_text(path: Path) -> None:
    """Raise an error if a folder's path is not one line of UTF-8: records could not store it."""
    if len(str(path).splitlines()) > 1:
        raise UserError(f"the name of folder {str(path)!r} has a line break: rename it")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"the name of folder {printable(path)} is not UTF-8: rename it") from None


def reader(
    name: str, domains: Sequence[str], left_out: str | None = None
) -> Callable[[Path], Contents]:
    """Return a function that reads the named dataset, laid out as `root/domain/class/image`.

    The optional file `left_out` in the dataset's folder lists images to exclude.
    """

    def read(root: Path) -> Contents:
        listed = root / left_out if left_out else None
        images = lines(listed) if listed and listed.exists() else ()
        return read_folder(root, domains, [image.strip() for image in images], name)

    return read


def read_folder(
    root: Path, domains: Sequence[str], exclude: Collection[str] = (), name: str = ""
) -> tuple[tuple[str, ...], tuple[Domain, ...]]:
    """List the images of `root/domain/class/image` without those in `exclude`; open none."""
    found = subfolders(root) if root.is_dir() else []
    missing = [domain for domain in domains if domain not in found]
    if missing:
        name = name or root.name
        raise UserError(
            f"dataset {name!r} not found at {root}: expected folders {', '.join(domains)}; "
            f"found {', '.join(found) or 'none'}. Download it with 'steppe data get {name}', or "
            "pass its location with --root."
        )
    classes = class_names(root, domains)
    excluded = frozenset(exclude)
    return classes, tuple(read_domain(root / d, d, classes, excluded) for d in domains)


def read_domain(
    root: Path, name: str, classes: Sequence[str], excluded: Collection[str] = ()
) -> Domain:
    """List the images of one domain, `root/class/image`."""
    names: list[str] = []
    labels: list[int] = []
    for label, class_name in enumerate(classes):
        images = [f"{class_name}/{image}" for image in image_names(root / class_name)]
        kept = [image for image in images if f"{name}/{image}" not in excluded]
        names += kept
        labels += [label] * len(kept)
    if not names:
        raise UserError(
            f"domain {name!r} has no images in {root}: expected files CLASS/IMAGE that end in "
            f"{', '.join(SUFFIXES)}"
        )
    return Domain(name, Files(root, names), np.array(labels, dtype=np.int64))
