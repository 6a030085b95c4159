"""Where the images of a run live, and how its batches come from there.

Three places, one result: the pixels that reach the network are the same, bit for bit.

- `Host`: workers read images, from files or from a pack, and transform them with Pillow.
- `Stream`: workers read the pixels of a pack ahead; they are transformed on the device.
- `Resident`: all pixels are on the device, uint8, and are transformed there.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from steppe.errors import UserError

from . import augment, device
from .batches import (
    Batch,
    Failure,
    Sampling,
    View,
    evaluation_batches,
    evaluation_draws,
    read_ahead,
    training_batches,
)
from .dataset import Arrays, Domain, Images, Indices, Pixels
from .device import Reach, Stack
from .pack import Packed
from .pool import cores

log = logging.getLogger("steppe")

SHARE = 0.25
"""Of the device's free memory: what images may take of it before they are streamed instead."""
PLACES = ("auto", "device", "stream", "host")
_READERS = 8  # threads that fill the device's memory, of the cores there are

Drawn = tuple[Domain, Indices, augment.Draws | None]
"""Images of a domain, and the randomness of each."""
Augment = Callable[[Stack, Tensor, Tensor, Tensor, int, Reach], Tensor]
Resize = Callable[[Stack, Tensor, int, Reach], Tensor]


class Store(ABC):
    """The images of a run, as batches on its device.

    Attributes:
        where: where they live, for people.
    """

    where: str

    @abstractmethod
    def training(self, sampling: Sampling, start: int, stop: int) -> Iterator[list[Batch]]:
        """The batches of the steps from `start` to `stop` - 1, one per source domain."""

    @abstractmethod
    def evaluation(
        self,
        domain: Domain,
        chosen: Indices,
        view: View,
        batch_size: int,
        seeds: Sequence[int] = (),
    ) -> Iterator[Batch]:
        """The chosen images of a domain, once each, in order, as `evaluation_batches` has them."""


class Host(Store):
    """Images that workers read and transform.

    Args:
        to: the device.
        workers: how many; 0: this process itself.
    """

    def __init__(self, to: torch.device, workers: int) -> None:
        self._device, self.workers = to, workers
        readers = f" in {workers} workers" if workers else ""
        self.where = f"on the host, transformed by Pillow{readers}"

    def training(self, sampling: Sampling, start: int, stop: int) -> Iterator[list[Batch]]:
        """As `training_batches`, moved to the device."""
        for batches in training_batches(sampling, start, stop, self.workers, self._pin):
            yield [self._moved(batch) for batch in batches]

    def evaluation(
        self,
        domain: Domain,
        chosen: Indices,
        view: View,
        batch_size: int,
        seeds: Sequence[int] = (),
    ) -> Iterator[Batch]:
        """As `evaluation_batches`, moved to the device."""
        found = evaluation_batches(domain, chosen, view, batch_size, seeds, self.workers, self._pin)
        yield from map(self._moved, found)

    @property
    def _pin(self) -> bool:
        return self._device.type == "cuda"

    def _moved(self, batch: Batch) -> Batch:
        return Batch(*(t.to(self._device, non_blocking=True) for t in batch))


class _Work(NamedTuple):
    """Images to transform: which of a stack, their classes, and their randomness."""

    chosen: Tensor
    labels: Tensor
    draws: Tensor | None
    boxes: Tensor | None


class _OnDevice(Store):
    """What the two places share from which pixels come untransformed."""

    def __init__(self, to: torch.device, domains: Sequence[Domain], compiled: bool) -> None:
        self._device = to
        _check_channels(domains)
        self._heights, self._widths = (
            np.concatenate(sides) for sides in zip(*map(_shapes, domains), strict=True)
        )
        self._crop_reach = cache(partial(device.crop_reach, self._heights, self._widths))
        self._whole_reach = cache(partial(device.whole_reach, self._heights, self._widths))
        self._augment: Augment = device.augment
        self._resize: Resize = device.resize
        if compiled:
            self._augment = _compiled(device.augment)
            self._resize = _compiled(device.resize)

    def _transformed(self, stack: Stack, work: _Work, view: View) -> Batch:
        if len(work.chosen) > 1:  # one compilation for all batch sizes
            for tensor in (t for t in work if t is not None):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        if work.draws is None or work.boxes is None:
            images = self._resize(stack, work.chosen, view.size, self._whole_reach(view.size))
        else:
            reach = self._crop_reach(view.size)
            images = self._augment(stack, work.chosen, work.draws, work.boxes, view.size, reach)
        return Batch(images, work.labels)

    def _moved(self, values: Any) -> Any:
        """Tensors on the device, by way of pinned memory, so that the host need not wait."""
        pin = self._device.type == "cuda"
        return type(values)(
            *(
                t
                if not isinstance(t, Tensor)
                else (t.pin_memory() if pin and not t.is_pinned() else t).to(
                    self._device, non_blocking=True
                )
                for t in values
            )
        )


class Resident(_OnDevice):
    """Images that are all on the device.

    Args:
        to: the device.
        domains: the domains of the run; their images are packed or in memory.
        compiled: whether transforms go through `torch.compile`.
    """

    def __init__(self, to: torch.device, domains: Sequence[Domain], compiled: bool = False) -> None:
        super().__init__(to, domains, compiled)
        self._first: dict[str, int] = {}
        count = 0
        for domain in domains:
            self._first[domain.name] = count
            count += len(domain)
        self._stack = _everything(domains, self._heights, self._widths, to)
        size = self._stack.pixels.nbytes / 2**30
        self.where = f"on the device ({size:.2f} GiB), transformed there"

    def training(self, sampling: Sampling, start: int, stop: int) -> Iterator[list[Batch]]:
        """The batches of the steps, the next one made while one is used."""

        def make() -> Iterator[list[Batch]]:
            for step in range(start, stop):
                drawn = [(s.domain, *sampling.draw(s, step)) for s in sampling.sources]
                batch = self._transformed(self._stack, self._work(drawn), sampling.view)
                yield _cut(batch, [len(chosen) for _, chosen, _ in drawn])

        yield from _ahead(make(), self._device)

    def evaluation(
        self,
        domain: Domain,
        chosen: Indices,
        view: View,
        batch_size: int,
        seeds: Sequence[int] = (),
    ) -> Iterator[Batch]:
        """The chosen images of a domain."""

        def make() -> Iterator[Batch]:
            for number in range(-(-len(chosen) // batch_size)):
                some = chosen[number * batch_size : (number + 1) * batch_size]
                draws = evaluation_draws(view, seeds, number, len(some))
                work = self._work([(domain, some, draws)])
                yield self._transformed(self._stack, work, view)

        yield from _ahead(make(), self._device)

    def _work(self, drawn: Sequence[Drawn]) -> _Work:
        positions = np.concatenate([self._first[d.name] + chosen for d, chosen, _ in drawn])
        work = _work(drawn, positions, self._heights[positions], self._widths[positions])
        moved: _Work = self._moved(work)
        return moved


class _Raw(NamedTuple):
    """Pixels of images as they were read, and what is to become of them."""

    pixels: Tensor
    offsets: Tensor
    heights: Tensor
    widths: Tensor
    channels: int
    chosen: Tensor
    labels: Tensor
    draws: Tensor | None
    boxes: Tensor | None


class Stream(_OnDevice):
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

    def training(self, sampling: Sampling, start: int, stop: int) -> Iterator[list[Batch]]:
        """The batches of the steps, read and made ahead."""
        sizes = [sampling.batch_size // sampling.world] * len(sampling.sources)

        def make() -> Iterator[list[Batch]]:
            for raw in self._load(_RawSteps(sampling), range(start, stop)):
                yield _cut(self._made(raw, sampling.view), sizes)

        yield from _ahead(make(), self._device)

    def evaluation(
        self,
        domain: Domain,
        chosen: Indices,
        view: View,
        batch_size: int,
        seeds: Sequence[int] = (),
    ) -> Iterator[Batch]:
        """The chosen images of a domain."""

        def make() -> Iterator[Batch]:
            chunks = _RawChunks(domain, chosen, view, seeds, batch_size)
            for raw in self._load(chunks, range(-(-len(chosen) // batch_size))):
                yield self._made(raw, view)

        yield from _ahead(make(), self._device)

    def _load(self, dataset: Any, numbers: range) -> Iterator[_Raw]:
        return read_ahead(dataset, numbers, self.workers, pin=self._device.type == "cuda")

    def _made(self, raw: _Raw, view: View) -> Batch:
        moved: _Raw = self._moved(raw)
        stack = Stack(moved.pixels, moved.offsets, moved.heights, moved.widths, moved.channels)
        for tensor in moved[:4]:  # of another length in every batch
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self._transformed(stack, _Work(*moved[5:]), view)


class _RawSteps(torch.utils.data.Dataset[Any]):
    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling

    def __getitem__(self, step: int) -> _Raw | Failure:
        drawn = [
            (split.domain, *self.sampling.draw(split, step)) for split in self.sampling.sources
        ]
        return _read(drawn)


class _RawChunks(torch.utils.data.Dataset[Any]):
    def __init__(
        self, domain: Domain, chosen: Indices, view: View, seeds: Sequence[int], batch_size: int
    ) -> None:
        self.domain, self.chosen, self.view = domain, chosen, view
        self.seeds, self.batch_size = seeds, batch_size

    def __getitem__(self, number: int) -> _Raw | Failure:
        start = number * self.batch_size
        chosen = self.chosen[start : start + self.batch_size]
        draws = evaluation_draws(self.view, self.seeds, number, len(chosen))
        return _read([(self.domain, chosen, draws)])


def _read(drawn: Sequence[Drawn]) -> _Raw | Failure:
    """The pixels of images of several domains, one after another."""
    try:
        stacks = [device.stacked(domain.images, chosen) for domain, chosen, _ in drawn]
    except UserError as error:
        return Failure(error)
    begins = np.cumsum([0, *(len(stack.pixels) for stack in stacks)])
    offsets = [stack.offsets + int(begin) for stack, begin in zip(stacks, begins, strict=False)]
    heights, widths = (
        torch.cat([getattr(stack, side) for stack in stacks]) for side in ("heights", "widths")
    )
    positions = np.arange(len(heights))
    return _Raw(
        torch.cat([stack.pixels for stack in stacks]),
        torch.cat(offsets),
        heights,
        widths,
        stacks[0].channels,
        *_work(drawn, positions, heights.numpy(), widths.numpy()),
    )


def _work(drawn: Sequence[Drawn], positions: Indices, heights: Indices, widths: Indices) -> _Work:
    """What is to be done with images, given where they are in a stack, and their sides."""
    labels = np.concatenate([domain.labels[chosen] for domain, chosen, _ in drawn])
    found = [draws for _, _, draws in drawn if draws is not None]
    if not found:
        return _Work(torch.from_numpy(positions), torch.from_numpy(labels), None, None)
    draws = np.concatenate(found)
    boxes = device.crop_boxes(heights, widths, draws)
    return _Work(*map(torch.from_numpy, (positions, labels, draws, boxes)))


def _cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    parts = zip(batch.images.split(sizes), batch.labels.split(sizes), strict=True)
    return [Batch(*part) for part in parts]


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


def _ahead(items: Iterator[Any], to: torch.device) -> Iterator[Any]:
    """Items made on a GPU beside what it does otherwise, each one while the one before is used."""
    if to.type != "cuda":
        yield from items
        return
    stream = torch.cuda.Stream(to)

    def begin() -> tuple[Any, torch.cuda.Event] | None:
        with torch.cuda.stream(stream):
            item = next(items, None)
            return None if item is None else (item, stream.record_event())

    begun = begin()
    while begun is not None:
        item, event = begun
        begun = begin()
        now = torch.cuda.current_stream(to)
        now.wait_event(event)
        for batch in [item] if isinstance(item, Batch) else item:
            for tensor in batch:
                tensor.record_stream(now)  # its memory is not for others before it was used here
        yield item


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


def _check_channels(domains: Sequence[Domain]) -> None:
    first = domains[0]
    for other in domains:
        if _channels(other.images) != _channels(first.images):
            raise UserError(
                f"images of {first.name} have {_channels(first.images)} channels and those of "
                f"{other.name} {_channels(other.images)}: they cannot be in one batch"
            )


def _channels(images: Images) -> int:
    return images.pixels.shape[3] if isinstance(images, Arrays) else 3


def size(domains: Sequence[Domain]) -> int:
    """The bytes of all pixels of some domains, packed or in memory."""
    return sum(
        int((heights * widths).sum()) * _channels(domain.images)
        for domain in domains
        for heights, widths in (_shapes(domain),)
    )


def _everything(
    domains: Sequence[Domain], heights: Indices, widths: Indices, to: torch.device
) -> Stack:
    """All images of some domains on a device; packed ones are compared with their checksums."""
    channels = _channels(domains[0].images)
    sizes = heights * widths * channels
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
    return Stack(pixels, begins, rows, columns, channels)


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


def open_store(
    place: str,
    to: torch.device,
    domains: Sequence[Domain],
    workers: int | None,
    processes: int = 1,
    compiled: bool = False,
) -> Store:
    """The place for the images of a run.

    Args:
        place: ``device``, ``stream``, ``host``; or ``auto``: on a CPU the host, and otherwise the
            device if packed images fit into a quarter of its free memory, a stream if they do not,
            and the host for files.
        to: the device.
        domains: the domains of the run.
        workers: processes that read; None: as many as are useful.
        processes: how many train on this machine.
        compiled: whether transforms on the device go through `torch.compile`.
    """
    known = all(isinstance(domain.images, Packed | Arrays) for domain in domains)
    in_memory = all(isinstance(domain.images, Arrays) for domain in domains)
    if place == "auto" and to.type == "cuda" and not known:
        log.info("images are read as files; 'steppe data pack' would let them live on the device")
    if place == "auto":
        place = "host" if to.type == "cpu" or not known else _fitting(to, size(domains))
    if place == "device":
        return Resident(to, domains, compiled)
    if workers is None:
        # On a CPU, readers would take the cores that compute; arrays need none.
        few = to.type == "cpu" or in_memory
        workers = 0 if few else max(1, min(8, cores() // processes))
    if place == "stream":
        return Stream(to, domains, workers, compiled)
    return Host(to, workers)


def _fitting(to: torch.device, needed: int) -> str:
    free, _ = torch.cuda.mem_get_info(to)
    return "device" if needed <= SHARE * free else "stream"
