"""Commands in forked children: torch is imported once, and every one of them starts at once.

A child is forked before any thread of torch's exists, and computes; its parent never does.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from steppe.domains import load
from steppe.sweeps import store, supervise, worker
from tests.limits import seconds
from tests.processes import fork, fork_workers

__all__ = ["Ended", "adopt", "alive", "children", "fork", "hurry", "wait"]

LIMIT = seconds(300)
"""A command that takes longer hangs; normal is less than a second."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER."""


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code; the signal, negative, if it was killed.
        said: its output and errors.
    """

    code: int
    said: str

    @property
    def told(self) -> str | None:
        """What is wrong with how it told its end; None if it told it well."""
        if "Traceback (most recent call last)" in self.said:
            return self.said.strip().splitlines()[-1]
        if self.code > 0 and "steppe: " not in self.said:
            return f"exit code {self.code} without an error: {self.said[-200:]!r}"
        return None


def adopt() -> None:
    """Makes this process the parent of whatever its children leave behind."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def wait(look: Callable[[], object] = lambda: None) -> dict[int, int]:
    """Waits for all children, also those adopted, and looks meanwhile; returns their exit codes.

    Raises:
        TimeoutError: one hangs; all were killed.
    """
    codes: dict[int, int] = {}
    deadline = time.monotonic() + LIMIT
    hangs = False
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            continue
        if hangs or time.monotonic() > deadline:
            hangs = True
            for child in children():
                os.kill(child, signal.SIGKILL)
        look()
        time.sleep(0.01)
    if hangs:
        raise TimeoutError(f"it still ran after {LIMIT:g} s")
    return codes


def children() -> Iterable[int]:
    """The pids of this process's children."""
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether a process still runs, and is not only waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def hurry() -> None:
    """Has launchers fork their workers, and everyone look more often than for runs of hours.

    The digits are rotated once, and not by every child.
    """
    load("RotatedDigits")
    fork_workers()
    supervise.LOOK_SECONDS = 0.1
    worker.IDLE_SECONDS = 0.1
    store.BEAT_SECONDS = 0.1
