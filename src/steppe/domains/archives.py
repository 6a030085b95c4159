"""Unpacking archives from strangers: nothing is written outside the folder asked for."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import IO, cast

from steppe.errors import UserError, reason

Member = tuple[str, IO[bytes] | None]
"""A member's name in the archive and its contents, or None for a folder."""

SHARE = 0.95
"""Of the free disk space: what an archive may fill. The rest is for everybody else's files."""
MEMBERS = 5_000_000
"""Members that no dataset's archive has."""
_HEADER = 2**24
"""Bytes that no header of a tar has; they are read into memory in one piece."""
_OURS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.ENOENT,
        errno.EMFILE,
    }
)
"""Errors of this system. Any other means that an archive asks for what no system can do."""


class UnsafeArchive(UserError):
    """An archive with a member that no dataset needs: outside the folder, a link, a device."""


@dataclass
class _Room:
    """The bytes that an archive may still expand to."""

    archive: Path
    folder: Path
    left: int

    def take(self, size: int) -> None:
        if size > self.left:
            raise UserError(
                f"archive {self.archive} does not fit into the free space of {self.folder} when "
                "unpacked. Make room there, or delete the archive if it should be smaller."
            )
        self.left -= size


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a zip, tar or gzip file into `folder`; a file of another kind is copied there.

    Only plain files and folders are written, with ordinary permissions. A link in a tar to another
    of its files becomes a copy. Any other link, a device or a name that leaves the folder makes the
    archive unsafe, and what was unpacked so far is the caller's to throw away. An archive that
    would fill the disk is refused before it does.
    """
    read = next((read for suffix, read in _READERS if archive.name.endswith(suffix)), _read_plain)
    folder.mkdir(parents=True, exist_ok=True)
    room = _Room(archive, folder, int(SHARE * shutil.disk_usage(folder).free))
    try:
        for number, (name, contents) in enumerate(read(archive, room)):
            if number >= MEMBERS:
                raise UserError(f"archive {archive} has more than {MEMBERS:,} members. Delete it.")
            with contents if contents is not None else nullcontext():
                path = _inside(archive, name)
                if _is_junk(path):
                    continue
                target = folder / path
                if contents is None:
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    while chunk := contents.read(1 << 20):
                        room.take(len(chunk))
                        file.write(chunk)
    except UserError:
        raise
    except Exception as error:  # the readers raise anything when the bytes are wrong
        if isinstance(error, OSError) and error.errno in _OURS:
            raise
        raise UserError(
            f"archive {archive} is damaged: {reason(error)}. Delete it and run the same command "
            "again."
        ) from None


def find_folder(root: Path, contents: Sequence[str]) -> Path | None:
    """The folder, `root` or one below it, that holds all of `contents`; the topmost one."""
    for path, folders, _ in os.walk(root):  # top down
        folders.sort()
        if all(Path(path, name).exists() for name in contents):
            return Path(path)
    return None


def _inside(archive: Path, name: str) -> Path:
    """A member's path below the folder; an error if it would be elsewhere on any system."""
    path = PureWindowsPath(name)  # knows drives, and both kinds of slash
    if path.anchor or ".." in path.parts or "\0" in name:
        raise _unsafe(archive, name, "leaves the folder")
    return Path(*path.parts)


def _is_junk(path: Path) -> bool:
    """Whether macOS put a member there: ``._dog.jpg`` would pass for an image, and is none."""
    return "__MACOSX" in path.parts or path.name.startswith("._")


def _unsafe(archive: Path, name: str, why: str) -> UnsafeArchive:
    return UnsafeArchive(
        f"archive {archive} is not safe to unpack: its member {name!r} {why}. Delete it."
    )


def _read_zip(archive: Path, room: _Room) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as file:
        # None expands to more than it announces, so that a bomb is seen before the first byte.
        replace(room).take(sum(info.file_size for info in file.infolist()))
        for info in file.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)  # 0 where made on Windows
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _unsafe(archive, info.filename, "is a link or a device")
            if info.flag_bits & 1:
                raise zipfile.BadZipFile(f"{info.filename} is encrypted")
            yield info.filename, None if info.is_dir() else file.open(info)


def _read_tar(archive: Path, room: _Room) -> Iterator[Member]:
    with archive.open("rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
    with (
        gzip.open(archive) if compressed else archive.open("rb") as stream,
        tarfile.open(fileobj=cast(IO[bytes], _Headers(cast(IO[bytes], stream))), mode="r:") as file,
    ):
        for info in file:
            if info.isdir():
                yield info.name, None
                continue
            try:
                # For a link these are the contents of the member it names, and never those of a
                # file outside; None for a device.
                contents = file.extractfile(info)
            except (KeyError, RecursionError):  # it names no member, or itself
                contents = None
            if contents is None:
                raise _unsafe(archive, info.name, "is a link or a device")
            yield info.name, contents


class _Headers:
    """A tar whose headers, once unzipped, cannot fill the memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._read, self.seek, self.tell = file.read, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _HEADER:
            raise tarfile.ReadError(f"it has a header of {size:,} bytes")
        return self._read(size)


def _read_gzip(archive: Path, room: _Room) -> Iterator[Member]:
    with gzip.open(archive) as file:
        yield archive.name.removesuffix(".gz"), cast(IO[bytes], file)


def _read_plain(path: Path, room: _Room) -> Iterator[Member]:
    yield path.name, path.open("rb")


_READERS: tuple[tuple[str, Callable[[Path, _Room], Iterator[Member]]], ...] = (
    (".zip", _read_zip),
    (".tar", _read_tar),
    (".tar.gz", _read_tar),
    (".tgz", _read_tar),
    (".gz", _read_gzip),  # after .tar.gz
)
