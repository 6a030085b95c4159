"""Extend a plan while its runs are executed, when results decide what to run next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from .store import Job
from .sweep import Sweep

LOOK_SECONDS = 2.0
"""Interval at which a growing plan checks for new results."""


@contextmanager
def growing(extend: Callable[[], bool]) -> Iterator[None]:
    """Call `extend` every few seconds during the block, until it returns True.

    Workers then find new runs without waiting for all others.
    """
    over = threading.Event()

    def add() -> None:
        took = 0.0
        while not over.wait(max(LOOK_SECONDS, 5 * took)):  # planning hundreds of runs is slow
            began = time.monotonic()
            if extend():
                return
            took = time.monotonic() - began

    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def diverged(sweep: Sweep, names: Iterable[str]) -> list[str]:
    """Runs that failed by divergence, which counts as a result of a search."""
    found = []
    for name in names:
        last = Job(sweep.folder(name)).last()
        if last is not None and last.kind == "failed" and last.facts.get("diverged"):
            found.append(name)
    return found
