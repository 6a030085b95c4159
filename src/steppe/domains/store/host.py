"""The interface of a store, and the store on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from steppe.domains.batches import (
    Batch,
    Evaluation,
    Plan,
    Reading,
    Sampling,
    View,
    read_ahead,
    read_all,
)
from steppe.domains.dataset import Domain, Indices


class Store(ABC):
    """Serves the images of a run as batches on its device."""

    where: str
    """Where the images are, in words."""

    @abstractmethod
    def batches(self, plan: Plan, numbers: range) -> Iterator[list[Batch]]:
        """Yield the batches of a plan with these numbers, each as a list with one per domain."""

    def training(self, sampling: Sampling, start: int, stop: int) -> Iterator[list[Batch]]:
        """Yield the batches of steps `start` to `stop - 1`, one per source domain each."""
        yield from self.batches(sampling, range(start, stop))

    def evaluation(
        self,
        domain: Domain,
        chosen: Indices,
        view: View,
        batch_size: int,
        seeds: Sequence[int] = (),
    ) -> Iterator[Batch]:
        """Yield the chosen images of a domain in order; `seeds` determine any augmentation."""
        plan = Evaluation(domain, chosen, view, batch_size, seeds)
        for (batch,) in self.batches(plan, range(len(plan))):
            yield batch


class Host(Store):
    """Images that workers read and transform (0: this process does)."""

    def __init__(self, to: torch.device, workers: int = 0) -> None:
        self._device, self.workers = to, workers
        readers = f" in {workers} workers" if workers else ""
        self.where = f"on the host, transformed by Pillow{readers}"

    def batches(self, plan: Plan, numbers: range) -> Iterator[list[Batch]]:
        reading = Reading(plan, partial(read_all, view=plan.view))
        for batches in read_ahead(reading, numbers, self.workers, self._device.type == "cuda"):
            yield [
                Batch(*(t.to(self._device, non_blocking=True) for t in batch)) for batch in batches
            ]
