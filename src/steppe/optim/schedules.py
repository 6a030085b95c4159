"""Hyperparameters that change during training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

Hyper = float | Callable[[int], float] | Callable[[int, float], float]
"""A number, or a schedule that maps the step (counted from 1) to a number.

A schedule whose `sees_lr` is true is called with the step and the group's learning rate.
"""


@dataclass(frozen=True)
class FollowLR:
    r"""A schedule that follows the learning rate, like GSAM's: from `high` at `lr_high` to `low`.

    $$ \rho_t = \text{low} + (\text{high} - \text{low})
    \frac{\eta_t - \eta_\text{low}}{\eta_\text{high} - \eta_\text{low}} $$

    Examples:
        >>> FollowLR(high=0.6, low=0.2, lr_high=0.1)(step=1, lr=0.05)
        0.4
    """

    high: float
    low: float
    lr_high: float
    lr_low: float = 0.0
    sees_lr: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.lr_high == self.lr_low:
            raise ValueError(f"lr_high and lr_low must differ, got {self.lr_high} for both")

    def __call__(self, step: int, lr: float) -> float:
        share = (lr - self.lr_low) / (self.lr_high - self.lr_low)
        return self.low + (self.high - self.low) * share


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


def scheduled(value: Any, step: int, group: Mapping[str, Any]) -> Any:
    """A hyperparameter of a group at a step: schedules are evaluated."""
    if not callable(value):
        return value
    return value(step, float(group["lr"])) if getattr(value, "sees_lr", False) else value(step)
