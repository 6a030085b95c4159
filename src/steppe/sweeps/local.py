"""Workers on this machine: one or more per GPU, or one per core."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from steppe.domains.pool import cores
from steppe.errors import UserError

from .launch import Crew, Show, register_launcher
from .mps import Sharing, sharing
from .status import Status
from .supervise import RESTARTS, kept_dying, supervise
from .sweep import Sweep

log = logging.getLogger("steppe")


@register_launcher("local")
class Local:
    """Run workers on this machine, one per GPU or core, and restart those that die."""

    def start(self, sweep: Sweep, crew: Crew, show: Show) -> Status:
        logs, places = sweep.path / "workers", devices(crew)
        crowded = len(set(places)) < len(places) and places[0] != "cpu"
        with sharing() if crowded else nullcontext(Sharing()) as how:
            if how.refused:
                log.warning("workers take turns on a GPU, without MPS: %s", how.refused)
            slots = [
                _Slot(crew.command(sweep.path, place), logs / f"local-{os.getpid()}-{n}.log", how)
                for n, place in enumerate(places)
            ]
            return supervise(sweep, crew, show, _Slots(sweep, slots))


def devices(crew: Crew) -> list[str]:
    gpus = torch.cuda.device_count()
    if not gpus:
        return ["cpu"] * (crew.workers or cores())
    slots = [f"cuda:{gpu}" for _ in range(crew.per_gpu) for gpu in range(gpus)]
    if crew.workers and crew.workers > len(slots):
        raise UserError(
            f"--workers {crew.workers} needs more than {gpus} GPUs at --per-gpu {crew.per_gpu}: "
            "raise --per-gpu"
        )
    return slots[: crew.workers or len(slots)]


@dataclass
class _Slot:
    command: Sequence[str]
    log: Path
    sharing: Sharing
    process: subprocess.Popen[bytes] | None = None
    deaths: int = 0
    done: int = 0
    """Runs of the sweep that were done when the worker last died."""

    @property
    def at_work(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def dead_for_good(self, done: int) -> bool:
        """Count a death, given the number of done runs; return whether to give up the slot."""
        self.deaths = self.deaths + 1 if done == self.done else 1
        self.done = done
        return self.deaths > RESTARTS


@dataclass
class _Slots:
    sweep: Sweep
    slots: Sequence[_Slot]

    def tend(self, status: Status) -> bool:
        alive, untaken = 0, status.counts["planned"]
        for slot in self.slots:
            if not slot.at_work:
                if slot.process is not None and slot.process.returncode == 0:
                    # Runs were released, or added to the plan, after it exited.
                    untaken -= 1
                    if untaken < 0:
                        continue
                elif slot.process is not None and slot.dead_for_good(status.counts["done"]):
                    continue
                slot.process = _start(slot.command, slot.log, slot.sharing)
            alive += 1
        if not alive and any(slot.process and slot.process.returncode for slot in self.slots):
            raise kept_dying(self.sweep, f" (see the logs in {self.sweep.path / 'workers'})")
        return alive > 0

    def stop(self, immediately: bool) -> None:
        deadline = time.monotonic() + (0 if immediately else 10)
        while time.monotonic() < deadline and any(slot.at_work for slot in self.slots):
            time.sleep(0.05)
        started = [slot.process for slot in self.slots if slot.process is not None]
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait()


def _start(command: Sequence[str], output: Path, sharing: Sharing) -> subprocess.Popen[bytes]:
    output.parent.mkdir(exist_ok=True)
    with output.open("ab") as file:
        # A session of its own, so that the worker gets Ctrl-C once, from this process.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **sharing.variables},
            pass_fds=sharing.files,
        )
