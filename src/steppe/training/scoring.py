"""The evaluations of a run: which images, seen how, and how far they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from steppe.domains import Split
from steppe.domains.batches import Batch, View
from steppe.domains.store import Store
from steppe.errors import Interrupted

from .config import RunConfig
from .evaluation import BATCH, Scores, evaluate
from .interrupts import Interrupts
from .processes import Processes
from .progress import Display

VALIDATION = "val"
"""The part of a source domain that is kept for validation."""


class Scoring:
    """Scores of the parts of every domain in use.

    Args:
        config: the run.
        splits: its domains.
        processes: this process among the others; each evaluates its share.
        store: where images come from.
        predict: maps images, as they were read, to logits.
        batch_size: images that are predicted together.
    """

    def __init__(
        self,
        config: RunConfig,
        splits: Sequence[Split],
        processes: Processes,
        store: Store,
        predict: Callable[[Tensor], Tensor],
        batch_size: int = BATCH,
    ) -> None:
        self._config, self._splits, self._processes = config, splits, processes
        self._store, self._predict, self._batch_size = store, predict, batch_size
        self._known: dict[str, Scores] = {}
        self._known_after = -1

    @property
    def validates(self) -> bool:
        """Whether there are images for validation."""
        return any(len(split.parts.get(VALIDATION, ())) for split in self._splits)

    def everything(
        self, done: int, display: Display, interrupts: Interrupts, averaged: bool
    ) -> dict[str, Any]:
        """The scores of every part after so many updates, as records have them."""
        known = {} if averaged or self._known_after != done else self._known
        chosen = [
            (split, part)
            for split in self._splits
            for part, images in split.parts.items()
            if len(images)
        ]
        watch = self._watch(chosen, display, interrupts)
        scores: dict[str, Any] = {split.domain.name: {} for split in self._splits}
        for split, part in chosen:
            name = split.domain.name
            if part == VALIDATION and name in known:
                found = known[name]
            else:
                found = self._score(split, part, done, watch)
            scores[name][part] = found.to_json()
        return scores

    def validation_loss(self, done: int, display: Display, interrupts: Interrupts) -> float:
        """The mean over source domains of the cross-entropy on their validation images.

        Remembered, in case everything is evaluated after the same update.
        """
        chosen = [
            (split, VALIDATION) for split in self._splits if len(split.parts.get(VALIDATION, ()))
        ]
        watch = self._watch(chosen, display, interrupts)
        self._known = {
            split.domain.name: self._score(split, part, done, watch) for split, part in chosen
        }
        self._known_after = done
        return sum(s.cross_entropy for s in self._known.values()) / len(self._known)

    def _score(
        self,
        split: Split,
        part: str,
        done: int,
        watch: Callable[[Iterator[Batch]], Iterator[Batch]],
    ) -> Scores:
        config, rank, world = self._config, self._processes.rank, self._processes.world
        device = self._processes.device
        augmented = config.augment and config.augment_validation and part == VALIDATION
        # Lists of files go class by class, and some algorithms look at a batch as a whole.
        shuffled = np.random.default_rng(0).permutation(split.parts[part])
        batches = self._store.evaluation(
            split.domain,
            shuffled[rank::world],
            View(config.image_size, augmented),
            self._batch_size,
            # More numbers than training seeds with: never the same draws.
            seeds=(config.seed, split.position, done, rank),
        )
        return evaluate(self._predict, watch(batches), device, self._processes.sum)

    def _watch(
        self, chosen: Sequence[tuple[Split, str]], display: Display, interrupts: Interrupts
    ) -> Callable[[Iterator[Batch]], Iterator[Batch]]:
        """Makes batches show how far the evaluation is, and stop when it is interrupted."""
        total = sum(len(split.parts[part]) for split, part in chosen)
        world, seen = self._processes.world, 0

        def watch(batches: Iterator[Batch]) -> Iterator[Batch]:
            nonlocal seen
            for batch in batches:
                seen += len(batch.labels) * world
                display.evaluating(min(seen, total), total)
                if interrupts.number is not None and world == 1:
                    raise Interrupted(interrupts.number)
                yield batch

        return watch


def worst(domains: dict[str, Any]) -> dict[str, float]:
    """The lowest accuracy of any domain, of each kind of split."""
    splits = dict.fromkeys(name for scores in domains.values() for name in scores)
    return {
        name: min(d[name]["accuracy"] for d in domains.values() if name in d) for name in splits
    }
