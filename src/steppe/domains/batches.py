"""Batches for training and for evaluation.

A training batch depends only on the seed, the domain, and the step. The number of workers,
evaluations in between, and interruptions of the run do not change it, so the state of a sampler is
the step number.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from steppe.errors import RunError, UserError

from . import augment
from .dataset import Arrays, Domain, Indices
from .splits import Split

_TRAINING, _EVALUATION = 1, 2
"""First elements of the seeds, so that training and evaluation never share random numbers."""

Drawn = tuple[Domain, Indices, augment.Draws | None]
"""Images of a domain and the random numbers of each; None if they are not augmented."""


class Batch(NamedTuple):
    """Images of one domain (uint8, N x channels x height x width) and their class indices."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class View:
    """The network's view of images: their height and width, and whether they are augmented."""

    size: int
    augment: bool


def read(domain: Domain, chosen: Indices, view: View, draws: augment.Draws | None = None) -> Batch:
    images, labels = domain.images, torch.from_numpy(domain.labels[chosen])
    if draws is not None:
        rows = zip(chosen, draws, strict=True)
        pixels = np.stack([augment.augment(images[i], row, view.size) for i, row in rows])
    elif isinstance(images, Arrays) and images.pixels.shape[1:3] == (view.size, view.size):
        pixels = images.pixels[chosen]  # the same as below, but vectorized
    else:
        pixels = np.stack([augment.resize(images[i], view.size) for i in chosen])
    # Permuting N x H x W x C gives channels-last N x C x H x W without a copy. One channel is
    # contiguous in both formats, and takes the standard strides.
    n, height, width, channels = pixels.shape
    seen = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return Batch(seen.view(n, 1, height, width) if channels == 1 else seen, labels)


@dataclass(frozen=True)
class Sampling:
    """Everything that determines the training batches of a run.

    Each step has `batch_size` images of every source domain. The `world` processes divide them
    equally, and this one has number `rank`.
    """

    sources: tuple[Split, ...]
    batch_size: int
    view: View
    seed: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.batch_size % self.world:
            raise UserError(
                f"batch_size={self.batch_size} is not a multiple of {self.world} processes, which "
                "must share every domain's batch equally"
            )

    def draw(self, split: Split, step: int) -> tuple[Indices, augment.Draws | None]:
        """Draw this process's images of one domain at a step, and the random numbers of each."""
        rng = np.random.default_rng([_TRAINING, self.seed, split.position, step])
        train = split.parts["train"]
        chosen = train[rng.integers(len(train), size=self.batch_size)]  # with replacement
        draws = rng.random((self.batch_size, augment.DRAWS)) if self.view.augment else None
        mine = slice(self.rank, None, self.world)
        return chosen[mine], None if draws is None else draws[mine]

    def drawn(self, number: int) -> list[Drawn]:
        """Draw from every source domain at step `number`."""
        return [(split.domain, *self.draw(split, number)) for split in self.sources]

    def batches(self, step: int) -> list[Batch]:
        return read_all(self.drawn(step), self.view)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Batches of chosen images of one domain, in order; `seeds` determine any augmentation."""

    domain: Domain
    chosen: Indices
    view: View
    batch_size: int
    seeds: Sequence[int] = ()

    def __len__(self) -> int:
        return -(-len(self.chosen) // self.batch_size)

    def drawn(self, number: int) -> list[Drawn]:
        start = number * self.batch_size
        chosen = self.chosen[start : start + self.batch_size]
        draws = None
        if self.view.augment:
            rng = np.random.default_rng([_EVALUATION, *self.seeds, number])
            draws = rng.random((len(chosen), augment.DRAWS))
        return [(self.domain, chosen, draws)]


Plan = Sampling | Evaluation
"""Maps the number of a batch to its images."""


def read_all(drawn: Sequence[Drawn], view: View) -> list[Batch]:
    return [read(domain, chosen, view, draws) for domain, chosen, draws in drawn]


class Reading(Dataset[Any]):
    """A plan's batches as a torch dataset, read by a function, possibly in a worker process."""

    def __init__(self, plan: Plan, read: Callable[[Sequence[Drawn]], Any]) -> None:
        self._plan, self._read = plan, read

    def __getitem__(self, number: int) -> Any:
        try:
            return self._read(self._plan.drawn(number))
        except UserError as error:  # returned, because torch would wrap its text in a traceback
            return error


def read_ahead(dataset: Reading, numbers: range, workers: int, pin: bool) -> Iterator[Any]:
    """Yield the batches with these numbers in order; workers read ahead (0: no worker)."""
    items: Iterator[Any]
    if not workers and not pin:  # a loader takes as long as a small batch
        items = map(dataset.__getitem__, numbers)
    else:
        items = _loaded(dataset, numbers, workers, pin)
    item = None
    try:
        while (item := _next(items, workers)) is not _END:
            if isinstance(item, UserError):
                raise item
            yield item
    finally:
        # An error's traceback keeps this frame alive, which would keep the workers alive.
        del item, items


def _loaded(dataset: Reading, numbers: range, workers: int, pin: bool) -> Iterator[Any]:
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        pin_memory=pin,
        collate_fn=_unchanged,
        worker_init_fn=_start_worker,
        # Python 3.14 no longer forks by default, and starting a new interpreter takes seconds.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        # Without its own generator, a loader would draw its workers' seed from the global one.
        generator=torch.Generator(),
    )
    with _signals_held():
        return iter(loader)


_END = object()


def _next(items: Iterator[Any], workers: int) -> Any:
    """Return the next item; if a worker died, raise an error that says so."""
    try:
        return next(items, _END)
    except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
        # A dead worker shows as the loader's own message or as a broken connection. An exception
        # raised inside a live worker starts with "Caught".
        silent = not isinstance(error, RuntimeError) and not str(error).startswith("Caught ")
        if not workers or not (silent or str(error).startswith("DataLoader worker (pid")):
            raise
        raise RunError(
            "a process that reads images was killed, possibly out of memory: rerun with fewer "
            "workers (--set workers=N)"
        ) from None


def _unchanged(item: Any) -> Any:
    return item


@contextmanager
def _signals_held() -> Iterator[None]:
    """Block SIGTERM and SIGINT while workers are forked; workers inherit the block.

    A scheduler or a terminal signals the whole process group, but workers must live until the
    trainer has saved its state. Torch's SIGCHLD handler is removed too: it would raise at an
    arbitrary point of the trainer when a worker dies. The next batch reports that within seconds.
    """
    death = signal.getsignal(signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is not death and death is not None:
            signal.signal(signal.SIGCHLD, death)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        parent = os.getppid()

        def obey() -> None:  # only the trainer, which ends its workers by SIGTERM when it exits
            while signal.sigwaitinfo((signal.SIGTERM,)).si_pid != parent:
                pass
            os._exit(0)

        threading.Thread(target=obey, daemon=True).start()
