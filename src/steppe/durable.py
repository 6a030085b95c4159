"""Write files that survive a crash or power failure."""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from steppe.errors import RunError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that is synced to disk when the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make renames in a folder survive a power failure."""
    if os.name != "posix":  # other systems cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see either the old file or the new one.

    Follows links, keeps the old file's mode, and writes directly to anything that is not a regular
    file, such as ``/dev/stdout``. An `OSError` always names `path`.
    """
    try:
        folder = os.path.realpath(path.parent)
        # Entries of these folders are a process's open files, which must not be replaced.
        opened = folder in ("/dev", "/dev/fd") or re.fullmatch(r"/proc/.+/fd", folder)
        if path.exists() and (opened or not path.is_file()):
            path.write_bytes(data)
            return
        path = Path(os.path.realpath(path))
        with _temporary(path) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from error


@contextmanager
def full_disk_explained(path: Path, then: str = "continue with --resume") -> Iterator[None]:
    """Turn a failed write into an error that names the file and says how to continue."""
    try:
        yield
    except OSError as error:
        remedy = "Free some space" if error.errno in _FULL else "Fix it"
        raise RunError(
            f"{path} could not be written: {error.strerror or error}. Everything written earlier "
            f"is intact. {remedy}, then {then}."
        ) from error


def temporary_name(path: Path) -> Path:
    """The name of a file while `replace` writes it, truncated to what file systems allow."""
    return path.with_name(f".{os.fsdecode(os.fsencode(path.name)[:200])}.writing")


@contextmanager
def _temporary(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces `path` when the block ends, or is removed after an error.

    Reuses the file of a killed writer, so that such files do not pile up. An active writer holds a
    lock on its file.
    """
    temporary = temporary_name(path)
    while not _take(descriptor := _open(temporary), temporary):
        os.close(descriptor)
        temporary = temporary.with_name(f"{temporary.name}-{secrets.token_hex(4)}")
    with open(descriptor, "wb") as file:
        try:
            file.truncate()
            if path.exists():
                os.fchmod(descriptor, stat.S_IMODE(path.stat().st_mode))
            yield file
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _open(temporary: Path) -> int:
    flags = os.O_CREAT | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    try:
        return os.open(temporary, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        temporary.unlink()  # a link could lead anywhere
        return os.open(temporary, flags, 0o666)


def _take(descriptor: int, temporary: Path) -> bool:
    """Lock an open file; return whether that succeeded and the file still has its name."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(temporary))
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # the file system does not support locks
        return True
