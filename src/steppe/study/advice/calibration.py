"""Whether an optimizer that is forecast to be best with probability p is best that often."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from .ranking import DRAWS, fit
from .regret import Estimate, Group, estimate, folds
from .table import Example, check

EDGES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Borders of the bins of a reliability table."""


@dataclass(frozen=True)
class Bin:
    """Forecasts between two probabilities: their mean, and how often they came true."""

    low: float
    high: float
    count: int
    forecast: float
    frequency: float


@dataclass(frozen=True)
class Calibration:
    """How good probabilities are.

    Attributes:
        brier: mean squared error summed over optimizers (lower is better).
        brier_uniform: that of equal probabilities.
        gain: log score less that of equal probabilities, in nats; positive is better than guessing.
        bins: the reliability table.
    """

    brier: Estimate
    brier_uniform: Estimate
    gain: Estimate
    bins: tuple[Bin, ...]


def held_out_probabilities(
    examples: Sequence[Example], indicators: Sequence[str] | None = None, by: Group = "family"
) -> dict[str, dict[str, float]]:
    """For each task, every optimizer's probability of being best when its group is held out."""
    check(examples, "the table of tasks")
    found: dict[str, dict[str, float]] = {}
    for kept, out in folds(examples, by):
        ranking = fit(kept, indicators, baseline=next(iter(kept[0].scores)))
        found |= {example.task: ranking.predict(example.indicators).best for example in out}
    return found


def calibration(
    examples: Sequence[Example], probabilities: Mapping[str, Mapping[str, float]]
) -> Calibration:
    """Compare probabilities with the measured best, the event that `Forecast.best` predicts."""
    brier, uniform, gain = {}, {}, {}
    pairs = []
    for example in examples:
        truth, p = winners(example), probabilities[example.task]
        equal = 1 / len(truth)
        brier[example.task] = math.fsum((p[n] - truth[n]) ** 2 for n in truth)
        uniform[example.task] = math.fsum((equal - truth[n]) ** 2 for n in truth)
        # A probability of zero is one that the Monte Carlo draws did not resolve.
        gain[example.task] = math.fsum(
            truth[n] * math.log(max(p[n], 1 / DRAWS) / equal) for n in truth
        )
        pairs += [(p[n], truth[n]) for n in truth]
    return Calibration(
        estimate(examples, brier),
        estimate(examples, uniform),
        estimate(examples, gain),
        reliability(pairs),
    )


def winners(example: Example) -> dict[str, float]:
    """1 for the optimizer with the highest measured mean; ties share it."""
    means = {name: fmean(values) for name, values in example.scores.items()}
    top = max(means.values()) - 1e-9
    count = sum(mean >= top for mean in means.values())
    return {name: float(mean >= top) / count for name, mean in means.items()}


def reliability(pairs: Sequence[tuple[float, float]]) -> tuple[Bin, ...]:
    """Bins of (probability, outcome) that are not empty."""
    found = []
    for low, high in pairwise(EDGES):
        inside = [(p, o) for p, o in pairs if low <= p < high or p == high == EDGES[-1]]
        if inside:
            forecast, outcome = (fmean(side) for side in zip(*inside, strict=True))
            found.append(Bin(low, high, len(inside), forecast, outcome))
    return tuple(found)
