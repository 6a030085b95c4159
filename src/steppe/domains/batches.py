"""Batches for training and for evaluation.

A training batch is a function of the seed, the domain and the step, and of nothing else: not of
how many workers read it, of what was evaluated in between, or of where a run was interrupted. The
position of a sampler is therefore the number of the step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from steppe.errors import UserError

from . import augment
from .dataset import Arrays, Domain, Indices
from .splits import Split

_TRAINING, _EVALUATION = 1, 2
"""Begin the seeds, so that no draw of an evaluation is one of training."""


class Batch(NamedTuple):
    """Images of one domain, uint8, N x channels x height x width, and their classes."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class View:
    """How images reach the network.

    Attributes:
        size: height and width.
        augment: whether they are cropped, flipped and jittered at random.
    """

    size: int
    augment: bool


def read(domain: Domain, chosen: Indices, view: View, draws: augment.Draws | None = None) -> Batch:
    """Reads, transforms and stacks images of a domain."""
    images, labels = domain.images, torch.from_numpy(domain.labels[chosen])
    if draws is not None:
        rows = zip(chosen, draws, strict=True)
        pixels = np.stack([augment.augment(images[i], row, view.size) for i, row in rows])
    elif isinstance(images, Arrays) and images.pixels.shape[1:3] == (view.size, view.size):
        pixels = images.pixels[chosen]  # as the next line, at once
    else:
        pixels = np.stack([augment.resize(images[i], view.size) for i in chosen])
    # N x H x W x C seen as N x C x H x W: channels-last in memory, without a copy. (The view of
    # one channel is contiguous in either sense, and its strides should say so in the usual one.)
    n, height, width, channels = pixels.shape
    seen = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return Batch(seen.view(n, 1, height, width) if channels == 1 else seen, labels)


@dataclass(frozen=True)
class Sampling:
    """What determines the batches of a run.

    Attributes:
        sources: the splits of the source domains.
        batch_size: images of each source domain in a step, over all processes.
        view: how images reach the network.
        seed: the run's seed.
        rank: this process's number; it reads its share of every batch.
        world: how many processes there are.
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
                f"batch_size={self.batch_size} is not a multiple of {self.world} processes: each "
                "of them takes an equal share of every domain's batch"
            )

    def draw(self, split: Split, step: int) -> tuple[Indices, augment.Draws | None]:
        """This process's images of one domain at a step, with the randomness of each."""
        rng = np.random.default_rng([_TRAINING, self.seed, split.position, step])
        train = split.parts["train"]
        chosen = train[rng.integers(len(train), size=self.batch_size)]  # with replacement
        draws = rng.random((self.batch_size, augment.DRAWS)) if self.view.augment else None
        mine = slice(self.rank, None, self.world)
        return chosen[mine], None if draws is None else draws[mine]

    def batches(self, step: int) -> list[Batch]:
        """The batch of every source domain at a step."""
        drawn = [self.draw(split, step) for split in self.sources]
        return [
            read(split.domain, chosen, self.view, draws)
            for split, (chosen, draws) in zip(self.sources, drawn, strict=True)
        ]


@dataclass(frozen=True)
class Failure:
    """An error in a worker, as a value: torch would wrap its text in a traceback."""

    error: UserError


class _Steps(Dataset[Any]):
    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling

    def __getitem__(self, step: int) -> list[Batch] | Failure:
        try:
            return self.sampling.batches(step)
        except UserError as error:
            return Failure(error)


class _Chunks(Dataset[Any]):
    def __init__(
        self, domain: Domain, chosen: Indices, view: View, seeds: Sequence[int], batch_size: int
    ) -> None:
        self.domain, self.chosen, self.view = domain, chosen, view
        self.seeds, self.batch_size = seeds, batch_size

    def __getitem__(self, number: int) -> Batch | Failure:
        start = number * self.batch_size
        chosen = self.chosen[start : start + self.batch_size]
        draws = evaluation_draws(self.view, self.seeds, number, len(chosen))
        try:
            return read(self.domain, chosen, self.view, draws)
        except UserError as error:
            return Failure(error)


def evaluation_draws(
    view: View, seeds: Sequence[int], number: int, images: int
) -> augment.Draws | None:
    """The randomness of one batch of an evaluation, where `view` asks for any."""
    if not view.augment:
        return None
    return np.random.default_rng([_EVALUATION, *seeds, number]).random((images, augment.DRAWS))


def training_batches(
    sampling: Sampling, start: int, stop: int, workers: int = 0, pin: bool = False
) -> Iterator[list[Batch]]:
    """The batches of the steps from `start` to `stop` - 1, one per source domain."""
    yield from read_ahead(_Steps(sampling), range(start, stop), workers, pin)


def evaluation_batches(
    domain: Domain,
    chosen: Indices,
    view: View,
    batch_size: int,
    seeds: Sequence[int] = (),
    workers: int = 0,
    pin: bool = False,
) -> Iterator[Batch]:
    """The chosen images of a domain, once each, in order.

    `seeds` determine the augmentation, where `view` asks for it.
    """
    chunks = _Chunks(domain, chosen, view, seeds, batch_size)
    yield from read_ahead(chunks, range(-(-len(chosen) // batch_size)), workers, pin)


def read_ahead(dataset: Dataset[Any], numbers: range, workers: int, pin: bool) -> Iterator[Any]:
    """The items of a dataset that these numbers stand for, in order, read ahead by workers.

    An item that is a `Failure` is raised here.
    """
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        pin_memory=pin,
        collate_fn=_unchanged,
        worker_init_fn=_start_worker,
        # Forked where that is safe: Python 3.14 would otherwise start each one anew, for seconds.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        # Its own, because a loader draws a seed for its workers from the global one otherwise.
        generator=torch.Generator(),
    )
    with _signals_held():
        items = iter(loader)
    item = None
    try:
        for item in items:
            if isinstance(item, Failure):
                raise item.error
            yield item
    finally:
        # The error's traceback holds this frame: without them it does not hold the workers too.
        del item, items


def _unchanged(item: Any) -> Any:
    return item


@contextmanager
def _signals_held() -> Iterator[None]:
    """Holds signals back while workers are forked: they are born so, and never hear of them.

    A scheduler or a terminal signals the whole process group, and workers are to live until the
    trainer has finished.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        parent = os.getppid()

        def obey() -> None:  # the trainer alone: it ends its workers by SIGTERM when it exits
            while signal.sigwaitinfo((signal.SIGTERM,)).si_pid != parent:
                pass
            os._exit(0)

        threading.Thread(target=obey, daemon=True).start()
