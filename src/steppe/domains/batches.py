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
"""Begin the seeds, so that no draw of an evaluation is one of training."""


Drawn = tuple[Domain, Indices, augment.Draws | None]
"""Images of a domain, and the randomness of each; None: they are not augmented."""


class Batch(NamedTuple):
    """Images of one domain, uint8, N x channels x height x width, and their classes."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class View:
    """How images reach the network: their height and width, and whether they are augmented."""

    size: int
    augment: bool


def read(domain: Domain, chosen: Indices, view: View, draws: augment.Draws | None = None) -> Batch:
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

    Of the `batch_size` images of each source domain in a step, the process of this `rank` reads its
    share; there are `world` processes.
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

    def drawn(self, number: int) -> list[Drawn]:
        """The same of every source domain, at the step of that number."""
        return [(split.domain, *self.draw(split, number)) for split in self.sources]

    def batches(self, step: int) -> list[Batch]:
        return read_all(self.drawn(step), self.view)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Images of one domain, once each, in order.

    `seeds` determine the augmentation, where `view` asks for it.
    """

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
"""What says which images a batch has, by its number."""


def read_all(drawn: Sequence[Drawn], view: View) -> list[Batch]:
    return [read(domain, chosen, view, draws) for domain, chosen, draws in drawn]


class Reading(Dataset[Any]):
    """What a plan draws, read by a function, possibly in another process."""

    def __init__(self, plan: Plan, read: Callable[[Sequence[Drawn]], Any]) -> None:
        self._plan, self._read = plan, read

    def __getitem__(self, number: int) -> Any:
        try:
            return self._read(self._plan.drawn(number))
        except UserError as error:  # as a value: torch would wrap its text in a traceback
            return error


def read_ahead(dataset: Reading, numbers: range, workers: int, pin: bool) -> Iterator[Any]:
    """What these numbers stand for, in order, read ahead by workers; 0: by this process."""
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
        while (item := _next(items, workers)) is not _END:
            if isinstance(item, UserError):
                raise item
            yield item
    finally:
        # The error's traceback holds this frame: without them it does not hold the workers too.
        del item, items


_END = object()


def _next(items: Iterator[Any], workers: int) -> Any:
    """The next item; where a worker has died, an error that says so."""
    try:
        return next(items, _END)
    except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
        # The loader's words, or nobody at the other end of the line when an item is fetched. What
        # went wrong inside a living worker begins with "Caught".
        silent = not isinstance(error, RuntimeError) and not str(error).startswith("Caught ")
        if not workers or not (silent or str(error).startswith("DataLoader worker (pid")):
            raise
        raise RunError(
            "a process that reads images was killed, possibly because memory ran out: rerun with "
            "fewer workers (--set workers=N)"
        ) from None


def _unchanged(item: Any) -> Any:
    return item


@contextmanager
def _signals_held() -> Iterator[None]:
    """Holds signals back while workers are forked: they are born so, and never hear of them.

    A scheduler or a terminal signals the whole process group, and workers are to live until the
    trainer has finished. Nor may torch handle SIGCHLD: it raises wherever the trainer is when a
    worker dies. The next batch that is waited for tells as well, within seconds.
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

        def obey() -> None:  # the trainer alone: it ends its workers by SIGTERM when it exits
            while signal.sigwaitinfo((signal.SIGTERM,)).si_pid != parent:
                pass
            os._exit(0)

        threading.Thread(target=obey, daemon=True).start()
