"""Start workers as copies of one process, the original, whose imports they share.

Imports take seconds, and longer when many processes import at the same time. The original imports
what workers need, computes nothing, and copies itself for each worker. It answers lines of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from runpy import run_module
from typing import Any, Self

from steppe.errors import RunError

_IMPORTS = ("steppe.cli", "steppe.sweeps.worker", "torch._dynamo")
"""What workers import sooner or later; the last for building an optimizer."""


class Original:
    """The original, seen from a launcher, which stops it at the end of a `with` block.

    Args:
        files: descriptors for all copies to inherit.
    """

    def __init__(self, files: Sequence[int] = ()) -> None:
        self._process = _opened(files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()  # it may still be importing
        self._process.communicate()

    def start(self, words: Sequence[str], output: Path, variables: Mapping[str, str]) -> Copy:
        """Run `steppe WORDS` in a copy, with its output in a file and additional variables."""
        output.parent.mkdir(exist_ok=True)
        return Copy(self, self.ask("start", list(words), str(output), dict(variables)))

    def ask(self, *request: object) -> Any:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{json.dumps(request)}\n".encode())
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            raise RunError("the process that starts workers ended unexpectedly") from None


@dataclass
class Copy:
    """A copy of the original, with some of `subprocess.Popen`'s methods."""

    original: Original
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.original.ask("poll", self.pid)
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code


def _opened(files: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A session of its own, so that workers get Ctrl-C once, from the launcher.
        start_new_session=True,
        pass_fds=files,
    )


def serve() -> None:
    """Be the original: answer requests until there are no more, and return, also in each copy."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may print among the answers
    for name in _IMPORTS:
        import_module(name)
    # Libraries may have started threads of their own, which they restart in copies.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    for line in requests:
        kind, *facts = json.loads(line)
        if kind == "poll":
            pid, status = os.waitpid(facts[0], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                requests.close()
                answers.close()
                _become(*facts)
                if sys.platform == "darwin":  # whose own libraries do not work in copies
                    os.execv(sys.executable, [sys.executable, "-m", *sys.argv])
                run_module("steppe", run_name="__main__")
                return
        print(json.dumps(answer), file=answers, flush=True)


def _become(words: Sequence[str], output: str, variables: Mapping[str, str]) -> None:
    """Turn this copy into `steppe WORDS`, with its output in a file."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.environ.update(variables)
    sys.argv = ["steppe", *words]


if __name__ == "__main__":
    serve()
