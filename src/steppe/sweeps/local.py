"""Workers on this machine: one or more per GPU, or one per core."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from steppe.domains.pool import cores
from steppe.errors import UserError

from .copies import Copy, Original
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
        logs = sweep.path / "workers"
        with (
            sharing() if crew.per_gpu > 1 else nullcontext(Sharing()) as how,
            Original(how.files) as original,
        ):
            places = devices(crew)
            if how.refused and len(set(places)) < len(places) and "cpu" not in places:
                log.warning("the workers on a GPU take turns, without MPS: %s", how.refused)
            slots = [
                _Slot(
                    partial(
                        original.start,
                        crew.command(sweep.path, place)[3:],  # after `python -m steppe`
                        logs / f"local-{os.getpid()}-{number}.log",
                        how.variables,
                    )
                )
                for number, place in enumerate(places)
            ]
            return supervise(sweep, crew, show, _Slots(sweep, slots))


def devices(crew: Crew) -> list[str]:
    import torch  # while the original imports it too

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
    start: Callable[[], Copy]
    process: Copy | None = None
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
                slot.process = slot.start()
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
            process.terminate()
        for process in started:
            process.wait()
