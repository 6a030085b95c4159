"""Keep the workers of a sweep running until it is over, for launchers that wait for the end."""

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
"""How often a dead worker is restarted before another run finishes."""


class Pool(Protocol):
    """The workers that a launcher started."""

    def tend(self, status: Status) -> bool:
        """Start missing workers; return whether any is alive."""
        ...

    def stop(self, immediately: bool) -> None:
        """Wait for the workers to exit, or tell them to save and exit."""
        ...


def supervise(sweep: Sweep, crew: Crew, show: Show, pool: Pool) -> Status:
    """Tend workers until the sweep is over, or until Ctrl-C or SIGTERM, then stop them."""
    with Interrupts() as interrupts:
        try:
            while True:
                began = time.monotonic()
                status = look(sweep, crew.stale)
                show(status)
                took = time.monotonic() - began  # a while, for thousands of runs
                if status.over or interrupts.number is not None or not pool.tend(status):
                    break
                time.sleep(max(LOOK_SECONDS, 5 * took))
        finally:
            pool.stop(immediately=interrupts.number is not None)
        if interrupts.number is not None:
            raise Interrupted(interrupts.number)
    return look(sweep, crew.stale)


def kept_dying(sweep: Sweep, why: str) -> RunError:
    again = strangers.command("steppe", "sweep", "run", sweep.path)
    return RunError(f"the workers keep dying{why}. Fix the cause and rerun: {again}")
