"""The two stores whose pixels are transformed on the device."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from steppe.domains import device
from steppe.domains.augment import crop_boxes
from steppe.domains.batches import Batch, Drawn, Plan, Reading, View, read_ahead
from steppe.domains.dataset import Arrays, Domain, Images, Indices
from steppe.domains.device import Stack, stacked
from steppe.domains.pack import Packed
from steppe.domains.pool import cores
from steppe.errors import UserError

from .host import Store

_READERS = 8  # threads that fill the device's memory, of the cores there are
log = logging.getLogger("steppe")


def size(domains: Sequence[Domain]) -> int:
    """The bytes of all pixels of some domains, packed or in memory."""
    return sum(int((np.prod(_shapes(d), axis=0)).sum()) * _channels(d.images) for d in domains)


def _shapes(domain: Domain) -> tuple[Indices, Indices]:
    """Heights and widths of a domain's images, without reading them."""
    images = domain.images
    if isinstance(images, Packed):
        return images.rows["height"].astype(np.int64), images.rows["width"].astype(np.int64)
    if isinstance(images, Arrays):
        height, width = images.pixels.shape[1:3]
        return np.full(len(images), height), np.full(len(images), width)
    raise UserError(
        f"the images of {domain.name} are files, whose pixels can neither be kept on the device "
        "nor streamed: pack them with 'steppe data pack', or set data=host"
    )


def _channels(images: Images) -> int:
    return images.pixels.shape[3] if isinstance(images, Arrays) else 3


class _Work(NamedTuple):
    """Images to transform: which of a stack, their classes, and their randomness.

    `sizes` says how many are of each domain.
    """

    chosen: Tensor
    labels: Tensor
    draws: Tensor | None
    boxes: Tensor | None
    sizes: tuple[int, ...]


class OnDevice(Store):
    """Transforms pixels on the device, the next batch while one is used."""

    def __init__(self, to: torch.device, domains: Sequence[Domain], compiled: bool) -> None:
        self._device = to
        first, self._depth = domains[0], _channels(domains[0].images)
        for other in domains:
            if (depth := _channels(other.images)) != self._depth:
                raise UserError(
                    f"images of {first.name} have {self._depth} channels and those of "
                    f"{other.name} {depth}: they cannot be in one batch"
                )
        self._heights, self._widths = (
            np.concatenate(sides) for sides in zip(*map(_shapes, domains), strict=True)
        )
        self._crop_reach = cache(partial(device.crop_reach, self._heights, self._widths))
        self._whole_reach = cache(partial(device.whole_reach, self._heights, self._widths))
        self._augment = _compiled(device.augment) if compiled else device.augment
        self._resize = _compiled(device.resize) if compiled else device.resize

    def batches(self, plan: Plan, numbers: range) -> Iterator[list[Batch]]:
        yield from _ahead(self.made(plan, numbers), self._device)

    @abstractmethod
    def made(self, plan: Plan, numbers: range) -> Iterator[list[Batch]]:
        """The batches of a plan, when they are asked for."""

    def transformed(self, stack: Stack, work: _Work, view: View) -> list[Batch]:
        """Batches of images in a stack, one of each domain."""
        work = _Work(*map(self.moved, work))
        if len(work.chosen) > 1:  # one compilation for all batch sizes
            _mark_dynamic(work)
        if work.draws is None or work.boxes is None:
            images = self._resize(stack, work.chosen, view.size, self._whole_reach(view.size))
        else:
            reach = self._crop_reach(view.size)
            images = self._augment(stack, work.chosen, work.draws, work.boxes, view.size, reach)
        return list(map(Batch, images.split(work.sizes), work.labels.split(work.sizes)))

    def moved(self, value: Any) -> Any:
        """A tensor on the device, by way of pinned memory; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        if self._device.type == "cuda" and not value.is_pinned():
            value = value.pin_memory()  # so that the host need not wait
        return value.to(self._device, non_blocking=True)


class Stream(OnDevice):
    """Images, packed or in memory, whose pixels workers read ahead; 0: this process itself."""

    def __init__(
        self, to: torch.device, domains: Sequence[Domain], workers: int, compiled: bool = False
    ) -> None:
        super().__init__(to, domains, compiled)
        self.workers = workers
        self.where = f"streamed by {workers} workers, transformed on the device"

    def made(self, plan: Plan, numbers: range) -> Iterator[list[Batch]]:
        pin = self._device.type == "cuda"
        for pixels, work in read_ahead(Reading(plan, _read), numbers, self.workers, pin):
            stack = Stack(*map(self.moved, pixels))
            _mark_dynamic(stack)  # of another length in every batch
            yield self.transformed(stack, work, plan.view)


class Resident(OnDevice):
    """Images, packed or in memory, that are all on the device."""

    def __init__(self, to: torch.device, domains: Sequence[Domain], compiled: bool = False) -> None:
        super().__init__(to, domains, compiled)
        sizes = self._heights * self._widths * self._depth
        begins = np.cumsum(sizes) - sizes
        pixels = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=to)
        self._first: dict[str, int] = {}
        first = begin = 0
        for domain in domains:  # one at a time: the host need not have room for all of them
            self._first[domain.name] = first
            last = first + len(domain)
            found = _read_all(domain.images, np.cumsum(sizes[first:last]))
            pixels[begin : begin + len(found)].copy_(found)
            first, begin = last, begin + len(found)
        offsets, heights, widths = (
            torch.from_numpy(values).to(to) for values in (begins, self._heights, self._widths)
        )
        self._stack = Stack(pixels, offsets, heights, widths, self._depth)
        self.where = f"on the device ({pixels.nbytes / 2**30:.2f} GiB), transformed there"

    def made(self, plan: Plan, numbers: range) -> Iterator[list[Batch]]:
        for number in numbers:
            drawn = plan.drawn(number)
            positions = np.concatenate([self._first[d.name] + chosen for d, chosen, _ in drawn])
            work = _work(drawn, positions, self._heights[positions], self._widths[positions])
            yield self.transformed(self._stack, work, plan.view)


def _read_all(images: Images, ends: Indices) -> Tensor:
    """The pixels of all images, one after another, given where each ends."""
    buffer = np.empty(int(ends[-1]), np.uint8)

    def read(index: int) -> None:
        pixels = images[index]
        buffer[ends[index] - pixels.size : ends[index]] = pixels.reshape(-1)

    with ThreadPoolExecutor(min(_READERS, cores())) as threads:
        for _ in threads.map(read, range(len(images))):
            pass
    return torch.from_numpy(buffer)


def _read(drawn: Sequence[Drawn]) -> tuple[Stack, _Work]:
    """The pixels of images of several domains, one after another, and what becomes of them."""
    stacks = [stacked(domain.images, chosen) for domain, chosen, _ in drawn]
    begins = np.cumsum([0, *(len(stack.pixels) for stack in stacks)]).tolist()
    offsets = [stack.offsets + begin for stack, begin in zip(stacks, begins, strict=False)]
    pixels, heights, widths = (
        torch.cat([getattr(stack, part) for stack in stacks])
        for part in ("pixels", "heights", "widths")
    )
    stack = Stack(pixels, torch.cat(offsets), heights, widths, stacks[0].channels)
    return stack, _work(drawn, np.arange(len(heights)), heights.numpy(), widths.numpy())


def _work(drawn: Sequence[Drawn], positions: Indices, heights: Indices, widths: Indices) -> _Work:
    """What is to be done with images, given where they are in a stack, and their sides."""
    sizes = tuple(len(chosen) for _, chosen, _ in drawn)
    labels = np.concatenate([domain.labels[chosen] for domain, chosen, _ in drawn])
    where, classes = torch.from_numpy(positions), torch.from_numpy(labels)
    found = [draws for _, _, draws in drawn if draws is not None]
    if not found:
        return _Work(where, classes, None, None, sizes)
    draws = np.concatenate(found)
    boxes = crop_boxes(heights, widths, draws)
    return _Work(where, classes, torch.from_numpy(draws), torch.from_numpy(boxes), sizes)


def _mark_dynamic(values: Sequence[Any]) -> None:
    """Tells the compiler that the first dimension of these tensors changes."""
    for value in values:
        if isinstance(value, Tensor):
            torch._dynamo.maybe_mark_dynamic(value, 0)


def _compiled(transform: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A transform through `torch.compile`, or as it is where that cannot be done."""
    chosen = torch.compile(transform)

    def call(*args: Any) -> Tensor:
        nonlocal chosen
        from torch._dynamo.exc import TorchDynamoException

        try:
            return chosen(*args)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
            log.warning("transforms are not compiled, and slower: %s", reason)
            chosen = transform
        return chosen(*args)

    return call


def _ahead(items: Iterator[list[Batch]], to: torch.device) -> Iterator[list[Batch]]:
    """Items made on a GPU beside what it does otherwise, each one while the one before is used."""
    if to.type != "cuda":
        yield from items
        return
    stream = torch.cuda.Stream(to)

    def begin() -> tuple[list[Batch], torch.cuda.Event] | None:
        with torch.cuda.stream(stream):
            item = next(items, None)
            return None if item is None else (item, stream.record_event())

    begun = begin()
    while begun is not None:
        item, event = begun
        begun = begin()
        now = torch.cuda.current_stream(to)
        now.wait_event(event)
        for batch in item:
            for tensor in batch:
                tensor.record_stream(now)  # its memory is not for others before it was used here
        yield item
