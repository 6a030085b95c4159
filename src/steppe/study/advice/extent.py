"""What an advisor runs, and how much."""

from __future__ import annotations

from dataclasses import dataclass, replace

PROBED = ("sgd", "adamw", "sam", "fad")
"""The optimizers of the short runs."""
BASELINE = "adamw"
"""What the others are compared with."""
RELATIVES = {
    "adam": "adamw",
    **dict.fromkeys(("msam", "sagm", "disam"), "sam"),
    "gam": "fad",
}
"""Optimizers without short runs, and those whose short runs stand for them."""
GAIN = "left-out gain of {}"
"""The indicator that is an optimizer's lead over the baseline in short runs."""
FACTORS = (1 / 3, 1.0, 3.0)
"""Learning rates that are tried, relative to the default."""
PER_GPU = 4
"""Runs that share a GPU by default."""


@dataclass(frozen=True)
class Extent:
    """How much to run.

    Attributes:
        steps: updates of a short run.
        warm_up: updates before the loss is measured.
        seeds: runs that differ in the seed alone.
        factors: learning rates, relative to the default.
        left_out: maximum number of source domains to leave out (default: all).
    """

    steps: int = 150
    warm_up: int = 50
    seeds: int = 2
    factors: tuple[float, ...] = FACTORS
    left_out: int | None = None

    def __str__(self) -> str:
        rates = f"{len(self.factors)} learning rate{'s' * (len(self.factors) > 1)}"
        seeds = f"{self.seeds} seed{'s' * (self.seeds > 1)}"
        domains = "every domain" if self.left_out is None else f"{self.left_out} domains"
        return f"{self.steps} updates, {rates} and {seeds}, with {domains} left out"


FULL = Extent()
EXTENTS = (
    FULL,
    replace(FULL, seeds=1),
    replace(FULL, seeds=1, factors=(1.0,)),
    replace(FULL, seeds=1, factors=(1.0,), left_out=2),
    replace(FULL, seeds=1, factors=(1.0,), left_out=2, steps=100),
    replace(FULL, seeds=1, factors=(1.0,), left_out=2, steps=50),
)
"""From what the advisor was fitted on to the least that says anything."""
