"""What the two stores share from which pixels come untransformed."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from steppe.domains import device
from steppe.domains.batches import Batch, Drawn, Plan, View
from steppe.domains.dataset import Domain, Indices
from steppe.domains.device import Stack

from .host import Store
from .shapes import check_channels, shapes

log = logging.getLogger("steppe")


class Work(NamedTuple):
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
        check_channels(domains)
        self._heights, self._widths = (
            np.concatenate(sides) for sides in zip(*map(shapes, domains), strict=True)
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

    def transformed(self, stack: Stack, work: Work, view: View) -> list[Batch]:
        """Batches of images in a stack, one of each domain."""
        if len(work.chosen) > 1:  # one compilation for all batch sizes
            mark_dynamic(work)
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


def mark_dynamic(values: Sequence[Any]) -> None:
    """Tells the compiler that the first dimension of these tensors changes."""
    for value in values:
        if isinstance(value, Tensor):
            torch._dynamo.maybe_mark_dynamic(value, 0)


def work(drawn: Sequence[Drawn], positions: Indices, heights: Indices, widths: Indices) -> Work:
    """What is to be done with images, given where they are in a stack, and their sides."""
    sizes = tuple(len(chosen) for _, chosen, _ in drawn)
    labels = np.concatenate([domain.labels[chosen] for domain, chosen, _ in drawn])
    where, classes = torch.from_numpy(positions), torch.from_numpy(labels)
    found = [draws for _, _, draws in drawn if draws is not None]
    if not found:
        return Work(where, classes, None, None, sizes)
    draws = np.concatenate(found)
    boxes = device.crop_boxes(heights, widths, draws)
    return Work(where, classes, torch.from_numpy(draws), torch.from_numpy(boxes), sizes)


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
