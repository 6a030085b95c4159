"""Trains runs in children that are killed with SIGKILL, again and again, until they are done.

For `tests.processes.run`: called in a process that has imported torch and computes nothing, which
forks a child for every attempt, before any thread of torch's exists and before a GPU is touched.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from steppe.domains.batches import Batch
from steppe.training import RunConfig, make_config, probe, schedules, train
from steppe.training.trainer import Trainer

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


def train_and_kill(config: dict[str, object], folder: Path, kills: Sequence[int]) -> None:
    """Trains once undisturbed, and once killed: after these updates, or else by chance.

    Leaves ``moments.json``: how it was killed each time.
    """
    resolved = make_config(config)
    began = time.monotonic()
    wait(fork(lambda: train(resolved, folder / "whole")))
    whole_seconds = time.monotonic() - began
    broken = folder / "broken"
    if kills:
        moments = ["update" for updates in kills if kill_after(resolved, broken, updates)]
    else:
        moments = kill_by_chance(resolved, broken, whole_seconds)
    wait(fork(lambda: train(resolved, broken, resume=True)))
    (folder / "moments.json").write_text(json.dumps(moments))


def wait(child: int) -> None:
    _, status = os.waitpid(child, 0)
    assert not status, f"a child failed with status {status}"


def kill_after(
    config: RunConfig, out: Path, updates: int, first: Callable[[], object] = lambda: None
) -> bool:
    """A child that does something else first, then trains and kills itself after these updates."""
    step = Trainer.step

    def dying(self: Trainer, batches: list[Batch]) -> None:
        step(self, batches)
        if self.done == updates:
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        first()
        Trainer.step = dying  # type: ignore[method-assign]
        train(config, out, resume=True)

    _, status = os.waitpid(fork(work), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    return True


def kill_in_stages(
    config: dict[str, object], folder: Path, kills: Sequence[tuple[int, int]]
) -> None:
    """Trains a run of two stages once undisturbed, and once killed in a stage after some updates.

    Its learning rate drops at every look but the first, and its linear probe tries two values.
    """
    schedules.PATIENCE, schedules.THRESHOLD, probe.GRID = 0, 0.9, (1e-3, 1e-2)
    resolved, step = make_config(config), Trainer.step
    wait(fork(lambda: train(resolved, folder / "whole")))
    for stage, updates in kills:

        def dying(self: Trainer, batches: list[Batch], at: object = (stage, updates)) -> None:
            step(self, batches)
            if (1 + (self.first_stage is not None), self.done) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        Trainer.step = dying  # type: ignore[method-assign]
        _, status = os.waitpid(fork(lambda: train(resolved, folder / "broken", resume=True)), 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
    Trainer.step = step  # type: ignore[method-assign]
    wait(fork(lambda: train(resolved, folder / "broken", resume=True)))


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


def kill_each_once(jobs: dict[str, dict[str, object]], folder: Path, after: int) -> None:
    """Many runs: each in a child of its own, undisturbed and then until it is killed.

    One more child goes on with all of them: what the killed had in memory is nowhere.
    """
    configs = {name: make_config(values) for name, values in jobs.items()}
    for name, config in configs.items():
        place = folder / name
        kill_after(config, place / "broken", after, lambda c=config, p=place: train(c, p / "whole"))

    def resume() -> None:
        for name, config in configs.items():
            train(config, folder / name / "broken", resume=True)

    wait(fork(resume))
