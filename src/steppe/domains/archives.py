"""Unpack untrusted archives without writing outside the given folder."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path, PureWindowsPath
from typing import IO, cast

from steppe.errors import UserError, reason

Member = tuple[str, IO[bytes] | None]
"""A member's name in the archive and its contents, or None for a folder."""

SHARE = 0.95
"""The fraction of the free disk space that an archive may fill."""
MEMBERS = 5_000_000
"""The maximum number of members."""
_HEADER = 2**24
"""The maximum size in bytes of a tar header, which is read into memory in one piece."""
_OURS = ["ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "EIO", "ENOENT", "EMFILE"]
"""Errors of this system. Any other OSError means that the archive's contents are impossible."""


class UnsafeArchive(UserError):
    """An archive has a member that leaves the folder, a link to elsewhere, or a device."""

    def __init__(self, archive: Path, name: str, why: str) -> None:
        super().__init__(
            f"archive {archive} is not safe to unpack: its member {name!r} {why}. Delete it."
        )


def _too_large(archive: Path) -> UserError:
    return UserError(
        f"archive {archive} does not fit into the free disk space when unpacked. Make room, or "
        "delete the archive if it should be smaller."
    )


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip, tar or gzip file into `folder`; copy any other file there.

    Only regular files and folders are written, with default permissions. A tar's link to another of
    its members becomes a copy. On an error, the caller must delete what was unpacked so far.

    Raises:
        UnsafeArchive: a member is another link or a device, or its name leaves the folder.
        UserError: the archive is damaged, or would fill the disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    room = int(SHARE * shutil.disk_usage(folder).free)
    try:
        for number, (name, contents) in enumerate(_members(archive, room)):
            if number >= MEMBERS:
                raise UserError(f"archive {archive} has more than {MEMBERS:,} members. Delete it.")
            with contents or nullcontext():
                path = PureWindowsPath(name)  # parses drives and both kinds of slashes
                if path.anchor or ".." in path.parts or "\0" in name:
                    raise UnsafeArchive(archive, name, "leaves the folder")
                if "__MACOSX" in path.parts or path.name.startswith("._"):
                    continue  # macOS metadata: ._dog.jpg would pass for an image
                target = folder.joinpath(*path.parts)
                if contents is None:
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    while chunk := contents.read(1 << 20):
                        room -= len(chunk)
                        if room < 0:
                            raise _too_large(archive)
                        file.write(chunk)
    except UserError:
        raise
    except Exception as error:  # readers raise all kinds of exceptions for damaged files
        if isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in _OURS:
            raise
        raise UserError(
            f"archive {archive} is damaged: {reason(error)}. Delete it and rerun the command."
        ) from None


def find_folder(root: Path, contents: Sequence[str]) -> Path | None:
    """Return the topmost folder, starting at `root`, that contains all of `contents`."""
    for path, folders, _ in os.walk(root):  # top down
        folders.sort()
        if all(Path(path, name).exists() for name in contents):
            return Path(path)
    return None


def _members(archive: Path, room: int) -> Iterator[Member]:
    if archive.name.endswith(".zip"):
        yield from _read_zip(archive, room)
    elif archive.name.endswith((".tar", ".tar.gz", ".tgz")):
        yield from _read_tar(archive)
    else:
        with gzip.open(archive) if archive.suffix == ".gz" else archive.open("rb") as file:
            yield archive.name.removesuffix(".gz"), cast(IO[bytes], file)


def _read_zip(archive: Path, room: int) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as file:
        # zipfile never extracts more than the announced size, so this detects a zip bomb early.
        if sum(info.file_size for info in file.infolist()) > room:
            raise _too_large(archive)
        for info in file.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)  # 0 in archives made on Windows
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise UnsafeArchive(archive, info.filename, "is a link or a device")
            if info.flag_bits & 1:
                raise zipfile.BadZipFile(f"{info.filename} is encrypted")
            yield info.filename, None if info.is_dir() else file.open(info)


def _read_tar(archive: Path) -> Iterator[Member]:
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
                # For a link, the contents of the member it points to, never of a file outside;
                # None for a device.
                contents = file.extractfile(info)
            except (KeyError, RecursionError):  # it points outside, or to itself
                contents = None
            if contents is None:
                raise UnsafeArchive(archive, info.name, "is a link or a device")
            yield info.name, contents


class _Headers:
    """A tar file that limits the size of headers, which could exhaust memory when unzipped."""

    def __init__(self, file: IO[bytes]) -> None:
        self._read, self.seek, self.tell = file.read, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _HEADER:
            raise tarfile.ReadError(f"it has a header of {size:,} bytes")
        return self._read(size)
