"""A family of tasks: four domains of the same classes, of which the last is held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from steppe.domains.dataset import Arrays, Contents, Domain, Indices
from steppe.domains.splits import seed_hash

Floats = NDArray[np.float64]
Painter = Callable[[Indices, RandomState], Floats]
"""Draws one image per label: N x size x size, or x 3 if it has colors; clipped to [0, 1]."""


@dataclass(frozen=True)
class Variant:
    """How many images a task has, of how many classes, and how many labels are wrong."""

    per_source: int = 240
    per_target: int = 300
    classes: int | None = None
    """The number of classes, from the first on; None for all."""
    wrong: float = 0.0
    """The share of the source domains' labels that are wrong."""


VARIANTS = {
    "plain": Variant(),
    "noisy": Variant(wrong=0.25),
    "few": Variant(per_source=60),
    "narrow": Variant(per_source=160, per_target=200, classes=4),  # as many as `digits` has
}


@dataclass(frozen=True)
class Family:
    """A kind of shift between domains of one base.

    Attributes:
        base: the source of its images.
        painters: draw the domains; the last one is the target.
    """

    name: str
    base: str
    classes: tuple[str, ...]
    size: int
    channels: int
    painters: Mapping[str, Painter]

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(self.painters)

    def labels(self, variant: Variant) -> tuple[str, ...]:
        return self.classes[: variant.classes]

    def counts(self, variant: Variant) -> tuple[int, ...]:
        return (variant.per_source,) * (len(self.painters) - 1) + (variant.per_target,)

    def generate(self, variant: Variant) -> Contents:
        """Draw all domains. Variants with the same classes and counts share their images."""
        n = len(self.labels(variant))
        counts = self.counts(variant)
        domains = []
        for (name, paint), count in zip(self.painters.items(), counts, strict=True):
            rng = RandomState(seed_hash("task", self.name, name))
            labels = rng.permutation(np.arange(count, dtype=np.int64) % n)
            # Rounded twice: processors differ in a sine's last bit, which must not decide a tie.
            image = np.round(255 * np.clip(paint(labels, rng), 0, 1), 6)
            pixels = np.rint(image).astype(np.uint8).reshape(count, self.size, self.size, -1)
            if name != self.domains[-1]:
                labels = _mislabel(labels, n, variant.wrong, rng)
            domains.append(Domain(name, Arrays(pixels), labels))
        return self.labels(variant), tuple(domains)


def _mislabel(labels: Indices, n: int, share: float, rng: RandomState) -> Indices:
    """Give this share of the images another class, uniformly among the others."""
    labels, wrong = labels.copy(), rng.permutation(len(labels))[: round(share * len(labels))]
    labels[wrong] = (labels[wrong] + rng.randint(1, n, len(wrong))) % n
    return labels
