"""The store on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from steppe.domains.batches import Batch, Plan
from steppe.domains.dataset import Domain, Images, Indices, Pixels
from steppe.domains.device import Stack
from steppe.domains.pool import cores

from .ondevice import OnDevice, Work, work
from .shapes import channels

_READERS = 8  # threads that fill the device's memory, of the cores there are


class Resident(OnDevice):
    """Images, packed or in memory, that are all on the device."""

    def __init__(self, to: torch.device, domains: Sequence[Domain], compiled: bool = False) -> None:
        super().__init__(to, domains, compiled)
        counts = np.cumsum([0, *map(len, domains)]).tolist()
        self._first = {d.name: first for d, first in zip(domains, counts, strict=False)}
        self._stack = _everything(domains, self._heights, self._widths, to)
        size = self._stack.pixels.nbytes / 2**30
        self.where = f"on the device ({size:.2f} GiB), transformed there"

    def made(self, plan: Plan, numbers: range) -> Iterator[list[Batch]]:
        for number in numbers:
            drawn = plan.drawn(number)
            positions = np.concatenate([self._first[d.name] + chosen for d, chosen, _ in drawn])
            sides = self._heights[positions], self._widths[positions]
            moved = Work(*map(self.moved, work(drawn, positions, *sides)))
            yield self.transformed(self._stack, moved, plan.view)


def _everything(
    domains: Sequence[Domain], heights: Indices, widths: Indices, to: torch.device
) -> Stack:
    """All images of some domains on a device; packed ones are compared with their checksums."""
    depth = channels(domains[0].images)
    sizes = heights * widths * depth
    ends = np.cumsum(sizes)
    pixels = torch.empty(int(ends[-1]), dtype=torch.uint8, device=to)
    first = 0
    for domain in domains:  # one at a time: the host need not have room for all of them
        last = first + len(domain)
        begin = int(ends[first] - sizes[first])
        found = _read_all(domain.images, ends[first:last] - begin)
        pixels[begin : begin + len(found)].copy_(torch.from_numpy(found))
        first = last
    begins, rows, columns = (torch.from_numpy(v).to(to) for v in (ends - sizes, heights, widths))
    return Stack(pixels, begins, rows, columns, depth)


def _read_all(images: Images, ends: Indices) -> Pixels:
    """The pixels of all images, one after another, given where each ends."""
    buffer = np.empty(int(ends[-1]), np.uint8)

    def read(index: int) -> None:
        pixels = images[index]
        buffer[ends[index] - pixels.size : ends[index]] = pixels.reshape(-1)

    with ThreadPoolExecutor(min(_READERS, cores())) as threads:
        for _ in threads.map(read, range(len(images))):
            pass
    return buffer
