"""Intervals that stay valid however often one looks: a t-test for any number of seeds.

A mean is tested with the effect size distributed as N(0, g) under the alternative and the
right-Haar prior on the standard deviation under both (Lai 1976; Perez-Ortiz et al. 2022; Wang and
Ramdas 2024). Its e-value is a martingale under the null, so that it exceeds 1/alpha at any look
with probability alpha at most (Ville). Inverting it gives the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

G = 1.0
"""Variance of the effect size, in squared standard deviations."""
ROUNDING = 1e-9
"""Points. Differences that vary less have no spread."""


@dataclass(frozen=True)
class Interval:
    """A mean difference in points, and its interval over seeds."""

    mean: float
    low: float
    high: float
    spread: float
    """Standard deviation over seeds."""
    seeds: int


def half_width(n: int, alpha: float, g: float = G) -> float:
    r"""Half of the interval's width in standard deviations; infinite for few seeds.

    With \( r = (\sqrt{1 + n g} / \alpha)^{2 / n} \) it is
    \( \sqrt{(n - 1) (r - 1) / (n (1 - r / (1 + n g)))} \), while \( r < 1 + n g \).

    Examples:
        >>> [round(half_width(n, 0.05), 2) for n in (6, 10, 20, 40)]
        [2.22, 1.22, 0.77, 0.53]
    """
    if n < 2:
        return math.inf
    r = (math.sqrt(1 + n * g) / alpha) ** (2 / n)
    room = 1 - r / (1 + n * g)
    return math.sqrt((n - 1) * (r - 1) / (n * room)) if room > 0 else math.inf


def e_value(values: Sequence[float], mean: float = 0.0, g: float = G) -> float:
    """Evidence against a mean, the same at every look: 20 rejects it at the 5% level."""
    n = len(values)
    spread = float(np.std(values, ddof=1)) if n > 1 else 0.0
    if spread <= ROUNDING:
        return 1.0
    t2 = n * (float(np.mean(values)) - mean) ** 2 / spread**2
    nu = n - 1
    ratio = (1 + t2 / (nu * (1 + n * g))) / (1 + t2 / nu)
    return float((1 + n * g) ** -0.5 * ratio ** (-n / 2))


def interval(values: Sequence[float], alpha: float, g: float = G) -> Interval:
    """The interval for the mean of all differences seen so far.

    It is infinite where all differences are equal: accuracies are counts of images, so a few can be
    equal by chance.
    """
    mean = float(np.mean(values))
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    reach = half_width(len(values), alpha, g) * spread if spread > ROUNDING else math.inf
    return Interval(mean, mean - reach, mean + reach, spread, len(values))


def first_look(alpha: float, widest: float = 2.0) -> int:
    """The number of seeds from which on a difference of `widest` standard deviations can be seen.

    Examples:
        >>> first_look(0.05), first_look(0.05 / 6)
        (7, 9)
    """
    return next(n for n in range(2, 10_000) if half_width(n, alpha) <= widest)
