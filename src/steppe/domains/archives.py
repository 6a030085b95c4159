"""Unpacking archives from strangers: nothing is written outside the folder asked for."""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path, PureWindowsPath
from typing import IO, cast

from steppe.errors import UserError

Member = tuple[str, IO[bytes] | None]
"""A member's name in the archive and its contents, or None for a folder."""

_DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    NotImplementedError,  # a compression that Python lacks
    FileExistsError,  # a member that is a file in one place and a folder in another
    IsADirectoryError,
    NotADirectoryError,
)


class UnsafeArchive(UserError):
    """An archive with a member that no dataset needs: outside the folder, a link, a device."""


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a zip, tar or gzip file into `folder`; a file of another kind is copied there.

    Only plain files and folders are written, with ordinary permissions. A link in a tar to another
    of its files becomes a copy. Any other link, a device or a name that leaves the folder makes the
    archive unsafe, and what was unpacked so far is the caller's to throw away.
    """
    read = next((read for suffix, read in _READERS if archive.name.endswith(suffix)), _read_plain)
    try:
        for name, contents in read(archive):
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
                    shutil.copyfileobj(contents, file, 1 << 20)
    except _DAMAGE as error:
        raise UserError(
            f"archive {archive} is damaged: {error}. Delete it and run the same command again."
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


def _read_zip(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)  # 0 where made on Windows
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _unsafe(archive, info.filename, "is a link or a device")
            if info.flag_bits & 1:
                raise zipfile.BadZipFile(f"{info.filename} is encrypted")
            yield info.filename, None if info.is_dir() else file.open(info)


def _read_tar(archive: Path) -> Iterator[Member]:
    with tarfile.open(archive) as file:
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


def _read_gzip(archive: Path) -> Iterator[Member]:
    with gzip.open(archive) as file:
        yield archive.name.removesuffix(".gz"), cast(IO[bytes], file)


def _read_plain(path: Path) -> Iterator[Member]:
    yield path.name, path.open("rb")


_READERS: tuple[tuple[str, Callable[[Path], Iterator[Member]]], ...] = (
    (".zip", _read_zip),
    (".tar", _read_tar),
    (".tar.gz", _read_tar),
    (".tgz", _read_tar),
    (".gz", _read_gzip),  # after .tar.gz
)
