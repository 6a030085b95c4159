"""Make a pack: decode every image in a pool of processes; write all of it or nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import urllib.parse
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from steppe.console import Console
from steppe.durable import durable, sync_folder
from steppe.errors import UserError, reason

from . import pack
from .dataset import Dataset, Domain, Files, Pixels, UnreadableImage, decode
from .pack import FORMAT, INDEX, INDEX_SUM, ROW, Index, PackedDomain, Shard
from .pool import map_files
from .workshop import OLD, workshop

SIZE = 256
"""The default maximum length of an image's shorter side."""
SHARD_BYTES = 2**30
"""The maximum size of a shard, unless a single image is larger."""


def make(
    dataset: Dataset,
    home: Path,
    size: int = SIZE,
    *,
    force: bool = False,
    jobs: int | None = None,
    console: Console | None = None,
) -> Path:
    """Decode every image of a dataset into a pack, and return the pack's folder.

    Open the dataset from its files (``load(..., packed=False)``). Images whose shorter side exceeds
    `size` are shrunk. The pack appears only when it is complete. If images cannot be read, one
    error names them all and no pack is made.
    """
    path = pack.location(dataset.spec, home)
    if size < 1:
        raise UserError(f"the size of a pack must be >= 1 pixel, got {size}")
    if pack.present(dataset.spec, home) and not force:
        raise UserError(f"{path} already exists: pass --force to replace it")
    paths = []
    for domain in dataset.domains:
        if not isinstance(images := domain.images, Files):
            raise UserError(
                f"domain {domain.name!r} is not stored as image files: only those can be packed"
            )
        paths += [f"{images.root}/{name}" for name in images.names]
    unreadable: list[str] = []
    title, load = f"packing {dataset.spec.name}", partial(_load, size=size)
    mapped = map_files(load, paths, title=title, jobs=jobs, console=console)
    try:
        with workshop(path) as folder, closing(mapped) as loaded:
            entries = tuple(
                _write_domain(folder, domain, itertools.islice(loaded, len(domain)), unreadable)
                for domain in dataset.domains
            )
            if unreadable:
                raise UserError(
                    f"cannot pack {dataset.spec.name}: {len(unreadable)} of its images cannot be "
                    "read. Replace or delete them:\n" + "\n".join(unreadable)
                )
            index = Index(
                format=FORMAT,
                dataset=dataset.spec.name,
                size=size,
                classes=dataset.classes,
                domains=entries,
            )
            digest = _write(folder / INDEX, index.model_dump_json(indent=1).encode())
            _write(folder / INDEX_SUM, f"{digest}  {INDEX}\n".encode())
            _put(folder, path)
    except OSError as error:
        raise UserError(
            f"pack {path} could not be written: {error.strerror or error}. The partial pack was "
            "removed. Make room, choose another folder with --root, or pass a smaller --size."
        ) from error
    return path


class _Loaded(NamedTuple):
    pixels: Pixels
    shrunk: bool
    crc: int
    source: int


def _load(path: str, size: int) -> _Loaded | str:
    """Decode and shrink a file, or return why it cannot be read."""
    try:
        decoded = decode(Path(path))
        pixels = _shrink(decoded, size)
        shrunk = pixels.shape != decoded.shape
        return _Loaded(pixels, shrunk, zlib.crc32(pixels.data), os.stat(path).st_size)
    except UnreadableImage as error:
        return str(error)
    except OSError as error:  # deleted in the meantime
        return f"image {path} cannot be read: {reason(error)}"


def _shrink(pixels: Pixels, size: int) -> Pixels:
    """Shrink an image so that its shorter side is at most `size`."""
    height, width = pixels.shape[:2]
    shorter = min(height, width)
    if shorter <= size:
        return np.ascontiguousarray(pixels)
    # Rounds the longer side down, as torchvision's Resize does.
    target = (size * width // shorter, size * height // shorter)
    return np.asarray(Image.fromarray(pixels).resize(target, Image.Resampling.BILINEAR))


def _write_domain(
    folder: Path, domain: Domain, loaded: Iterable[_Loaded | str], unreadable: list[str]
) -> PackedDomain:
    """Write the files of a domain; append errors about unreadable images to `unreadable`."""
    stem = urllib.parse.quote(domain.name, safe=" +")  # a valid file name for any domain
    rows = np.zeros(len(domain), ROW)
    shrunk = False

    def images() -> Iterator[Pixels]:
        nonlocal shrunk
        for number, image in enumerate(loaded):
            if isinstance(image, str):
                unreadable.append(image)
                continue
            shrunk |= image.shrunk
            shape = image.pixels.shape
            rows[number] = (domain.labels[number], shape[0], shape[1], image.crc, image.source)
            yield image.pixels

    shards = _write_shards(folder, stem, images())
    names = [domain.images.name(index) for index in range(len(domain))]
    listed = {"names": names, "subsets": pack.plain_subsets(domain.subsets)}
    with durable(folder / f"{stem}.npy") as out:
        np.save(out, rows, allow_pickle=False)
    return PackedDomain(
        name=domain.name,
        stem=stem,
        names_sha256=_write(folder / f"{stem}.json", json.dumps(listed).encode()),
        rows_sha256=pack.checksum(folder / f"{stem}.npy"),
        shrunk=shrunk,
        shards=shards,
    )


def _write_shards(folder: Path, stem: str, images: Iterator[Pixels]) -> tuple[Shard, ...]:
    """Concatenate images into files of at most `SHARD_BYTES`."""
    shards: list[Shard] = []
    image = next(images, None)
    while image is not None:
        name = f"{stem}-{len(shards):03}.bin"
        count, size, digest = 0, 0, hashlib.sha256()
        with durable(folder / name) as out:
            while image is not None and (not count or size + image.nbytes <= SHARD_BYTES):
                out.write(image.data)
                digest.update(image.data)
                count, size = count + 1, size + image.nbytes
                image = next(images, None)
        shards.append(Shard(file=name, images=count, bytes=size, sha256=digest.hexdigest()))
    return tuple(shards)


def _write(path: Path, content: bytes) -> str:
    """Write a file and return its checksum."""
    with durable(path) as out:
        out.write(content)
    return hashlib.sha256(content).hexdigest()


def _put(folder: Path, path: Path) -> None:
    """Move a finished pack into place, and the old one where `workshop.recovered` finds it."""
    sync_folder(folder)
    if path.exists():
        os.rename(path, folder.with_name(OLD))
    os.rename(folder, path)
    sync_folder(path.parent)
