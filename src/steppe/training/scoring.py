"""The evaluations of a run: which images, seen how, and how far they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from steppe.domains import Split
from steppe.domains.batches import Batch, View
from steppe.domains.store import Store
from steppe.errors import Interrupted

from .config import RunConfig
from .evaluation import Scores, evaluate
from .interrupts import Interrupts
from .processes import Processes
from .progress import Display

VALIDATION = "val"
"""The part of a source domain that is kept for validation."""


@dataclass
class Watch:
    """Shows how far an evaluation of `total` images is, and stops it when the run is interrupted.

    Several processes, which each see their share, agree on that between steps, not here.
    """

    total: int
    world: int
    display: Display
    interrupts: Interrupts
    seen: int = 0

    def saw(self, images: int) -> None:
        """This process has so many images more."""
        self.seen += images * self.world
        self.display.evaluating(min(self.seen, self.total), self.total)
        if self.interrupts.number is not None and self.world == 1:
            raise Interrupted(self.interrupts.number)

    def over(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.saw(len(batch.labels))
            yield batch


class Scoring:
    """Scores of the parts of every domain in use; each process evaluates its share.

    Args:
        predict: maps images, as they were read, to logits.
        watch: makes the watch over an evaluation of so many images.
        batch: images that are predicted together.
    """

    def __init__(
        self,
        config: RunConfig,
        splits: Sequence[Split],
        processes: Processes,
        store: Store,
        predict: Callable[[Tensor], Tensor],
        *,
        watch: Callable[[int], Watch],
        batch: int,
    ) -> None:
        self._config, self._splits, self._processes = config, splits, processes
        self._store, self._predict, self._watch = store, predict, watch
        self._batch_size = batch
        self._known: dict[tuple[str, str], Scores] = {}
        self._known_after = -1

    @property
    def validates(self) -> bool:
        return any(len(split.parts.get(VALIDATION, ())) for split in self._splits)

    def everything(self, done: int, averaged: bool) -> dict[str, Any]:
        """The scores of every part after so many updates, as records have them."""
        known = {} if averaged or self._known_after != done else self._known
        scores: dict[str, Any] = {split.domain.name: {} for split in self._splits}
        for (name, part), found in self._score_all(done, known).items():
            scores[name][part] = found.to_json()
        return scores

    def validation_loss(self, done: int) -> float:
        """The mean over source domains of the cross-entropy on their validation images.

        Remembered, in case everything is evaluated after the same update.
        """
        self._known, self._known_after = self._score_all(done, {}, VALIDATION), done
        return sum(s.cross_entropy for s in self._known.values()) / len(self._known)

    def _score_all(
        self, done: int, known: Mapping[tuple[str, str], Scores], only: str | None = None
    ) -> dict[tuple[str, str], Scores]:
        """The scores of every part of every domain that has images, or of one part."""
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
        return evaluate(
            self._predict, watch.over(batches), self._processes.device, self._processes.sum
        )


def worst(domains: dict[str, Any]) -> dict[str, float]:
    """The lowest accuracy of any domain, of each kind of split."""
    splits = dict.fromkeys(name for scores in domains.values() for name in scores)
    return {
        name: min(d[name]["accuracy"] for d in domains.values() if name in d) for name in splits
    }
