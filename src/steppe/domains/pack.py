"""Packs: every image decoded once, as uint8 pixels in memory-mapped shards.

A pack is next to its dataset's folder, ``data/PACS.pack`` next to ``data/PACS``:

    index.json              the contents, with the sizes and checksums of the files below
    index.sha256            the checksum of index.json, in sha256sum's format
    art_painting.json       the names of the images, and the official subsets
    art_painting.npy        one `ROW` per image
    art_painting-000.bin    the RGB pixels of the images, concatenated

Images keep their aspect ratio and are never enlarged. An image whose shorter side is at most the
pack's size is stored unchanged, so training from the pack equals training from the files.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from steppe.console import Console, Meter
from steppe.errors import UserError, reason
from steppe.strangers import command, is_name, parse, printable, read

from .dataset import Contents, Dataset, Domain, Files, Indices, Pixels
from .workshop import recovered

if TYPE_CHECKING:
    from .spec import DatasetSpec

FORMAT = 1
ROW = np.dtype(
    [("label", "<i8"), ("height", "<i4"), ("width", "<i4"), ("crc", "<u4"), ("source", "<i8")]
)
"""Per image: its class, its shape, the CRC-32 of its pixels, the size of its file in bytes."""

_LARGEST = 2**36
"""The maximum number of pixels per image, so that the bytes of a domain fit into an int64."""
INDEX, INDEX_SUM = "index.json", "index.sha256"
log = logging.getLogger("steppe")


def _a_name(text: str) -> str:
    if not is_name(text):  # a stranger's pack must not lead out of its folder
        raise ValueError("is not the name of a file in the pack's folder")
    return text


_Name = Annotated[str, AfterValidator(_a_name)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(_Frozen):
    file: _Name
    images: Annotated[int, Field(ge=1, le=2**40)]
    bytes: Annotated[int, Field(ge=1, le=2**60)]
    sha256: str


class PackedDomain(_Frozen):
    """A domain in the index; the names of its files start with `stem`."""

    name: str
    stem: _Name
    names_sha256: str
    rows_sha256: str
    shrunk: bool
    """Whether an image was larger than the pack's size."""
    shards: tuple[Shard, ...]


class Index(_Frozen):
    """The contents of ``index.json``."""

    format: int
    dataset: str
    size: int
    classes: tuple[str, ...]
    domains: tuple[PackedDomain, ...]

    @property
    def shards(self) -> list[Shard]:
        return [shard for domain in self.domains for shard in domain.shards]


class _Unusable(Exception):
    """A pack cannot be used; the message says why."""


@dataclass(frozen=True, eq=False)
class Packed:
    """The images of a domain in a pack.

    Each process maps shards on first use, so a loader's workers can be forked or spawned. Every
    read verifies the image's checksum.
    """

    pack: Path
    dataset: str
    names: Sequence[str]
    rows: NDArray[np.void]
    shards: tuple[Shard, ...]
    shard_of: Indices
    offsets: Indices
    """Where each image begins in its shard."""
    _maps: dict[int, Pixels] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int, /) -> Pixels:
        row, start, number = self.rows[index], self.offsets[index], int(self.shard_of[index])
        shape = (int(row["height"]), int(row["width"]), 3)
        # A copy, which the caller may modify and whose checksum stays true.
        pixels: Pixels = np.array(self._shard(number)[start : start + np.prod(shape)])
        if zlib.crc32(pixels.data) != row["crc"]:
            raise self._damage(number, f"the pixels of {self.names[index]!r} fail their checksum")
        return pixels.reshape(shape)

    def name(self, index: int, /) -> str:
        return self.names[index]

    def _shard(self, number: int) -> Pixels:
        if number not in self._maps:
            shard = self.shards[number]
            try:
                # With a shape, a truncated file fails here and not with a bus error later.
                self._maps[number] = np.memmap(
                    self.pack / shard.file, np.uint8, "r", shape=(shard.bytes,)
                )
            except (OSError, ValueError) as error:
                raise self._damage(number, str(error)) from None
        return self._maps[number]

    def _damage(self, number: int, what: str) -> UserError:
        return UserError(
            f"pack {self.pack}: shard {self.shards[number].file} is damaged ({what}). "
            f"{remedy(self.dataset)}"
        )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_maps": {}}


def location(spec: DatasetSpec, home: Path) -> Path:
    """Return the path of a dataset's pack, which need not exist."""
    if spec.folder is None:
        raise UserError(f"cannot pack dataset {spec.name!r}: it is in memory and has no files")
    folder = home / spec.folder
    return folder.with_name(f"{folder.name}.pack")


def present(spec: DatasetSpec, home: Path) -> Path | None:
    """Return the pack's folder if it exists, after recovery from a killed packer."""
    if spec.folder is None:
        return None
    path = location(spec, home)
    if not path.is_dir():
        recovered(path)
    return path if path.is_dir() else None


def remedy(dataset: str) -> str:
    again = command("steppe", "data", "pack", dataset, "--force")
    return f"Copy the pack again from its original location, or rebuild it: {again}"


def find(spec: DatasetSpec, home: Path) -> Dataset | None:
    """Open the pack of a dataset if there is a valid one; warn about an invalid one.

    The index is checked in full and the shards by size; pixels are checked when they are read. If
    the image folder exists, its names, labels and file sizes must match the pack.
    """
    if (path := present(spec, home)) is None:
        return None
    try:
        index, domains = _open(path)
        if tuple(domain.name for domain in domains) != spec.domains:
            names = ", ".join(domain.name for domain in domains)
            raise _Unusable(f"its domains are not those of {spec.name}: {names}")
        if len(index.classes) != spec.n_classes:
            raise _Unusable(
                f"it has {len(index.classes)} classes, but {spec.name} has {spec.n_classes}"
            )
        for shard in index.shards:
            _check_shard(path, shard)
        if (folder := spec.where(home)).is_dir():
            _compare(spec, folder, index, domains)
    except _Unusable as error:
        log.warning("pack %s is not used: %s. %s", path, printable(error), remedy(spec.name))
        return None
    origin = f"pack in {path} (shorter side at most {index.size})"
    shrunk = any(domain.shrunk for domain in index.domains)
    return Dataset(spec, index.classes, domains, origin, index.size if shrunk else None)


def verify(path: Path, listed: Contents | None = None, console: Console | None = None) -> list[str]:
    """Read a whole pack and return its problems: checksums, sizes, missing files.

    The images in `listed`, if given, must be those that were packed.
    """
    try:
        index, domains = _open(path)
    except _Unusable as error:
        return [f"pack {path}: {printable(error)}"]
    problems = []
    with Meter(f"verifying {path.name}", len(index.shards), console=console, every=5) as meter:
        for shard in index.shards:
            try:
                _check_shard(path, shard)
                if checksum(path / shard.file) != shard.sha256:
                    raise _damaged(shard.file, INDEX)
            except _Unusable as error:
                problems.append(f"pack {path}: {error}")
            meter.advance()
    if not problems and listed and (changed := _difference(index, domains, *listed)):
        problems.append(f"pack {path} is out of date: {changed}")
    return problems


def _damaged(file: str, index: str) -> _Unusable:
    return _Unusable(f"{file} is damaged: its checksum does not match {index}")


def _open(path: Path) -> tuple[Index, tuple[Domain, ...]]:
    """Read everything in a pack except the pixels; raise `_Unusable` if it is invalid."""
    text = _read(path, INDEX)
    noted = _read(path, INDEX_SUM).decode(errors="replace")
    try:
        version = parse(text)["format"]
    except (ValueError, TypeError, LookupError):
        raise _Unusable(f"{INDEX} is damaged") from None
    if version != FORMAT:
        raise _Unusable(
            f"it has format {str(version)[:20]}, but this version of steppe reads format {FORMAT}"
        )
    if noted.split()[:1] != [hashlib.sha256(text).hexdigest()]:
        raise _damaged(INDEX, INDEX_SUM)
    try:
        index = Index.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _Unusable(f"{INDEX} is not valid: {where}: {first['msg']}") from None
    return index, tuple(_read_domain(path, index, entry) for entry in index.domains)


def _read(path: Path, file: str, sha256: str | None = None) -> bytes:
    try:
        content = read(path / file)
    except FileNotFoundError:
        raise _Unusable(f"{file} is missing") from None
    except OSError as error:
        raise _Unusable(f"{file} cannot be read: {error.strerror}") from None
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise _damaged(file, INDEX)
    return content


def _read_domain(path: Path, index: Index, entry: PackedDomain) -> Domain:
    names, subsets = _read_lists(path, f"{entry.stem}.json", entry.names_sha256)
    rows = _read_rows(path, f"{entry.stem}.npy", entry.rows_sha256)
    areas = rows["height"].astype(np.int64) * rows["width"]
    labels = rows["label"].astype(np.int64)
    counts = [shard.images for shard in entry.shards]
    if not len(names) == len(rows) == sum(counts) or not len(rows):
        wrong = f"has {len(names)} names and {len(rows)} rows for {sum(counts)} images"
    elif min(rows["height"].min(), rows["width"].min()) < 1 or areas.max() > _LARGEST:
        wrong = "has an image with an impossible shape"
    elif labels.min() < 0 or labels.max() >= len(index.classes):
        wrong = f"has labels that are not among its {len(index.classes)} classes"
    elif any(len(c) and (c.min() < 0 or c.max() >= len(rows)) for c in subsets.values()):
        wrong = "has official subsets with indices of images that do not exist"
    else:
        sizes = 3 * areas
        shard_of = np.repeat(np.arange(len(counts)), counts)
        begins = np.cumsum([0, *(shard.bytes for shard in entry.shards)])
        offsets = np.cumsum(sizes) - sizes - begins[shard_of]
        filled = np.add.reduceat(sizes, np.cumsum([0, *counts[:-1]]))
        odd = [s.file for s, n in zip(entry.shards, filled, strict=True) if n != s.bytes]
        if not odd:
            images = Packed(path, index.dataset, names, rows, entry.shards, shard_of, offsets)
            return Domain(entry.name, images, labels, subsets)
        wrong = f"has images that do not fill {odd[0]}"
    raise _Unusable(f"domain {entry.name!r} {wrong}")


def _read_lists(path: Path, file: str, sha256: str) -> tuple[list[str], dict[str, Indices]]:
    """Return the names of a domain's images, which need not be UTF-8, and its official subsets."""
    content = _read(path, file, sha256)
    try:
        listed: Any = parse(content)
        names, subsets = listed["names"], listed["subsets"]
        if not (isinstance(names, list) and all(map(_is_file_name, names))):
            raise ValueError("names are not file names")
        chosen = {key: np.array(numbers) for key, numbers in subsets.items()}
        if any(len(part) and (part.ndim, part.dtype.kind) != (1, "i") for part in chosen.values()):
            raise ValueError("subsets are not lists of numbers")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise _Unusable(f"{file} is not valid: {reason(error)}") from None
    return names, {key: part.astype(np.int64) for key, part in chosen.items()}


def _is_file_name(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(text.encode(errors="surrogateescape"))
    except UnicodeEncodeError:
        return False


def _read_rows(path: Path, file: str, sha256: str) -> NDArray[np.void]:
    """Return the rows of a ``.npy`` file, without allocating what its header claims."""
    content = _read(path, file, sha256)
    stream = io.BytesIO(content)
    try:
        np.lib.format.read_magic(stream)
        shape, _, kind = np.lib.format.read_array_header_1_0(stream)
        rows: NDArray[np.void] = np.frombuffer(content, ROW, offset=stream.tell())
    except Exception as error:  # numpy's reader may raise any exception
        raise _Unusable(f"{file} is not valid: {reason(error)}") from None
    if kind != ROW or shape != rows.shape:
        raise _Unusable(f"{file} is not valid: it does not contain a pack's rows")
    return rows


def _check_shard(path: Path, shard: Shard) -> None:
    file = path / shard.file
    if not file.is_file():
        raise _Unusable(f"{shard.file} is missing")
    if (found := file.stat().st_size) != shard.bytes:
        raise _Unusable(f"{shard.file} has {found:,} bytes instead of {shard.bytes:,}")


def _compare(spec: DatasetSpec, folder: Path, index: Index, domains: Sequence[Domain]) -> None:
    """Raise `_Unusable` if the images in the dataset's folder have changed."""
    try:
        classes, listed = spec.read(folder)
    except UserError as error:
        # The images may have been deleted to save space, leaving only the official lists.
        log.warning("using the pack of %s without comparing it to the folder: %s", folder, error)
        return
    if difference := _difference(index, domains, classes, listed):
        raise _Unusable(f"the images in {folder} have changed since it was made: {difference}")


def _difference(
    index: Index, packed: Sequence[Domain], classes: Sequence[str], listed: Sequence[Domain]
) -> str | None:
    if tuple(classes) != index.classes:
        return f"the classes are now {', '.join(classes[:8])}{', ...' if len(classes) > 8 else ''}"
    if [domain.name for domain in listed] != [domain.name for domain in packed]:
        return f"the domains are now {', '.join(domain.name for domain in listed)}"
    for old, new in zip(packed, listed, strict=True):
        assert isinstance(old.images, Packed)
        if not isinstance(new.images, Files):
            return f"{new.name} is no longer stored as image files"
        names = new.images.names
        if list(names) != list(old.images.names):
            before, after = frozenset(old.images.names), frozenset(names)
            return (
                f"in {new.name}, {len(after - before)} were added and {len(before - after)} removed"
            )
        if not np.array_equal(new.labels, old.labels):
            return f"in {new.name}, the labels have changed"
        if plain_subsets(new.subsets) != plain_subsets(old.subsets):
            return f"in {new.name}, the official subsets have changed"
        for name, size in zip(names, old.images.rows["source"].tolist(), strict=True):
            if not _has_size(path := f"{new.images.root}/{name}", size):
                return f"{path} has changed"
    return None


def _has_size(path: str, size: int) -> bool:
    try:
        return os.stat(path).st_size == size
    except OSError:
        return False


def plain_subsets(subsets: Mapping[str, Indices]) -> dict[str, list[int]]:
    return {key: chosen.tolist() for key, chosen in subsets.items()}


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
