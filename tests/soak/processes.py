"""Commands in forked children: torch is imported once, and every one of them starts at once.

A child is forked before any thread of torch's exists, and computes; its parent never does.
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from steppe import cli
from steppe.domains.datasets import digits
from steppe.sweeps import local, store, supervise, worker
from tests.limits import seconds

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


def fork(words: Sequence[str], log: Path | int, first: Callable[[], object] = lambda: None) -> int:
    """Starts ``steppe WORDS`` in a child, which does something else first; returns its pid.

    What it says goes to a file, or to one that is open.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        code = _command(words, log, first)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _command(words: Sequence[str], log: Path | int, first: Callable[[], object]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else 0)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    output = log if isinstance(log, int) else os.open(log, flags, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    sys.argv = ["steppe", *map(str, words)]
    try:
        first()
        cli.main()
        code: Any = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code or 0


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


class _Forked:
    """In place of `subprocess.Popen` for a launcher: its worker is forked from it."""

    def __init__(self, command: Sequence[str], *, stdout: Any, **_: Any) -> None:
        self.returncode: int | None = None
        self.pid = fork(command[3:], stdout.fileno(), os.setsid)  # less `python -m steppe`

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def hurry() -> None:
    """Has launchers fork their workers, and everyone look more often than for runs of hours.

    The digits are rotated once, and not by every child.
    """
    contents = digits.read()
    object.__setattr__(digits.ROTATED_DIGITS, "read", lambda root: contents)
    local.subprocess = SimpleNamespace(Popen=_Forked, DEVNULL=None, STDOUT=None)  # type: ignore[assignment]
    supervise.LOOK_SECONDS = 0.1
    worker.IDLE_SECONDS = 0.1
    store.BEAT_SECONDS = 0.1
