"""Zeroth- and first-order flatness: how much the loss and its gradient grow nearby."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from steppe.errors import UserError

from .ascent import Objective, Summit, ascend
from .hessian import HessianOperator
from .krylov import random_vector, seeded
from .operator import LossFunction
from .progress import Progress, Report
from .results import Flatness, check_ball, lambda_max_from_flatness

XI = 1e-12
"""The small constant of Algorithm 1, as the optimizers have it by default."""

Move = Callable[[Tensor], None]
"""Puts the weights at a displacement from where they were."""


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

    The maxima over the ball are sought by projected gradient ascent from several starts. Each
    value is attained at a point of the ball, so it is a lower bound on the maximum; it is never
    below the one-step value of the optimizers, which is where the first ascent starts. For $R^1$,
    the ascent follows $\nabla \|\nabla L\| = \nabla^2 L\, \nabla L / \|\nabla L\|$, a
    Hessian-vector product at the moved weights.

    The weights are moved in place and put back exactly, also after an error or an interrupt. While
    it computes, the model is in evaluation mode. Memory: some ten vectors of the parameters' size.
    $R^0$ is a difference of losses: where it is a millionth of the loss, float32 has no digits of
    it left, and float64 should be used.

    Args:
        model: any module.
        loss_fn: `loss_fn(model, batch)` gives the mean loss of a batch, a scalar.
        batches: gives the same batches every time it is iterated over; see
            [`CurvatureOperator`][steppe.curvature.CurvatureOperator].
        rho: the radius of the ball, in the Euclidean norm over all parameters together.
        alpha: the share of zeroth-order flatness in `fad`, from 0 to 1.
        params: the parameters that may move (default: those that require a gradient).
        restarts: starts of each ascent: the one-step point, and random points for the others.
        steps: the most points an ascent tries. One costs a pass over the data, or two for $R^1$.
        tol: an ascent stops when five steps together gain less than this, relative to the value.
            Where the largest eigenvalues lie close together, the maximum can be missed by some
            times as much.
        seed: of the random points.
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
    # The loss needs no second derivatives: its graphs are not kept.
    op = HessianOperator(model, loss_fn, batches, params, keep_graphs=False)
    twice = HessianOperator(model, loss_fn, batches, op.params, check=False)
    search = _Search(twice, rho, steps, tol, seeded(op, seed), progress, 2 * restarts + 1)
    with _movable(op) as move:
        loss, g0 = op.gradient()
        gradient_norm = float(torch.linalg.vector_norm(g0))
        with _within(rho):
            rise = _Rise(op, move, loss)
            e_1 = _towards(g0, rho)  # Alg. 1, line 6
            zeroth_one_step = rise.value(e_1)
            e_2 = _towards(rise.slope() - g0, rho)  # Alg. 1, lines 8 and 9
            del g0
            highest, zeroth_starts = search.best(rise, "zeroth", [e_1], restarts)
            steepness = _Steepness(twice, move, rho)
            first_one_step = steepness.value(e_2)
            # By the mean value theorem, the loss cannot rise far without a steep place.
            steepest, first_starts = search.best(
                steepness, "first", [e_2, highest.at], restarts + 1
            )
    # The centre belongs to the ball.
    zeroth, first = max(0.0, highest.value), max(rho * gradient_norm, steepest.value)
    fad = alpha * zeroth + (1 - alpha) * first
    return Flatness(
        rho=rho,
        alpha=alpha,
        zeroth=zeroth,
        first=first,
        fad=fad,
        zeroth_one_step=zeroth_one_step,
        first_one_step=first_one_step,
        fad_one_step=alpha * zeroth_one_step + (1 - alpha) * first_one_step,
        lambda_max=lambda_max_from_flatness(fad, rho, alpha),
        converged=highest.converged and steepest.converged,
        passes=op.passes + twice.passes,
        loss=loss,
        gradient_norm=gradient_norm,
        zeroth_starts=zeroth_starts,
        first_starts=first_starts,
    )


class _Rise:
    r"""$L(\theta + e) - L(\theta)$."""

    def __init__(self, op: HessianOperator, move: Move, loss: float) -> None:
        self._op, self._move, self._centre = op, move, loss
        self._at: Tensor | None = None

    def value(self, at: Tensor) -> float:
        if at is not self._at:  # the one-step point is asked for twice
            self._move(at)
            self._loss, self._gradient = self._op.gradient()
            self._at = at
        return self._loss - self._centre

    def slope(self) -> Tensor:
        return self._gradient


class _Steepness:
    r"""$\rho \|\nabla L(\theta + e)\|$."""

    def __init__(self, op: HessianOperator, move: Move, rho: float) -> None:
        self._op, self._move, self._rho = op, move, rho
        self._at: Tensor | None = None

    def value(self, at: Tensor) -> float:
        if at is not self._at:
            self._move(at)
            _, self._gradient = self._op.gradient()
            self._norm = float(torch.linalg.vector_norm(self._gradient))
            self._at = at
        return self._rho * self._norm

    def slope(self) -> Tensor:
        if not self._norm:  # the norm has a kink there
            return torch.zeros_like(self._gradient)
        return self._op @ (self._gradient * (self._rho / self._norm))


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
        self, objective: Objective, order: str, starts: Sequence[Tensor], number: int
    ) -> tuple[Summit, tuple[float, ...]]:
        """The highest of so many ascents, and what each reached.

        They begin at the starts given, then at random points of the sphere. The centre is not
        climbed from: at a minimum, where the one-step points end there, it has no slope.
        """
        best: Summit | None = None
        values: list[float] = []
        for index in range(number):
            start = starts[index] if index < len(starts) else None
            if start is None or not start.any():
                start = random_vector(self.op, self.generator)
                start *= self.rho / float(torch.linalg.vector_norm(start))
            report = partial(self._tell, order)
            summit = ascend(
                objective, start, self.rho, steps=self.steps, tol=self.tol, report=report
            )
            values.append(summit.value)
            best = summit if best is None or summit.value > best.value else best
            self.done += 1
        assert best is not None
        return best, tuple(values)

    def _tell(self, order: str, step: int, value: float) -> None:
        if self.progress is not None:
            note = f"{order}-order flatness {value:.4g}"
            share = (self.done + step / self.steps) / self.ascents
            self.progress(Progress(share, self.op.products, note))


@contextmanager
def _movable(op: HessianOperator) -> Iterator[Move]:
    """Lets the weights be moved, and puts them back."""
    # In inference mode, moves leave no trace in the weights' versions, which autograd looks at.
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
    """Says of an error that it is not the weights' own."""
    try:
        yield
    except UserError as error:
        raise UserError(f"within rho={rho:g} of the weights, {error} Or lower rho.") from None


def _towards(vector: Tensor, rho: float) -> Tensor:
    """The displacement by which the optimizers climb along a vector."""
    return vector * (rho / (float(torch.linalg.vector_norm(vector)) + XI))


def _check(rho: float, alpha: float, restarts: int, steps: int, tol: float) -> None:
    check_ball(rho, alpha)
    if restarts < 1 or steps < 1:
        raise UserError(f"restarts={restarts}, steps={steps}: at least one of each is needed")
    if not tol >= 0:
        raise UserError(f"tol={tol}: give a number that is not negative")
