"""Evaluate a run on the parts of its domains, with progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from steppe.domains import Split
from steppe.domains.batches import Batch, View
from steppe.domains.dataset import Indices
from steppe.domains.store import Store
from steppe.errors import Interrupted
from steppe.validation import mean

from .config import RunConfig
from .evaluation import Scores, evaluate
from .interrupts import Interrupts
from .processes import Processes
from .progress import Display

TRAIN, VALIDATION = "train", "val"
"""The parts of a source domain."""


@dataclass
class Watch:
    """Shows the progress of an evaluation of `total` images, and stops it on an interrupt.

    Several processes agree on interrupts between steps, not here.
    """

    total: int
    world: int
    display: Display
    interrupts: Interrupts
    seen: int = 0

    def saw(self, images: int) -> None:
        """Count images that this process has evaluated."""
        self.seen += images * self.world
        self.display.evaluating(min(self.seen, self.total), self.total)
        if self.interrupts.number is not None and self.world == 1:
            raise Interrupted(self.interrupts.number)

    def over(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.saw(len(batch.labels))
            yield batch


class Scoring:
    """Scores the parts of every domain in use; each process evaluates its share.

    Args:
        predict: maps raw images, and the number of their source domain or None, to logits.
        watch: makes the `Watch` over an evaluation of that many images.
        batch: images per batch.
    """

    def __init__(
        self,
        config: RunConfig,
        splits: Sequence[Split],
        processes: Processes,
        store: Store,
        predict: Callable[[Tensor, int | None], Tensor],
        *,
        watch: Callable[[int], Watch],
        batch: int,
    ) -> None:
        self._config, self._splits, self._processes = config, splits, processes
        self._store, self._predict, self._watch = store, predict, watch
        self._batch_size = batch
        sources = [split.position for split in splits if split.source]
        self._sources = {position: number for number, position in enumerate(sources)}
        self._known: dict[tuple[str, str], Scores] = {}
        self._known_for = (-1, False)

    @property
    def validates(self) -> bool:
        return any(len(split.parts.get(VALIDATION, ())) for split in self._splits)

    def source_batches(self, part: str) -> Iterator[tuple[int, Iterator[Batch]]]:
        """The number of each source domain, with its images of a part, never augmented."""
        chosen = [s for s in self._splits if s.source and len(s.parts.get(part, ()))]
        watch = self._watch(sum(len(split.parts[part]) for split in chosen))
        view = View(self._config.image_size, augment=False)
        for split in chosen:
            images = _shuffled(split.parts[part])
            batches = self._store.evaluation(split.domain, images, view, self._batch_size)
            yield self._sources[split.position], watch.over(batches)

    def everything(self, done: int, averaged: bool) -> dict[str, Any]:
        """Scores of every part after `done` updates, in the format of records."""
        known = self._known if self._known_for == (done, averaged) else {}
        scores: dict[str, Any] = {split.domain.name: {} for split in self._splits}
        for (name, part), found in self._score_all(done, known).items():
            scores[name][part] = found.to_json()
        return scores

    def validation_loss(self, done: int, averaged: bool) -> float:
        """Mean over source domains of the cross-entropy on their validation images.

        The scores are kept, in case everything is evaluated after the same update.
        """
        if self._known_for != (done, averaged):
            self._known = self._score_all(done, {}, VALIDATION)
            self._known_for = (done, averaged)
        return sum(s.cross_entropy for s in self._known.values()) / len(self._known)

    def validation_accuracy(self, done: int) -> float:
        """Mean over source domains of the accuracy on their validation images."""
        return mean([s.accuracy for s in self._score_all(done, {}, VALIDATION).values()])

    def _score_all(
        self, done: int, known: Mapping[tuple[str, str], Scores], only: str | None = None
    ) -> dict[tuple[str, str], Scores]:
        """Scores of every nonempty part of every domain, or of one kind of part."""
        chosen = {
            (split.domain.name, part): (split, part)
            for split in self._splits
            for part, images in split.parts.items()
            if len(images) and only in (None, part)
        }
        watch = self._watch(sum(len(split.parts[part]) for split, part in chosen.values()))
        return {
            name: known.get(name) or self._score(*which, done, watch)
            for name, which in chosen.items()
        }

    def _score(self, split: Split, part: str, done: int, watch: Watch) -> Scores:
        config, rank, world = self._config, self._processes.rank, self._processes.world
        augmented = config.augment and config.augment_validation and part == VALIDATION
        shuffled = _shuffled(split.parts[part])
        batches = self._store.evaluation(
            split.domain,
            shuffled[rank::world],
            View(config.image_size, augmented),
            self._batch_size,
            # Longer than training's seeds, so that the draws never coincide.
            seeds=(config.seed, split.position, done, rank),
        )
        source = self._sources.get(split.position)
        return evaluate(
            lambda images: self._predict(images, source),
            watch.over(batches),
            self._processes.device,
            self._processes.sum,
        )


def _shuffled(images: Indices) -> Indices:
    # Files come sorted by class, and some algorithms use statistics of the batch.
    return np.random.default_rng(0).permutation(images)


def worst(domains: dict[str, Any]) -> dict[str, float]:
    """Lowest accuracy over domains, per kind of part."""
    splits = dict.fromkeys(name for scores in domains.values() for name in scores)
    return {
        name: min(d[name]["accuracy"] for d in domains.values() if name in d) for name in splits
    }
