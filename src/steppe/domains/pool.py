"""Map a function over many files in a pool of processes, with results in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from steppe.console import Console, Meter
from steppe.errors import UserError

_BATCH = 8
"""Files per task of a process."""
_WORTHWHILE = 512
"""Minimum files per process: fewer are decoded before another process has started."""

T = TypeVar("T")


def map_files(
    work: Callable[[str], T],
    paths: Sequence[str],
    *,
    title: str,
    jobs: int | None = None,
    console: Console | None = None,
) -> Generator[T, None, None]:
    """Yield ``work(path)`` for every path in order, computed by a pool of processes.

    `work` must be picklable. The pool has `jobs` processes (default: one per core), and fewer for
    few files.
    """
    jobs = min(jobs or cores(), -(-len(paths) // _WORTHWHILE))
    results = map(work, paths) if jobs <= 1 else _pooled(work, paths, jobs)
    with Meter(title, len(paths), console=console, every=5) as meter:
        for result in results:
            meter.advance()
            yield result


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pooled(work: Callable[[str], T], paths: Sequence[str], jobs: int) -> Iterator[T]:
    # Not forked: this process has threads, and a child would keep the packer's lock.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    batches = (paths[start : start + _BATCH] for start in range(0, len(paths), _BATCH))
    try:
        with ProcessPoolExecutor(jobs, context, initializer=start_worker) as pool:
            waiting: deque[Future[list[T]]] = deque()
            for batch in batches:
                waiting.append(pool.submit(_work_through, work, batch))
                if len(waiting) > 2 * jobs:  # bounds the decoded images in memory
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a process that decodes images was killed, possibly out of memory: rerun with fewer "
            "--jobs"
        ) from None


def _work_through(work: Callable[[str], T], paths: Sequence[str]) -> list[T]:
    return [work(path) for path in paths]


def start_worker() -> None:
    """Ignore Ctrl-C, which the parent handles, and exit when the parent dies, even if killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
