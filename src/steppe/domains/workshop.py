"""Where a pack is built, and what becomes of the one it replaces, however the packer ends.

A packer works in a hidden folder beside the pack's place, ``data/.PACS.pack.x1y2z3`` for
``data/PACS.pack``:

    lock        held while the packer lives
    new         the pack that it builds
    old         the pack that was there, from when it is moved aside until the new one has its place

So at every moment a whole pack is in its place, or is in ``old`` and is put back by whoever comes
next: another packer, or a run that looks for the pack.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, which refuses to remove a folder with an open file anyway
    fcntl = None  # type: ignore[assignment]

LOCK, NEW, OLD = "lock", "new", "old"
log = logging.getLogger("steppe")


@contextmanager
def workshop(path: Path) -> Iterator[Path]:
    """A new folder to build a pack in, near where it will be; gone at the end, whatever happens.

    Folders of packers that were killed are removed, and what they had moved aside is put back.
    """
    for left in workshops(path):
        if abandoned(left) and put_back(left, path):
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with open(made / LOCK, "w") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
            (made / NEW).mkdir()
            yield made / NEW
    finally:
        if put_back(made, path):
            shutil.rmtree(made, ignore_errors=True)


def workshops(path: Path) -> list[Path]:
    """The folders, beside the place of a pack, in which packers are building one or were."""
    try:
        entries = [*os.scandir(path.parent)]
    except OSError:
        return []
    name = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}")  # as mkdtemp ends it
    found = [Path(e) for e in entries if e.is_dir(follow_symlinks=False) and name.fullmatch(e.name)]
    return [folder for folder in found if {*os.listdir(folder)} <= {LOCK, NEW, OLD}]


def abandoned(workshop: Path) -> bool:
    """Whether a packer has ended without tidying up: its lock is free."""
    try:
        descriptor = os.open(workshop / LOCK, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:  # killed before it took the lock
        return True
    except OSError:
        return False
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def put_back(workshop: Path, path: Path) -> bool:
    """Puts the pack that a packer moved aside back in its place, if that is empty.

    Whether the workshop then has no pack that is needed.
    """
    try:
        os.rename(workshop / OLD, path)
    except FileNotFoundError:  # none was moved aside
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR):  # a pack is there
            return True
        log.warning("pack %s is in %s: %s", path, workshop / OLD, error.strerror)
        return False
    return True
