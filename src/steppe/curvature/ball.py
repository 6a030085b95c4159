"""Zeroth- and first-order flatness: how much the loss and its gradient grow nearby."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn

from steppe.errors import UserError

from .ascent import Objective, Point, Summit, ascend
from .hessian import HessianOperator
from .krylov import random_vector, seeded
from .operator import LossFunction
from .results import Flatness, Progress, Report, check_ball, lambda_max_from_flatness

XI = 1e-12
"""The small constant of Algorithm 1; the optimizers' default."""

Move = Callable[[Tensor], None]
"""Moves the weights to a displacement from their original values."""


def flatness(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    rho: float,
    alpha: float = 0.5,
    *,
    params: Iterable[Tensor] | None = None,
    restarts: int = 3,
    steps: int = 100,
    tol: float = 1e-4,
    seed: int = 0,
    progress: Report | None = None,
) -> Flatness:
    r"""Measure the flatness of the mean loss over all batches.

    Projected gradient ascent from several starts searches for the maxima over the ball. Each result
    is attained at a point of the ball, so it is a lower bound on the maximum. It is never below the
    one-step value of the optimizers, where the first ascent starts. For $R^1$, the ascent follows
    $\nabla \|\nabla L\| = \nabla^2 L\, \nabla L / \|\nabla L\|$, a Hessian-vector product at the
    moved weights.

    The weights move in place and are restored exactly, even after an error or an interrupt. The
    model runs in evaluation mode. Memory: about ten parameter-sized vectors. $R^0$ is a difference
    of losses: if it is only a millionth of the loss, float32 rounds it away, so use float64.

    Args:
        model: any module.
        loss_fn: as for [`CurvatureOperator`][steppe.curvature.CurvatureOperator].
        batches: as for [`CurvatureOperator`][steppe.curvature.CurvatureOperator].
        rho: the radius of the ball, in the Euclidean norm over all parameters.
        alpha: the share of zeroth-order flatness in `fad`, from 0 to 1.
        params: the parameters that may move (default: those that require a gradient).
        restarts: number of ascents: one from the one-step point, the others from random points.
        steps: maximum points per ascent. Each costs one pass over the data, or two for $R^1$.
        tol: an ascent stops when five steps together gain less than this, relative to the value.
            If the largest eigenvalues are close together, the error can be several times `tol`.
        seed: seed of the random points.
        progress: called after each step.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> class Bowl(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        >>> curvatures = torch.tensor([[1.0, 2.0, 8.0]], dtype=torch.float64)
        >>> def loss_fn(model, batch):
        ...     return 0.5 * (batch @ model.w.square()).mean()
        >>> found = flatness(Bowl(), loss_fn, [curvatures], rho=0.1, alpha=0.5)
        >>> round(found.zeroth, 4), round(found.first, 4), round(found.fad, 4)
        (0.04, 0.08, 0.06)
        >>> round(lambda_max_from_flatness(found.fad, rho=0.1, alpha=0.5), 3)
        8.0
    """
    _check(rho, alpha, restarts, steps, tol)
    # The loss needs no second derivatives, so its graphs are not kept.
    op = HessianOperator(model, loss_fn, batches, params, keep_graphs=False)
    twice = HessianOperator(model, loss_fn, batches, op.params, check=False)
    search = _Search(twice, rho, steps, tol, seeded(op, seed), progress, 2 * restarts + 1)
    with _movable(op) as move:
        loss, g0 = op.gradient()
        gradient_norm = float(torch.linalg.vector_norm(g0))
        with _within(rho):
            rise = partial(_rise, op, move, loss)
            steepness = partial(_steepness, twice, move, rho)
            zeroth_step = rise(_towards(g0, rho))  # Alg. 1, line 6
            e_2 = _towards(zeroth_step.slope() - g0, rho)  # Alg. 1, lines 8 and 9
            del g0
            highest, zeroth_starts = search.best("zeroth", restarts, rise, zeroth_step)
            first_step = steepness(e_2)
            # By the mean value theorem, a large rise of the loss implies a large gradient.
            steepest, first_starts = search.best(
                "first", restarts + 1, steepness, first_step, highest.at
            )
    # The center belongs to the ball.
    zeroth, first = max(0.0, highest.value), max(rho * gradient_norm, steepest.value)
    fad = alpha * zeroth + (1 - alpha) * first
    return Flatness(
        rho=rho,
        alpha=alpha,
        zeroth=zeroth,
        first=first,
        fad=fad,
        zeroth_one_step=zeroth_step.value,
        first_one_step=first_step.value,
        fad_one_step=alpha * zeroth_step.value + (1 - alpha) * first_step.value,
        lambda_max=lambda_max_from_flatness(fad, rho, alpha),
        converged=highest.converged and steepest.converged,
        passes=op.passes + twice.passes,
        loss=loss,
        gradient_norm=gradient_norm,
        zeroth_starts=zeroth_starts,
        first_starts=first_starts,
    )


def _rise(op: HessianOperator, move: Move, loss: float, at: Tensor) -> Point:
    r"""$L(\theta + e) - L(\theta)$."""
    move(at)
    there, gradient = op.gradient()
    return Point(at, there - loss, lambda: gradient)


def _steepness(op: HessianOperator, move: Move, rho: float, at: Tensor) -> Point:
    r"""$\rho \|\nabla L(\theta + e)\|$."""
    move(at)
    _, gradient = op.gradient()
    norm = float(torch.linalg.vector_norm(gradient))

    def slope() -> Tensor:
        if not norm:  # the norm is not differentiable at zero
            return torch.zeros_like(gradient)
        return op @ (gradient * (rho / norm))

    return Point(at, rho * norm, slope)


@dataclass
class _Search:
    op: HessianOperator
    rho: float
    steps: int
    tol: float
    generator: torch.Generator
    progress: Report | None
    ascents: int
    done: int = 0

    def best(
        self, order: str, number: int, objective: Objective, first: Point, *others: Tensor
    ) -> tuple[Summit, tuple[float, ...]]:
        """The highest result of `number` ascents, and the value that each reached.

        They start at the given points, then at random points of the sphere. A start at the center
        is replaced by a random one, because the slope may vanish there.
        """
        best, values = Summit(first.at, -math.inf, converged=False), []
        for at in islice(chain([first.at], others, repeat(None)), number):
            if at is None or not at.any():
                at = random_vector(self.op, self.generator)
                at *= self.rho / float(torch.linalg.vector_norm(at))
            start = first if at is first.at else objective(at)
            report = partial(self._tell, order)
            summit = ascend(
                objective, start, self.rho, steps=self.steps, tol=self.tol, report=report
            )
            values.append(summit.value)
            best = max(best, summit, key=lambda one: one.value)
            self.done += 1
        return best, tuple(values)

    def _tell(self, order: str, step: int, value: float) -> None:
        if self.progress is not None:
            note = f"{order}-order flatness {value:.4g}"
            share = (self.done + step / self.steps) / self.ascents
            self.progress(Progress(share, self.op.products, note))


@contextmanager
def _movable(op: HessianOperator) -> Iterator[Move]:
    """Yield a function that moves the weights, and restore them afterwards."""
    # In inference mode, writes would not update the tensor versions that autograd checks.
    with torch.inference_mode(False), torch.no_grad():
        home = torch.cat([p.reshape(-1) for p in op.params])

        def put(weights: Tensor) -> None:
            for p, part in zip(op.params, op.unflatten(weights), strict=True):
                p.copy_(part)

        try:
            yield lambda e: put(home + e)
        finally:
            put(home)


@contextmanager
def _within(rho: float) -> Iterator[None]:
    """Add to an error that it occurred at moved weights."""
    try:
        yield
    except UserError as error:
        message = f"within rho={rho:g} of the weights, {error} Alternatively, lower rho."
        raise UserError(message) from None


def _towards(vector: Tensor, rho: float) -> Tensor:
    """The displacement by which the optimizers climb along a vector."""
    return vector * (rho / (float(torch.linalg.vector_norm(vector)) + XI))


def _check(rho: float, alpha: float, restarts: int, steps: int, tol: float) -> None:
    check_ball(rho, alpha)
    if restarts < 1 or steps < 1:
        raise UserError(
            f"restarts and steps must be at least 1, got restarts={restarts}, steps={steps}"
        )
    if not tol >= 0:
        raise UserError(f"tol must be >= 0, got {tol}")
