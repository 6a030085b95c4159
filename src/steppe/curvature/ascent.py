"""The maximum of a function over a ball, by gradient ascent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

WINDOW = 5
"""Steps whose gain is taken together to see whether the ascent still moves."""

SHORTEST = 1e-7
"""Steps shorter than this, relative to the radius, are lost in rounding."""


class Point(NamedTuple):
    """A displacement from the ball's centre, and the value there."""

    at: Tensor
    value: float
    slope: Callable[[], Tensor]
    """Computes the gradient; to be called before another point is asked for."""


Objective = Callable[[Tensor], Point]
"""A function of the displacement."""


class Summit(NamedTuple):
    """Where an ascent ended, and whether it stopped by itself."""

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
    r"""Climb from a point of the ball $\|e\| \le$ `radius`, never down.

    Conjugate gradients (Hestenes and Stiefel), projected: a step that leaves the ball is scaled
    back to its surface, and on the surface only the tangential part of a gradient that points
    outwards counts. A step is taken only if the value rises. Its length is the one at which the
    slope along the last step would have vanished; after a failure it is cut by a parabola, and
    after two of them the gradient alone is followed. On the sphere around the minimum of a
    quadratic, this is an eigenvalue solver with nearly the convergence of Lanczos, and it follows
    an indefinite Hessian to its positive side, where power iteration would not.

    At most `steps` points are tried; it stops when five together gain less than `tol`, relative to
    the value. The objective was asked for `start` last. `report` is given the number of each step,
    from 1, and the best value.
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
            bend = slope - float(ahead @ direction)  # by how much the slope fell
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
            # The parabola's top: at most half, and not all too near.
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
    """A vector without the part along `at`, where that would lead out of the ball."""
    squared = float(at @ at)
    if squared < (radius * (1 - 1e-6)) ** 2 or float(gradient @ at) <= 0:
        return vector
    return vector - at * (float(vector @ at) / squared)
