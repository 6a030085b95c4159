"""Files that are on the disk when a block ends, and not only on their way to it."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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

    A link is followed, and what is not a plain file (``/dev/stdout``) is written to as it is. An
    `OSError` names `path`, also where the system names nothing.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.writing")
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            path.write_bytes(data)
            return
        try:
            temporary.unlink(missing_ok=True)  # a link that somebody left there is not followed
            with durable(temporary) as file:
                file.write(data)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from error
