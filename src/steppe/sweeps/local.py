"""Workers on this machine: one for every CPU slot, or several for every GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from steppe import strangers
from steppe.domains.pool import cores
from steppe.errors import Interrupted, RunError, UserError
from steppe.training.interrupts import Interrupts

from .plan import Sweep
from .status import Status, look

LOOK_SECONDS = 1.0
DEATHS = 5
"""A worker that dies so often while no run is finished is not started again."""


def worker_command(sweep: Path, device: str, threads: int, stale: float) -> list[str]:
    """What a launcher starts: one worker."""
    return [
        *(sys.executable, "-m", "steppe", "sweep", "work", str(sweep)),
        *("--device", device, "--threads", str(threads), "--stale", f"{stale:g}"),
    ]


def devices(workers: int | None, per_gpu: int) -> list[str]:
    """The device of each worker: all GPUs, or as many CPU slots as there are cores."""
    gpus = torch.cuda.device_count()
    if gpus:
        slots = [f"cuda:{gpu}" for _ in range(per_gpu) for gpu in range(gpus)]
        if workers and workers > len(slots):
            raise UserError(
                f"--workers {workers} is more than {gpus} GPUs have room for: raise --per-gpu"
            )
        return slots[: workers or len(slots)]
    return ["cpu"] * (workers or cores())


@dataclass
class _Slot:
    command: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes]
    deaths: int = 0
    done: int = 0
    """Runs of the sweep that were done at the last death."""


def run_local(
    sweep: Sweep,
    *,
    workers: int | None = None,
    per_gpu: int = 1,
    threads: int = 1,
    stale: float = 60.0,
    show: Callable[[Status], None] = lambda status: None,
) -> Status:
    """Run a sweep to its end with workers on this machine.

    A worker that dies is started again. Others, on this machine or elsewhere, may work on the same
    sweep.

    Args:
        sweep: the sweep.
        workers: how many; as many as there are slots unless given.
        per_gpu: workers that share a GPU.
        threads: of each worker, on a CPU.
        stale: seconds after which a silent worker is taken for dead.
        show: is given the status, again and again.
    """
    status = look(sweep, stale)
    if status.over:
        return status
    logs = sweep.path / "workers"
    logs.mkdir(exist_ok=True)
    slots = []
    with Interrupts() as interrupts:
        try:
            for number, device in enumerate(devices(workers, per_gpu)):
                command = worker_command(sweep.path, device, threads, stale)
                log = logs / f"local-{os.getpid()}-{number}.log"
                slots.append(_Slot(command, log, _start(command, log)))
            while True:
                began = time.monotonic()  # of thousands of runs, a look takes a while
                status = look(sweep, stale)
                show(status)
                alive = [slot for slot in slots if slot.process.poll() is None]
                if status.over or interrupts.number is not None:
                    break
                # Given back, or added to the plan, after some had left.
                ended = [slot for slot in slots if slot.process.poll() == 0]
                for slot in ended[: status.counts["planned"]]:
                    slot.process = _start(slot.command, slot.log)
                    alive.append(slot)
                for slot in slots:
                    if slot.process.poll() not in (None, 0):
                        done = status.counts["done"]
                        slot.deaths = slot.deaths + 1 if done == slot.done else 1
                        slot.done = done
                        if slot.deaths <= DEATHS:
                            slot.process = _start(slot.command, slot.log)
                            alive.append(slot)
                if not alive:
                    if any(slot.process.returncode for slot in slots):
                        raise RunError(
                            f"the workers died again and again: {logs} says why; fix it, then: "
                            + strangers.command("steppe", "sweep", "run", sweep.path)
                        )
                    break
                time.sleep(max(LOOK_SECONDS, 5 * (time.monotonic() - began)))
        finally:
            _stop(slots, immediately=interrupts.number is not None)
        if interrupts.number is not None:
            raise Interrupted(interrupts.number)
    return look(sweep, stale)


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        # In a session of its own: Ctrl-C reaches it from here, once.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _stop(slots: Sequence[_Slot], immediately: bool) -> None:
    """Waits for workers to end by themselves, or has them save and end."""
    deadline = time.monotonic() + (0 if immediately else 10)
    while time.monotonic() < deadline and any(s.process.poll() is None for s in slots):
        time.sleep(0.05)
    for slot in slots:
        if slot.process.poll() is None:
            slot.process.send_signal(signal.SIGTERM)
    for slot in slots:
        slot.process.wait()
