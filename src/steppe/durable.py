"""Files that are on the disk when a block ends, and not only on their way to it."""

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
    """A new file that is on the disk when the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Makes renames in a folder survive a power cut."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Writes a file in one piece: readers see the old one or the new one, whatever happens.

    A link is followed, the mode of the old file stays, and what is not a plain file
    (``/dev/stdout``) is written to as it is. An `OSError` names `path`, also where the system names
    nothing.
    """
    try:
        folder = os.path.realpath(path.parent)
        # A name in these folders stands for what a process has open, which is not ours to replace.
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
def full_disk_explained(path: Path) -> Iterator[None]:
    """Turns a failed write into an error that names the file and what is safe."""
    try:
        yield
    except OSError as error:
        remedy = "make room" if error.errno in _FULL else "fix that"
        raise RunError(
            f"{path} could not be written: {error.strerror or error}. What was written before is "
            f"whole: {remedy}, then continue with --resume."
        ) from error


def temporary_name(path: Path) -> Path:
    """What a file is called while `replace` writes it; shorter where there is no room for more."""
    return path.with_name(f".{os.fsdecode(os.fsencode(path.name)[:200])}.writing")


@contextmanager
def _temporary(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends, or is gone after an error.

    What a killed writer left is used again, so that it does not pile up. Another writer that is at
    work holds a lock on its own.
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
        temporary.unlink()  # a link that somebody left there leads elsewhere
        return os.open(temporary, flags, 0o666)


def _take(descriptor: int, temporary: Path) -> bool:
    """Whether nobody else writes to an open file, and it still has its name."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(temporary))
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # of a file system without locks
        return True
