"""Keeps workers at work until a sweep is over: what launchers do that wait for its end."""

from __future__ import annotations

import time
from typing import Protocol

from steppe import strangers
from steppe.errors import Interrupted, RunError
from steppe.training.interrupts import Interrupts

from .launch import Crew, Show
from .status import Status, look
from .sweep import Sweep

LOOK_SECONDS = 1.0
RESTARTS = 5
"""A worker that dies is started again so often while no run is finished."""


class Pool(Protocol):
    """Workers that were started here."""

    def tend(self, status: Status) -> bool:
        """Starts workers where some are missing; whether any is at work."""
        ...

    def stop(self, immediately: bool) -> None:
        """Waits for workers to end by themselves, or has them save and end."""
        ...


def supervise(sweep: Sweep, crew: Crew, show: Show, pool: Pool) -> Status:
    """Tends workers until a sweep is over, then stops them; Ctrl-C and SIGTERM do so at once."""
    with Interrupts() as interrupts:
        try:
            while True:
                began = time.monotonic()  # of thousands of runs, a look takes a while
                status = look(sweep, crew.stale)
                show(status)
                if status.over or interrupts.number is not None or not pool.tend(status):
                    break
                time.sleep(max(LOOK_SECONDS, 5 * (time.monotonic() - began)))
        finally:
            pool.stop(immediately=interrupts.number is not None)
        if interrupts.number is not None:
            raise Interrupted(interrupts.number)
    return look(sweep, crew.stale)


def died_again_and_again(sweep: Sweep, why: str) -> RunError:
    again = strangers.command("steppe", "sweep", "run", sweep.path)
    return RunError(f"the workers died again and again{why}; fix it, then: {again}")
