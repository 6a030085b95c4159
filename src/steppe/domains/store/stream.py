"""The store that reads ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from steppe.domains.batches import Batch, Drawn, Plan, Reading, read_ahead
from steppe.domains.dataset import Domain
from steppe.domains.device import Stack, stacked

from .ondevice import OnDevice, Work, mark_dynamic, work


class Stream(OnDevice):
    """Images, packed or in memory, whose pixels workers read ahead; 0: this process itself."""

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
        pin = self._device.type == "cuda"
        for pixels, todo in read_ahead(Reading(plan, _read), numbers, self.workers, pin):
            stack = Stack(*map(self.moved, pixels))
            mark_dynamic(stack)  # of another length in every batch
            yield self.transformed(stack, Work(*map(self.moved, todo)), plan.view)


def _read(drawn: Sequence[Drawn]) -> tuple[Stack, Work]:
    """The pixels of images of several domains, one after another, and what becomes of them."""
    stacks = [stacked(domain.images, chosen) for domain, chosen, _ in drawn]
    begins = np.cumsum([0, *(len(stack.pixels) for stack in stacks)]).tolist()
    offsets = [stack.offsets + begin for stack, begin in zip(stacks, begins, strict=False)]
    heights, widths = (
        torch.cat([getattr(stack, side) for stack in stacks]) for side in ("heights", "widths")
    )
    pixels = torch.cat([stack.pixels for stack in stacks])
    positions = np.arange(len(heights))
    stack = Stack(pixels, torch.cat(offsets), heights, widths, stacks[0].channels)
    return stack, work(drawn, positions, heights.numpy(), widths.numpy())
