"""Trains a run in children that are killed with SIGKILL, again and again, until it is done.

A program of its own, started by `test_resume`: it imports torch once and forks a child for every
attempt, before any thread of torch's exists and before a GPU is touched. Prints what it did, as
JSON.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from steppe.domains import load
from steppe.domains.batches import Batch
from steppe.training import RunConfig, make_config, train
from steppe.training.trainer import Trainer
from tests.training.axes import KILLED_AFTER

KILLS = 12
"""Half of them at a random moment, half in the middle of writing a checkpoint."""


def fork(work: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    try:
        work()
    except BaseException as error:  # the parent shows it
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)


def finished(child: int) -> bool:
    pid, status = os.waitpid(child, os.WNOHANG)
    assert not status, f"a child failed with status {status}"
    return pid == child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main(config: dict[str, object], folder: Path, kills: list[int]) -> None:
    """Trains once undisturbed, and once killed: after these updates, or else by chance."""
    resolved = make_config(config)
    began = time.monotonic()
    wait(fork(lambda: train(resolved, folder / "whole")))
    whole_seconds = time.monotonic() - began
    broken = folder / "broken"
    if kills:
        moments = [kill_after(resolved, broken, updates) for updates in kills]
    else:
        moments = kill_by_chance(resolved, broken, whole_seconds)
    wait(fork(lambda: train(resolved, broken, resume=True)))
    print(json.dumps({"moments": moments, "whole_seconds": whole_seconds}))


def wait(child: int) -> None:
    _, status = os.waitpid(child, 0)
    assert not status, f"a child failed with status {status}"


def kill_after(config: RunConfig, out: Path, updates: int) -> str:
    """A child that kills itself when it has made so many updates."""
    step = Trainer.step

    def dying(self: Trainer, batches: list[Batch]) -> None:
        step(self, batches)
        if self.done == updates:
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        Trainer.step = dying  # type: ignore[method-assign]
        train(config, out, resume=True)

    _, status = os.waitpid(fork(work), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    return "update"


def kill_by_chance(config: RunConfig, out: Path, whole_seconds: float) -> list[str]:
    """Children killed at random moments, and every other one while it writes a checkpoint."""
    rng = random.Random(0)
    moments: list[str] = []
    while len(moments) < KILLS:
        child = fork(lambda: train(config, out, resume=True))
        in_write = len(moments) % 2 == 1
        deadline = time.monotonic() + rng.uniform(0, whole_seconds / 6)
        while not finished(child):
            # Looked at often: a checkpoint of a small network is written within milliseconds.
            writing = in_write and any((out / "checkpoint").glob(".writing-*"))
            if time.monotonic() > deadline and (writing or not in_write):
                kill(child)
                moments.append("write" if in_write else "random")
                break
        else:  # done before its turn, on a machine that is less busy by now
            shutil.rmtree(out)
    return moments


def main_all(folder: Path) -> None:
    """Many runs, by name on the standard input: each undisturbed, and killed once."""
    # What every child would import by itself. (A backward pass here would be felt in the children.)
    import_module("torch._dynamo")
    load("RotatedDigits")
    for name, values in json.load(sys.stdin).items():
        resolved = make_config(values)
        wait(fork(lambda resolved=resolved, name=name: train(resolved, folder / name / "whole")))
        broken = folder / name / "broken"
        kill_after(resolved, broken, KILLED_AFTER)
        wait(fork(lambda resolved=resolved, broken=broken: train(resolved, broken, resume=True)))


if __name__ == "__main__":
    if sys.argv[1] == "--all":
        main_all(Path(sys.argv[2]))
    else:
        main(json.loads(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
