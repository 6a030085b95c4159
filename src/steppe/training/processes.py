"""The processes of a run: one, or several started by torchrun."""

from __future__ import annotations

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
    """This process among the others; process 0 writes the files and talks."""

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
        """Every process's value, in all of them."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


@contextmanager
def join(device: str) -> Iterator[Processes]:
    """Joins the processes that torchrun started; alone otherwise.

    With several processes, each takes the GPU of its local rank.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        mine = find_device(device)
        # Graphs and streams are made on the current device, whatever the tensors are on.
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
            # One that leaves while others still write was seen to be aborted by gloo's threads.
            dist.barrier()
    finally:
        if started:
            dist.destroy_process_group()


def find_device(name: str, local: int | None = None) -> torch.device:
    """The device of that name, if it can be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and local is not None:
        name = f"cuda:{local}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # not built in, not there
        reason = str(error).splitlines()[0]
        raise UserError(f"device {name!r} cannot be used: {reason}") from None
    return device
