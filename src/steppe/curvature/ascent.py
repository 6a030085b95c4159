"""The maximum of a function over a ball, by gradient ascent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

WINDOW = 5
"""Number of successful steps over which progress is measured."""

SHORTEST = 1e-7
"""Smallest step, relative to the radius, that is not lost to rounding."""


class Point(NamedTuple):
    """A displacement from the center of the ball, and the value there."""

    at: Tensor
    value: float
    slope: Callable[[], Tensor]
    """Computes the gradient; call it before evaluating another point."""


Objective = Callable[[Tensor], Point]


class Summit(NamedTuple):
    """Where an ascent ended, and whether it converged."""

    at: Tensor
    value: float
    converged: bool


def ascend(
    objective: Objective,
    start: Point,
    radius: float,
    *,
    steps: int,
    tol: float,
    report: Callable[[int, float], None],
) -> Summit:
    r"""Climb from a point of the ball $\|e\| \le$ `radius` by projected conjugate gradients.

    A step that leaves the ball is scaled back to its surface, where only the tangential part of an
    outward gradient counts. A step is accepted only if the value rises (Hestenes-Stiefel
    directions). Its length is the one at which the slope along the last step would have vanished;
    after a failure, a parabola shortens it, and after two failures the direction is reset to the
    gradient. On the sphere around the minimum of a quadratic, this is an eigenvalue solver that
    converges almost like Lanczos. Unlike power iteration, it follows an indefinite Hessian to its
    positive side.

    Tries at most `steps` points, and stops when five accepted steps together gain less than `tol`,
    relative to the value. `start` must be the last point that the objective evaluated. `report`
    receives the number of each step, from 1, and the best value.
    """
    at, value, slope_at = start
    gradient = slope_at()
    gradient = _inward(at, gradient, gradient, radius)
    direction, heights, failures = gradient, [value], 0
    length = float(torch.linalg.vector_norm(direction))
    step = radius / length if length else 0.0
    for number in range(1, steps + 1):
        slope = float(gradient @ direction)
        if not slope > 0:
            return Summit(at, value, converged=True)
        trial = _within(at + step * direction, radius)
        _, reached, slope_at = objective(trial)
        report(number, max(value, reached))
        if reached > value:
            ahead = slope_at()
            direction = _inward(trial, ahead, direction, radius)
            ahead = _inward(trial, ahead, ahead, radius)
            bend = slope - float(ahead @ direction)  # decrease of the slope
            step *= min(max(slope / bend, 0.25), 4.0) if bend > 0 else 4.0
            conjugate = float(ahead @ (ahead - gradient)) / bend if bend > 0 else 0.0
            direction = ahead + max(0.0, conjugate) * direction
            if float(ahead @ direction) <= 0:
                direction = ahead
            at, value, gradient, failures = trial, reached, ahead, 0
            heights = [*heights[-WINDOW:], value]
            stalled = len(heights) > WINDOW and value - heights[0] <= tol * abs(value)
            if stalled:
                return Summit(at, value, converged=True)
        else:
            failures += 1
            expected = slope * step
            # The top of the parabola: at most half the step, and at least a tenth.
            step *= max(expected / (2 * (expected + (value - reached))), 0.1)
            length = float(torch.linalg.vector_norm(direction))
            if step * length <= SHORTEST * radius:
                return Summit(at, value, converged=True)
            if failures == 2:
                direction = gradient
                step *= length / float(torch.linalg.vector_norm(direction))
    return Summit(at, value, converged=False)


def _within(at: Tensor, radius: float) -> Tensor:
    """The nearest point of the ball."""
    length = float(torch.linalg.vector_norm(at))
    return at * (radius / length) if length > radius else at


def _inward(at: Tensor, gradient: Tensor, vector: Tensor, radius: float) -> Tensor:
    """The tangential part of a vector, if `at` is on the surface and the gradient points out."""
    squared = float(at @ at)
    if squared < (radius * (1 - 1e-6)) ** 2 or float(gradient @ at) <= 0:
        return vector
    return vector - at * (float(vector @ at) / squared)
