"""Small tasks that the advisor is fitted on: eleven families, each in four variants.

Importing this module registers every task as a dataset, so name it as a plugin:
``steppe train --plugin steppe.domains.tasks --dataset rotations-plain --target 60 --out runs/x``.
A task has three source domains and, last, the held-out one. All images are generated, or made from
scikit-learn's digits, with NumPy's `RandomState`, so everyone gets the same.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from steppe.domains.catalog import DATASETS
from steppe.domains.dataset import Contents
from steppe.domains.spec import DatasetSpec

from . import counting, digits, doodles, segments, textures
from .family import VARIANTS, Family

FAMILIES = {
    family.name: family
    for family in (
        *digits.FAMILIES,
        *doodles.FAMILIES,
        *textures.FAMILIES,
        *counting.FAMILIES,
        *segments.FAMILIES,
    )
}


@dataclass(frozen=True)
class Task:
    """A dataset: a family of shifts in a variant, such as ``rotations-plain``."""

    name: str
    family: str
    base: str
    variant: str

    @property
    def target(self) -> str:
        """The held-out domain, which is the last one."""
        return FAMILIES[self.family].domains[-1]

    def read(self, root: Path | None = None) -> Contents:
        """Return the classes and the domains."""
        return copy.deepcopy(_generated(self))  # so that callers may modify it


@cache
def _generated(task: Task) -> Contents:
    return FAMILIES[task.family].generate(VARIANTS[task.variant])


def _spec(task: Task, family: Family) -> DatasetSpec:
    variant = VARIANTS[task.variant]
    return DatasetSpec(
        name=task.name,
        domains=family.domains,
        labels=family.domains,
        n_classes=len(family.labels(variant)),
        citation="Alpaydin and Kaynak, 1998 (as in scikit-learn), changed by steppe"
        if task.base == "digits"
        else "drawn by steppe",
        read=task.read,
        counts=family.counts(variant),
        steps=201,
        checkpoint_every=200,
        batch_size=16,
        image_size=family.size,
        channels=family.channels,
        augment=False,
        backbone="small-cnn",
        pretrained=False,
    )


TASKS = tuple(
    Task(f"{family.name}-{variant}", family.name, family.base, variant)
    for family in FAMILIES.values()
    for variant in VARIANTS
)
for _task in TASKS:
    DATASETS.add(_spec(_task, FAMILIES[_task.family]))
