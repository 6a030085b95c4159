"""Schedules of the perturbation radius: callables from the step (counted from 1) to rho."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class InverseSqrt:
    r"""The schedule of Theorem 3.2: $\rho_t = \rho_0 / \sqrt{t}$ for $t = 1, 2, \dots$

    A dataclass rather than a closure, so that an optimizer holding one can be pickled.

    Examples:
        >>> InverseSqrt(0.1)(4)
        0.05
    """

    rho_0: float

    def __call__(self, step: int) -> float:
        return self.rho_0 / math.sqrt(step)
