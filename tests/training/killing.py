"""Trains a run in children that are killed with SIGKILL, again and again, until it is done.

A program of its own, started by `test_resume`: it imports torch once and forks a child for every
attempt, before any thread of torch's exists. Prints what it did as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from steppe.training import make_config, train

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


def main(config: dict[str, object], folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    resolved = make_config(config)
    began = time.monotonic()
    _, status = os.waitpid(fork(lambda: train(resolved, folder / "whole")), 0)
    assert not status
    whole_seconds = time.monotonic() - began

    broken = folder / "broken"
    moments: list[str] = []
    while len(moments) < KILLS:
        child = fork(lambda: train(resolved, broken, resume=True))
        in_write = len(moments) % 2 == 1
        deadline = time.monotonic() + rng.uniform(0, whole_seconds / 6)
        while not finished(child):
            # Looked at often: a checkpoint of a small network is written within milliseconds.
            writing = in_write and any((broken / "checkpoint").glob(".writing-*"))
            if time.monotonic() > deadline and (writing or not in_write):
                kill(child)
                moments.append("write" if in_write else "random")
                break
        else:
            break
    _, status = os.waitpid(fork(lambda: train(resolved, broken, resume=True)), 0)
    assert not status
    print(json.dumps({"moments": moments, "whole_seconds": whole_seconds}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
