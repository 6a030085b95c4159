"""Work on many files: a pool of processes, results in order, progress with the time left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from steppe.errors import UserError
from steppe.strangers import printable

if TYPE_CHECKING:
    from rich.console import Console

_BATCH = 8
"""Files that a process is handed at a time."""
_WORTHWHILE = 512
"""Files per process: fewer are decoded before another process has started."""
_LINES_EVERY = 5.0
"""Seconds between two lines of progress where there is no terminal."""

T = TypeVar("T")


def map_files(
    work: Callable[[str], T],
    paths: Sequence[str],
    *,
    title: str,
    jobs: int | None = None,
    console: Console | None = None,
) -> Generator[T, None, None]:
    """Yields ``work(path)`` for every path in order, computed by a pool of processes.

    Args:
        work: a function that can be pickled.
        paths: the files.
        title: what the progress is called.
        jobs: processes; as many as there are cores unless given, fewer for few files.
        console: where to show progress; nowhere unless given.
    """
    jobs = min(jobs or cores(), -(-len(paths) // _WORTHWHILE))
    results = map(work, paths) if jobs <= 1 else _pooled(work, paths, jobs)
    with progress(title, len(paths), console) as advance:
        for result in results:
            advance()
            yield result


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pooled(work: Callable[[str], T], paths: Sequence[str], jobs: int) -> Iterator[T]:
    # Not forked: this process has threads, and its lock must not live on in a child.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    batches = (paths[start : start + _BATCH] for start in range(0, len(paths), _BATCH))
    try:
        with ProcessPoolExecutor(jobs, context, initializer=start_worker) as pool:
            waiting: deque[Future[list[T]]] = deque()
            for batch in batches:
                waiting.append(pool.submit(_work_through, work, batch))
                if len(waiting) > 2 * jobs:  # decoded images wait in memory for their turn
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a process that decodes images was killed, possibly because memory ran out: rerun with "
            "fewer --jobs"
        ) from None


def _work_through(work: Callable[[str], T], paths: Sequence[str]) -> list[T]:
    return [work(path) for path in paths]


def start_worker() -> None:
    """Leaves Ctrl-C to the parent, and does not outlive it: a killed one cannot say goodbye."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def progress(title: str, total: int, console: Console | None) -> Iterator[Callable[[], None]]:
    """Shows a bar on a terminal and a line now and then elsewhere; yields the function to call."""
    if console is None:
        yield lambda: None
    elif console.is_terminal:
        from rich.markup import escape
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(escape(printable(title)), total=total)
            yield lambda: bar.advance(task)
    else:
        yield _lines(title, total, console)


def _lines(title: str, total: int, console: Console) -> Callable[[], None]:
    start = last = time.monotonic()
    done = 0

    def advance() -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if now - last >= _LINES_EVERY or done == total:
            left = timedelta(seconds=round((total - done) * (now - start) / done))
            line = f"{printable(title)}: {done:,} of {total:,}, {left} left"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            last = now

    return advance
