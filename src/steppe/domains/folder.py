"""Datasets as folders, `root/domain/class/image`: DomainBed's layout, and anyone's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from steppe.errors import UserError
from steppe.strangers import printable, read

from .dataset import FORMATS, Contents, Domain, Files

SUFFIXES = tuple(FORMATS)
"""Files with these endings, in any case, are images; others are left alone."""


def subfolders(root: Path) -> list[str]:
    """The names of the folders in `root`, sorted as DomainBed sorts them; hidden ones aside."""
    with os.scandir(root) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def image_names(folder: Path, suffixes: tuple[str, ...] = SUFFIXES) -> Iterator[str]:
    """The images below a class folder at any depth, in a fixed order, as paths below `folder`."""
    for path, below_it, files in sorted(os.walk(folder, followlinks=True)):  # torchvision's order
        loops = [name for name in below_it if _leads_up(os.path.join(path, name))]
        if loops:
            raise UserError(f"{os.path.join(path, loops[0])} is a link to a folder above it")
        below = os.path.relpath(path, folder).replace(os.sep, "/")
        for name in sorted(files):
            if name.lower().endswith(suffixes):
                yield name if below == "." else f"{below}/{name}"


def _leads_up(path: str) -> bool:
    """Whether a folder is a link to one that it lies in, where a walk would not end."""
    if not os.path.islink(path):
        return False
    here, there = os.path.realpath(os.path.dirname(path)), os.path.realpath(path)
    return os.path.commonpath([here, there]) == there


def lines(path: Path) -> list[str]:
    """The lines of a list of images; names need not be UTF-8."""
    return read(path).decode(errors="surrogateescape").splitlines()


def class_names(root: Path, domains: Sequence[str]) -> tuple[str, ...]:
    """All classes that any of the domains has, sorted.

    The union, so that a domain that lacks a class does not shift the indices of the others.
    """
    found = {name: root / domain / name for domain in domains for name in subfolders(root / domain)}
    for path in found.values():
        require_text(path)
    return tuple(sorted(found))


def require_text(path: Path) -> None:
    """Refuses a folder whose name, or one above it, is not one line of UTF-8, as records are."""
    if len(str(path).splitlines()) > 1:
        raise UserError(f"the folder {str(path)!r} has a line break in its name: rename it")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"the folder {printable(path)} has a name that is not UTF-8: rename it"
        ) from None


def reader(domains: Sequence[str], left_out: str | None = None) -> Callable[[Path], Contents]:
    """What reads a dataset laid out as `root/domain/class/image`.

    A file `left_out` in its folder, where there is one, lists images that do not belong to it.
    """

    def read(root: Path) -> Contents:
        listed = root / left_out if left_out else None
        names = lines(listed) if listed and listed.exists() else ()
        return read_folder(root, domains, [name.strip() for name in names])

    return read


def read_folder(
    root: Path, domains: Sequence[str], exclude: Collection[str] = ()
) -> tuple[tuple[str, ...], tuple[Domain, ...]]:
    """Lists the images of `root/domain/class/image` but for those to `exclude`; none is opened."""
    found = subfolders(root) if root.is_dir() else []
    missing = [name for name in domains if name not in found]
    if missing:
        raise UserError(
            f"dataset {root.name!r} not found at {root}: expected folders {', '.join(domains)}; "
            f"found {', '.join(found) or 'none'}. Get it with 'steppe data get', or say where it "
            "is with --root."
        )
    classes = class_names(root, domains)
    excluded = frozenset(exclude)
    return classes, tuple(read_domain(root / name, name, classes, excluded) for name in domains)


def read_domain(
    root: Path, name: str, classes: Sequence[str], excluded: Collection[str] = ()
) -> Domain:
    """Lists the images of one domain, `root/class/image`."""
    names: list[str] = []
    labels: list[int] = []
    for label, class_name in enumerate(classes):
        images = [f"{class_name}/{image}" for image in image_names(root / class_name)]
        kept = [image for image in images if f"{name}/{image}" not in excluded]
        names += kept
        labels += [label] * len(kept)
    if not names:
        raise UserError(
            f"domain {name!r} has no images in {root}: expected CLASS/IMAGE below it, with "
            f"endings {', '.join(SUFFIXES)}"
        )
    return Domain(name, Files(root, names), np.array(labels, dtype=np.int64))
