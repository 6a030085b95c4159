"""Remove what killed workers and planners left in a sweep."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from . import store
from .store import COPYING, Job
from .sweep import WRITING, Sweep

log = logging.getLogger("steppe")

_WORKER = r".+-[0-9]+(-[0-9a-f]{8})?"
_CLOCK = re.compile(rf"\.clock-{_WORKER}")
_EVENT = re.compile(rf"\.[0-9]{{5,}}\.{_WORKER}")
"""Short-lived files: clock probes, and events before they get their number."""
_COPY = re.compile(rf"\.attempt-([0-9]{{5,}}){re.escape(COPYING)}")


def tidy(sweep: Sweep, stale: float = store.STALE_SECONDS) -> None:
    """Remove files that no live worker uses.

    Short-lived files go when they are older than `stale` by the file system's clock; a worker that
    wakes up later creates new ones. Attempts go when their run has a result, and partial copies
    when their worker no longer owns the run.
    """
    now = store.clock(sweep.path)
    removed = 0
    found = [p for p in _entries(sweep.path) if _CLOCK.fullmatch(p.name) or p.name == WRITING]
    for name in sweep.names:
        job = Job(sweep.folder(name))
        inside = list(_entries(job.path))
        found += [path for path in inside if _CLOCK.fullmatch(path.name)]
        found += [path for path in _entries(job.path / "events") if _EVENT.fullmatch(path.name)]
        removed += _tidy_attempts(job, inside)
    for path in found:
        with suppress(OSError):  # another process was faster, or this one lacks permission
            if abs(now - path.lstat().st_mtime) >= stale:
                path.unlink()
                removed += 1
    if removed:
        log.info("%s: removed %d files left by killed workers", sweep.path, removed)


def _entries(folder: Path) -> Iterator[Path]:
    """The entries of a folder; a link could lead anywhere, so it is not followed."""
    if store.is_folder(folder):
        yield from folder.iterdir()


def _tidy_attempts(job: Job, inside: list[Path]) -> int:
    copies = {path: int(found[1]) for path in inside if (found := _COPY.fullmatch(path.name))}
    attempts = [path for path in inside if path.name.startswith("attempt-")]
    if not copies and not (attempts and store.is_folder(job.result)):
        return 0
    last = job.last()
    if last is None:
        return 0
    # After a damaged event, the attempts beside a result may still be needed.
    if last.kind == "done" and store.is_folder(job.result):
        job.clear()
        return len(copies) + len(attempts)
    superseded = [path for path, number in copies.items() if number < last.number]
    for path in superseded:
        shutil.rmtree(path, ignore_errors=True)
    return len(superseded)
