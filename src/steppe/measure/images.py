"""Draw the images that a run's loss is measured on, evenly from domains, and read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from steppe.domains import Dataset, Domain, Split
from steppe.domains.batches import Batch, View
from steppe.domains.dataset import Indices
from steppe.domains.store import Host
from steppe.errors import UserError, unknown

from .stored import Sample

_DRAW = 3
"""First number of the seeds, which keeps them apart from those of training and evaluation."""


@dataclass(frozen=True)
class Drawn:
    domain: Domain
    chosen: Indices
    sample: Sample


@dataclass(frozen=True)
class Stream:
    """Batches that are read again in every pass."""

    drawn: Sequence[Drawn]
    view: View
    batch_size: int
    device: torch.device

    def __iter__(self) -> Iterator[Batch]:
        for one in self.drawn:
            # Domain by domain, because some algorithms use statistics of the batch.
            store = Host(self.device)
            yield from store.evaluation(one.domain, one.chosen, self.view, self.batch_size)


def draw(
    dataset: Dataset,
    splits: Sequence[Split],
    names: Sequence[str] | None,
    images: int,
    seed: int,
) -> tuple[list[Drawn], bool]:
    """Draw images from each domain; also returns whether these are the training domains."""
    training = {split.domain.name: split.parts["train"] for split in splits if split.source}
    wanted = list(training) if names is None else list(names)
    known = [domain.name for domain in dataset.domains]
    if not wanted:
        raise UserError(f"no domain given: choose from {', '.join(known)}")
    for name in wanted:
        if name not in known:
            raise UserError(
                unknown(f"domain of {dataset.spec.name}", name, known)
                + f" (trained on: {', '.join(training)})"
            )
        if wanted.count(name) > 1:
            raise UserError(f"domain {name!r} is listed twice: list each once")
    chosen = [(i, domain) for i, domain in enumerate(dataset.domains) if domain.name in wanted]
    pools = [training.get(domain.name, np.arange(len(domain))) for _, domain in chosen]
    counts = shares([len(pool) for pool in pools], images)
    if 0 in counts:
        raise UserError(
            f"images={images} is too few for {len(pools)} domains: draw at least one from each"
        )
    drawn = []
    for (position, domain), pool, count in zip(chosen, pools, counts, strict=True):
        # A prefix of a fixed order, so that a larger sample contains a smaller one.
        order = np.random.default_rng([_DRAW, seed, position]).permutation(pool)
        part: Literal["train", "all"] = "train" if domain.name in training else "all"
        drawn.append(Drawn(domain, order[:count], Sample(domain.name, part, count, len(pool))))
    return drawn, set(wanted) == set(training)


def shares(sizes: Sequence[int], total: int) -> list[int]:
    """Split `total` over pools as evenly as their sizes allow; 0 takes everything.

    Examples:
        >>> shares([100, 3, 50], 60), shares([2, 2], 9), shares([2, 5], 0)
        ([29, 3, 28], [2, 2], [2, 5])
    """
    taken = list(sizes)
    left = total or sum(sizes)
    for rank, i in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        taken[i] = min(sizes[i], left // (len(sizes) - rank))
        left -= taken[i]
    return taken
