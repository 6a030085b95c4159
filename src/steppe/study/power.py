"""How many seeds a claim will need, by simulating its looks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from .design import Design
from .sequence import half_width

STUDIES = 4000
"""Simulated studies. The standard error of a probability is at most 0.8 points."""
_Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Forecast:
    """What to expect of a claim whose true difference is known.

    Attributes:
        effect: the true difference, in points.
        power: probability that the claim is decided rightly within the design's seeds.
        typical: the seeds after which half of the studies are decided, or None.
        enough: the seeds after which the design's `power` of them are, or None.
    """

    effect: float
    power: float
    typical: int | None
    enough: int | None


def forecast(design: Design, spread: float, effect: float, level: float) -> Forecast:
    """Simulate a claim with normal differences between seeds.

    Right are "better" or "worse" for an effect of at least the smallest that matters, "equivalent"
    for a smaller one.

    Args:
        design: the study.
        spread: standard deviation of the difference over seeds, in points.
        effect: the true mean difference, in points.
        level: the claim's error rate.
    """
    right = _seeds_to_right(
        spread, effect, level, design.smallest_effect, design.first_seeds, design.max_seeds
    )
    decided = np.sort(right[right > 0])
    at = (int(np.ceil(share * STUDIES)) - 1 for share in (0.5, design.power))
    typical, enough = (int(decided[i]) if i < len(decided) else None for i in at)
    return Forecast(effect, len(decided) / STUDIES, typical, enough)


@cache
def _seeds_to_right(
    spread: float, effect: float, level: float, smallest: float, first: int, most: int
) -> _Array:
    """Of every simulated study, the seeds at which it was decided rightly; 0 where it was not."""
    rng = np.random.default_rng(0)
    found, total, squares = (np.zeros(STUDIES) for _ in range(3))
    open_ = np.ones(STUDIES, dtype=bool)
    for n in range(1, most + 1):
        noise = rng.normal(0.0, spread, STUDIES)
        total += noise
        squares += noise**2
        if n < first:
            continue
        mean = effect + total / n
        s = np.sqrt((squares - total**2 / n) / (n - 1))
        reach = half_width(n, level) * s
        low, high = mean - reach, mean + reach
        same = (low > -smallest) & (high < smallest)
        apart = ~same & ((low > 0) | (high < 0))
        truly = np.sign(mean) == np.sign(effect) if abs(effect) >= smallest else False
        found[open_ & ((apart & truly) if abs(effect) >= smallest else same)] = n
        open_ &= ~(same | apart)
    return found
