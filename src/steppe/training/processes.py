"""The processes of a run: one, or several started by torchrun."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steppe.errors import UserError


@dataclass(frozen=True)
class Processes:
    """This process among the others; process 0 writes files and shows progress."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        if self.world == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in every process; also a barrier."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


@contextmanager
def join(device: str) -> Iterator[Processes]:
    """Join the process group that torchrun started, if any; each process takes its own GPU."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        mine = find_device(device)
        # CUDA graphs and streams use the current device, not that of the tensors.
        with torch.cuda.device(mine) if mine.type == "cuda" else nullcontext():
            yield Processes(mine)
        return
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    mine = find_device(device, local)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if mine.type == "cuda" else "gloo")
    try:
        yield Processes(mine, rank, world)
        if started:
            # A process that exits while others still write can be aborted by gloo's threads.
            dist.barrier()
    finally:
        if started:
            gc.collect()  # a DDP module in a cycle keeps the group's threads until exit: an abort
            dist.destroy_process_group()


def find_device(name: str, local: int | None = None) -> torch.device:
    """Return the device of that name after checking that it works."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and local is not None:
        name = f"cuda:{local}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # torch lacks support, or no such device
        reason = str(error).splitlines()[0]
        raise UserError(f"device {name!r} cannot be used: {reason}") from None
    return device
