"""Build a pack, and replace an old one safely even if the packer is killed.

A packer works in a hidden folder next to the pack, ``data/.PACS.pack.x1y2z3`` for
``data/PACS.pack``:

    lock        held while the packer is alive
    new         the pack being built
    old         the previous pack, from when it is moved aside until the new one is in place

At every moment there is a complete pack, in place or in ``old``. The next packer, or the next run
that looks for the pack, moves ``old`` back.
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
except ImportError:  # Windows, where a folder with an open file cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

LOCK, NEW, OLD = "lock", "new", "old"
log = logging.getLogger("steppe")


@contextmanager
def workshop(path: Path) -> Iterator[Path]:
    """Make a temporary folder next to `path` to build a pack in; clean up after killed packers."""
    for left in recovered(path):
        shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with open(made / LOCK, "w") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
            (made / NEW).mkdir()
            yield made / NEW
    finally:
        if _put_back(made, path):
            shutil.rmtree(made, ignore_errors=True)


def recovered(path: Path) -> list[Path]:
    """Move back the pack that a killed packer moved aside; return the folders to delete."""
    try:
        entries = [*os.scandir(path.parent)]
    except OSError:
        return []
    name = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}")  # mkdtemp's suffix
    found = [Path(e) for e in entries if e.is_dir(follow_symlinks=False) and name.fullmatch(e.name)]
    ours = [folder for folder in found if {*os.listdir(folder)} <= {LOCK, NEW, OLD}]
    return [folder for folder in ours if _abandoned(folder) and _put_back(folder, path)]


def _abandoned(workshop: Path) -> bool:
    """Return whether a packer was killed: nobody holds its lock."""
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


def _put_back(workshop: Path, path: Path) -> bool:
    """Move the old pack back if there is none in place; return whether that left no pack behind."""
    try:
        os.rename(workshop / OLD, path)
    except FileNotFoundError:  # none was moved aside
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR):  # a pack is in place
            return True
        log.warning("cannot move pack %s to %s: %s", workshop / OLD, path, error.strerror)
        return False
    return True
