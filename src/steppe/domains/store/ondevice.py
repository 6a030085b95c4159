"""The two stores that transform pixels on the device."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from steppe.domains import device
from steppe.domains.augment import crop_boxes
from steppe.domains.batches import Batch, Drawn, Plan, Reading, Sampling, View, read_ahead
from steppe.domains.dataset import Arrays, Domain, Images, Indices
from steppe.domains.device import Stack, stacked
from steppe.domains.pack import Packed
from steppe.domains.pool import cores
from steppe.errors import UserError

from .host import Store
from .replay import Replay

BLOCK = 64
"""The maximum number of steps whose images are drawn and transformed at once."""
BLOCK_VALUES = 25_000_000
"""The maximum number of values in memory after the first pass of their resampling."""
_READERS = 8
"""The maximum number of threads that fill the device's memory."""
_READ_AT_ONCE = 256
"""Images per task of a thread: handing over one small image would take longer than to read it."""
log = logging.getLogger("steppe")
T = TypeVar("T")


def size(domains: Sequence[Domain]) -> int:
    """Return the size in bytes of all pixels of some domains, packed or in memory."""
    return sum(int(_shapes(domain).prod(axis=1).sum()) for domain in domains)


def _shapes(domain: Domain) -> Indices:
    """Return height, width and channels of a domain's images, N x 3, without reading them."""
    images = domain.images
    if isinstance(images, Packed):
        columns = (images.rows["height"], images.rows["width"], np.full(len(images), 3))
        return np.stack(columns, axis=1).astype(np.int64)
    if isinstance(images, Arrays):
        return np.tile(images.pixels.shape[1:], (len(images), 1))
    raise UserError(
        f"the images of {domain.name} are files, which can be neither kept on the device nor "
        "streamed: pack them with 'steppe data pack', or set data=host"
    )


class _Work(NamedTuple):
    """Images to transform: their indices in a stack, classes, random numbers, and crops.

    `sizes` is the number of images per domain.
    """

    chosen: Tensor
    labels: Tensor
    draws: Tensor | None
    boxes: Tensor | None
    sizes: tuple[int, ...]


class OnDevice(Store):
    """Transforms pixels on the device, each batch while the previous one is in use."""

    def __init__(self, to: torch.device, domains: Sequence[Domain], compiled: bool) -> None:
        self._device = to
        shapes = [_shapes(domain) for domain in domains]
        self._heights, self._widths, depths = np.ascontiguousarray(np.concatenate(shapes).T)
        self._depth = int(depths[0])
        for domain, shape in zip(domains, shapes, strict=True):
            if (shape[:, 2] != self._depth).any():
                raise UserError(
                    f"images of {domains[0].name} have {self._depth} channels, but images of "
                    f"{domain.name} have {shape[0, 2]}: a batch cannot mix them"
                )
        self._crop_reach = cache(partial(device.crop_reach, self._heights, self._widths))
        self._whole_reach = cache(partial(device.whole_reach, self._heights, self._widths))
        self._augment = _compiled(device.augment) if compiled else device.augment
        self._resize = _compiled(device.resize) if compiled else device.resize
        weigh = _compiled(device.filters) if compiled else device.filters
        self._filters = weigh if compiled or to.type == "cpu" else None

    def batches(self, plan: Plan, numbers: range) -> Iterator[list[Batch]]:
        yield from _ahead(self.made(plan, numbers), self._device)

    @abstractmethod
    def made(self, plan: Plan, numbers: range) -> Iterator[list[Batch]]:
        """Yield the batches of a plan, each made on demand."""

    def transformed(self, stack: Stack, work: _Work, view: View) -> Tensor:
        """Transform images of a stack; both it and the work are on the device."""
        draws, boxes, size, weigh = work.draws, work.boxes, view.size, self._filters
        if draws is None or boxes is None:
            reach = self._whole_reach(size)
            whole = weigh and weigh(device.whole_boxes(stack, work.chosen), None, size, reach)
            return self._resize(stack, work.chosen, size, reach, whole)
        reach = self._crop_reach(size)
        filters = weigh and weigh(boxes, draws, size, reach)
        return self._augment(stack, work.chosen, draws, boxes, size, reach, filters)

    def moved(self, value: Any) -> Any:
        """Copy a tensor to the device through pinned memory; return anything else unchanged."""
        if not isinstance(value, Tensor):
            return value
        if self._device.type == "cuda" and not value.is_pinned():
            value = value.pin_memory()  # makes the copy asynchronous
        return value.to(self._device, non_blocking=True)


class Stream(OnDevice):
    """Images, packed or in memory, that workers read ahead (0: this process reads them)."""

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
            _mark_dynamic(stack)  # its length differs between batches
            work = _Work(*map(self.moved, work))
            yield _split(self.transformed(stack, work, plan.view), work.labels, work.sizes)


class Resident(OnDevice):
    """Images, packed or in memory, that all fit on the device.

    Training batches are drawn and transformed in blocks of steps, because the transforms of a small
    batch take the device no longer than their launches take the host. If `captured`, a block is one
    launch of a CUDA graph.
    """

    def __init__(
        self,
        to: torch.device,
        domains: Sequence[Domain],
        compiled: bool = False,
        captured: bool = False,
    ) -> None:
        super().__init__(to, domains, compiled)
        self._captured = captured
        sizes = self._heights * self._widths * self._depth
        begins = np.cumsum(sizes) - sizes
        pixels = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=to)
        self._first: dict[str, int] = {}
        first = begin = 0
        for domain in domains:  # one at a time, so that host memory holds only one
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
        if isinstance(plan, Sampling):
            yield from self._in_blocks(plan, numbers)
            return
        for number in numbers:
            work = _Work(*map(self.moved, self._described(plan.drawn(number))))
            images = self.transformed(self._stack, work, plan.view)
            yield _split(images, work.labels, work.sizes)

    def _in_blocks(self, sampling: Sampling, numbers: range) -> Iterator[list[Batch]]:
        standing: _Work | None = None
        for drawn in self._drawn_ahead(sampling, numbers):
            work = _Work(*map(self.moved, drawn))
            if not self._captured:
                images = self.transformed(self._stack, work, sampling.view)
            else:
                if standing is None:
                    standing = deepcopy(work)
                    replay = Replay(partial(self.transformed, self._stack, standing, sampling.view))
                _overwrite(standing, work)
                images = replay()[: len(work.chosen)].clone()  # the next replay overwrites it
            batches = _split(images, work.labels, work.sizes)
            domains = len(sampling.sources)
            for first in range(0, len(batches), domains):
                yield batches[first : first + domains]

    def _drawn_ahead(self, sampling: Sampling, numbers: range) -> Iterator[_Work]:
        """Yield the work of each block of steps, drawn while the block before it is in use."""

        def draw(block: range) -> _Work:
            return self._described([drawn for n in block for drawn in sampling.drawn(n)])

        images = sampling.batch_size // sampling.world * len(sampling.sources)
        steps = self._steps_at_once(images, sampling.view)
        with ThreadPoolExecutor(1) as thread:
            ahead = None
            for start in range(0, len(numbers), steps):
                now, ahead = ahead, thread.submit(draw, numbers[start : start + steps])
                if now is not None:
                    yield now.result()
            if ahead is not None:
                yield ahead.result()

    def _steps_at_once(self, images: int, view: View) -> int:
        reach = (self._crop_reach if view.augment else self._whole_reach)(view.size)
        each = images * reach.rows * view.size * self._depth
        return max(1, min(BLOCK, BLOCK_VALUES // each))

    def _described(self, drawn: Sequence[Drawn]) -> _Work:
        positions = np.concatenate([self._first[d.name] + chosen for d, chosen, _ in drawn])
        return _work(drawn, positions, self._heights[positions], self._widths[positions])


def _read_all(images: Images, ends: Indices) -> Tensor:
    """Concatenate the pixels of all images, given where each ends."""
    buffer = np.empty(int(ends[-1]), np.uint8)

    def read(start: int) -> None:
        for index in range(start, min(start + _READ_AT_ONCE, len(images))):
            pixels = images[index]
            buffer[ends[index] - pixels.size : ends[index]] = pixels.reshape(-1)

    with ThreadPoolExecutor(min(_READERS, cores())) as threads:
        for _ in threads.map(read, range(0, len(images), _READ_AT_ONCE)):
            pass
    return torch.from_numpy(buffer)


def _read(drawn: Sequence[Drawn]) -> tuple[Stack, _Work]:
    """Read the pixels of images of several domains, and describe the work on them."""
    stack = stacked([domain.images[int(i)] for domain, chosen, _ in drawn for i in chosen])
    heights, widths = stack.heights.numpy(), stack.widths.numpy()
    return stack, _work(drawn, np.arange(len(heights)), heights, widths)


def _work(drawn: Sequence[Drawn], positions: Indices, heights: Indices, widths: Indices) -> _Work:
    """Describe the work on images, given their positions in a stack, heights and widths."""
    sizes = tuple(len(chosen) for _, chosen, _ in drawn)
    labels = np.concatenate([domain.labels[chosen] for domain, chosen, _ in drawn])
    where, classes = torch.from_numpy(positions), torch.from_numpy(labels)
    found = [draws for _, _, draws in drawn if draws is not None]
    if not found:
        return _Work(where, classes, None, None, sizes)
    draws = np.concatenate(found)
    boxes = crop_boxes(heights, widths, draws)
    return _Work(where, classes, torch.from_numpy(draws), torch.from_numpy(boxes), sizes)


def _overwrite(ours: _Work, new: _Work) -> None:
    """Copy work into the tensors of other work, which may be longer."""
    for a, b in zip(ours, new, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            a[: len(b)].copy_(b)


def _split(images: Tensor, labels: Tensor, sizes: tuple[int, ...]) -> list[Batch]:
    return list(map(Batch, images.split(sizes), labels.split(sizes)))


def _mark_dynamic(values: Iterable[Any]) -> None:
    """Tell the compiler that the first dimension of these tensors varies."""
    for value in values:
        if isinstance(value, device.Filters):
            _mark_dynamic(value)
        elif isinstance(value, Tensor) and len(value) > 1:
            torch._dynamo.maybe_mark_dynamic(value, 0)


def _compiled(transform: Callable[..., T]) -> Callable[..., T]:
    """Compile a transform, for any number of images; if that fails, fall back to eager code."""
    chosen = torch.compile(transform)

    def call(*args: Any) -> T:
        nonlocal chosen
        from torch._dynamo.exc import TorchDynamoException

        _mark_dynamic(args)
        try:
            return chosen(*args)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
            log.warning("image transforms run uncompiled, which is slower: %s", reason)
            chosen = transform
        return chosen(*args)

    return call


def _ahead(items: Iterator[list[Batch]], to: torch.device) -> Iterator[list[Batch]]:
    """Make each item on a second CUDA stream while the previous item is in use."""
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
                tensor.record_stream(now)  # keeps its memory until this stream has used it
        yield item
