"""Holm's correction for multiple tests."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values so that the probability of any false rejection stays below the level.

    The i-th smallest of m is multiplied by m - i + 1, and the results are made monotone (Holm
    1979). The tests need not be independent.

    Examples:
        >>> holm([0.01, 0.04, 0.03, 0.005])
        [0.03, 0.06, 0.06, 0.02]
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, floor = [1.0] * len(p_values), 0.0
    for rank, at in enumerate(order):
        floor = max(floor, min(1.0, (len(order) - rank) * p_values[at]))
        adjusted[at] = floor
    return adjusted
