"""Processes that start at once: they are forked from one that has torch already.

A process of `run` or `Steppe` is a real one, with memory, files and signals of its own; it can be
killed at any instant. Only the start of the interpreter is saved, and the imports, which take
seconds: those are the point of few tests.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.limits import seconds

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.preload"])
_ROOT = Path(__file__).parents[1]


def _start(target: Callable[..., object], *args: object) -> Any:
    process = _server.Process(target=target, args=args)
    place = os.getcwd()
    os.chdir(_ROOT)  # from where the first of all starts the server, which imports `tests.preload`
    try:
        process.start()
    finally:
        os.chdir(place)
    return process


def ranks(function: Callable[..., object], number: int, *args: object) -> None:
    """Calls ``function(rank, *args)`` in so many processes at once; none may fail."""
    running = [_start(function, rank, *args) for rank in range(number)]
    for process in running:
        process.join(seconds(1000))
    codes = [process.exitcode for process in running]
    for process in running:
        process.kill()
    assert codes == [0] * number, f"{function.__name__} ended with {codes}"


def run(function: Callable[..., object], *args: object, limit: float = 1000) -> None:
    """Calls a function in a process of its own, and waits for it; it must not fail."""
    process = _start(function, *args)
    process.join(seconds(limit))
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0, f"{function.__name__} ended with {process.exitcode}"


class Steppe:
    """``steppe WORDS`` in a process of its own, with some of `subprocess.Popen`'s methods.

    Args:
        words: the command line.
        folder: where files with its output and its errors go.
        variables: its environment; this process's unless given.
    """

    def __init__(
        self, *words: object, folder: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.files = [folder / f"{time.monotonic_ns()}.{name}" for name in ("out", "err")]
        for file in self.files:
            file.touch()
        surroundings = os.getcwd(), dict(os.environ if variables is None else variables)
        self._process = _start(_command, list(map(str, words)), self.files, *surroundings)
        self.pid: int = self._process.pid

    @property
    def stdout(self) -> str:
        return self.files[0].read_text()

    @property
    def stderr(self) -> str:
        return self.files[1].read_text()

    @property
    def returncode(self) -> int | None:
        """The exit code; negative, the signal that killed it."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, limit: float = 600) -> int:
        self._process.join(seconds(limit))
        assert self.returncode is not None, f"still runs: {self.stderr}"
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.returncode is None:
            self._process.kill()
            self._process.join()


def _command(words: Sequence[str], files: Sequence[Path], place: str, variables: Any) -> None:
    os.chdir(place)
    os.environ.clear()
    os.environ.update(variables)
    out, err = (os.open(file, os.O_WRONLY | os.O_APPEND) for file in files)
    fork_workers()
    sys.exit(command(words, out, err))


def command(words: Sequence[str], out: int, err: int) -> int:
    """Carries out ``steppe WORDS`` with these files open, in a process that is a copy."""
    import torch

    from steppe import cli

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)
    sys.argv = ["steppe", *map(str, words)]
    try:
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
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        output = log if isinstance(log, int) else os.open(log, flags, 0o600)
        first()
        code = command(words, output, output)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Forked:
    """In place of the `subprocess.Popen` of a launcher's original: it is forked from it."""

    def __init__(self, files: Sequence[int]) -> None:
        from steppe.sweeps import copies

        (theirs, self._in), (self._out, answers) = os.pipe(), os.pipe()
        self.stdin = os.fdopen(self._in, "wb")
        self.stdout = os.fdopen(self._out, "rb")
        self.pid = os.fork()
        if self.pid:
            os.close(theirs)
            os.close(answers)
            return
        code = 70
        try:
            self.stdin.close()
            self.stdout.close()
            os.setsid()
            os.dup2(theirs, 0)
            os.dup2(answers, 1)
            os.close(theirs)
            os.close(answers)
            copies.serve()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else bool(end.code)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def communicate(self) -> None:
        self.stdin.close()
        self.stdout.close()
        os.waitpid(self.pid, 0)


def fork_workers() -> None:
    """Has a launcher in this process, which computes nothing itself, fork its original."""
    from steppe.sweeps import copies

    copies._opened = _Forked  # type: ignore[assignment]
