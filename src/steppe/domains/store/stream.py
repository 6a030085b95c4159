"""The store that reads ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from steppe.domains.batches import Batch, Drawn, Plan, Reading, read_ahead
from steppe.domains.dataset import Domain
from steppe.domains.device import Stack, stacked

from .ondevice import OnDevice, Work, mark_dynamic, work


class Stream(OnDevice):
    """Images whose pixels workers read ahead.

    Args:
        to: the device.
        domains: the domains of the run; their images are packed or in memory.
        workers: how many; 0: this process itself.
        compiled: whether transforms go through `torch.compile`.
    """

    def __init__(
        self,
        to: torch.device,
        domains: Sequence[Domain],
        workers: int,
        compiled: bool = False,
    ) -> None:
        super().__init__(to, domains, compiled)
        self.workers = workers
        self.where = f"streamed by {workers} workers, transformed on the device"

    def made(self, plan: Plan, numbers: range) -> Iterator[list[Batch]]:
        """Transforms what workers have read."""
        pin = self._device.type == "cuda"
        for raw in read_ahead(Reading(plan, _read), numbers, self.workers, pin):
            stack = Raw(*map(self.moved, raw.stack))
            mark_dynamic(stack)  # of another length in every batch
            yield self.transformed(Stack(*stack), Work(*map(self.moved, raw.work)), plan.view)


class Raw(NamedTuple):
    """A `Stack`, as a loader can pin it."""

    pixels: Tensor
    offsets: Tensor
    heights: Tensor
    widths: Tensor
    channels: int


class _Read(NamedTuple):
    """Pixels of images as they were read, and what is to become of them."""

    stack: Raw
    work: Work


def _read(drawn: Sequence[Drawn]) -> _Read:
    """The pixels of images of several domains, one after another."""
    stacks = [stacked(domain.images, chosen) for domain, chosen, _ in drawn]
    begins = np.cumsum([0, *(len(stack.pixels) for stack in stacks)]).tolist()
    offsets = [stack.offsets + begin for stack, begin in zip(stacks, begins, strict=False)]
    heights, widths = (
        torch.cat([getattr(stack, side) for stack in stacks]) for side in ("heights", "widths")
    )
    pixels = torch.cat([stack.pixels for stack in stacks])
    positions = np.arange(len(heights))
    return _Read(
        Raw(pixels, torch.cat(offsets), heights, widths, stacks[0].channels),
        work(drawn, positions, heights.numpy(), widths.numpy()),
    )
