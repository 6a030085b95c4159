"""Flatness-Aware Minimization for Domain Generalization (Zhang et al., ICCV 2023), Algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import Choice

from . import sam
from .engine import FlatnessOptimizer
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models
from .vectors import Vector
from .walk import PLAIN, Held, Visit, Walk

TENTHS = Choice(tuple(i / 10 for i in range(1, 11)))


@register_optimizer(
    "fad",
    citation="Zhang et al., Flatness-Aware Minimization for Domain Generalization, ICCV 2023",
    passes=4,
    radii=("rho",),
)
class FAD(FlatnessOptimizer):
    r"""Minimizes the loss and its zeroth- and first-order flatness together.

    With $a = \beta\alpha$ and $b = \beta(1 - \alpha)$, one step moves the base optimizer along

    $$ g_0 + a\,(g_1 - g_0) + b\,(g_3 - g_2), $$

    where $g_1$ is the gradient at $\theta + \rho\,\hat{g}_0$, $g_2$ at
    $\theta_2 = \theta + \rho\,\hat{h}_0$ with $h_0 = g_1 - g_0$, $g_3$ at
    $\theta_2 + \rho\,\hat{g}_2$, and $\hat v = v / (\lVert v \rVert + \xi)$ over all parameters
    together. $g_1 - g_0$ approximates the gradient of zeroth-order flatness (what SAM adds),
    and $g_3 - g_2$ that of first-order flatness (what GAM adds).

    Four passes; two when ``alpha = 1`` (then no $g_2$, $g_3$), one when ``beta = 0`` or
    ``rho = 0`` (the base optimizer itself). ``alpha = beta = 1`` is SAM.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbations; a number, or a callable from the step (counted from 1).
        alpha: share of zeroth-order flatness in the regularizer; 1 - alpha is first-order.
        beta: weight of the regularizer.

    Examples:
        >>> import torch
        >>> from steppe.optim import FAD
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> opt = FAD(base, rho=0.05, alpha=0.5, beta=0.5, model=model)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> def closure():
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> before = opt.step(closure)
        >>> bool(closure() < before)
        True
    """

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(Choice((0.05, 0.1, 0.2, 0.5, 1.0, 2.0)))] = 0.05,
        alpha: Annotated[Hyper, Option(TENTHS, high=1.0)] = 0.5,
        beta: Annotated[Hyper, Option(Choice((0.01, 0.05, 0.1, 0.2, 0.5, 1.0)))] = 0.5,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        super().__init__(base, {"rho": rho, "alpha": alpha, "beta": beta}, model=model, **options)

    def validate(self, hyper: Mapping[str, float]) -> None:
        super().validate(hyper)
        if hyper["alpha"] > 1.0:
            raise ValueError(f"alpha must be in [0, 1], got {hyper['alpha']}")

    def coefficients(self, hyper: Mapping[str, float]) -> Mapping[str, float]:
        rho, alpha, beta = hyper["rho"], hyper["alpha"], hyper["beta"]
        return {"rho": rho, "a": beta * alpha, "b": beta * (1.0 - alpha)}

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        return cheapest(coefficients)


def cheapest(coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
    """The cheapest list of visits that gives g0 + a*h0 + b*h1 in every group."""
    weights = [(c["a"], c["b"]) for c in coefficients]
    if all(c["rho"] == 0 for c in coefficients) or all(w == (0, 0) for w in weights):
        return PLAIN
    if all(w == (1, 0) for w in weights):
        return sam.VISITS
    return ZEROTH_ORDER if all(b == 0 for _, b in weights) else ALGORITHM_1


# Line numbers are those of the paper's Algorithm 1. Two buffers live across passes: the walk's
# backup of theta and A, which starts as g0 and ends as the direction.


def after_g0(w: Walk, g0: Vector) -> Held:  # line 5
    A = w.hold(g0)
    w.climb(g0, "rho", spend=A is not g0)  # line 6: theta1 = theta + rho g0 / (|g0| + xi)
    return (A,)


def _after_g1(w: Walk, g1: Vector, A: Vector) -> Held:  # line 7
    torch._foreach_sub_(g1, A)
    h0 = g1  # line 8, in g1's memory
    w.add_(A, h0, "a")
    w.jump(h0, "rho")  # line 9: theta2 = theta + rho h0 / (|h0| + xi)
    return (A,)


def _after_g2(w: Walk, g2: Vector, A: Vector) -> Held:  # line 10
    w.add_(A, g2, "b", sign=-1.0)
    w.climb(g2, "rho")  # line 11: theta3 = theta2 + rho g2 / (|g2| + xi)
    return (A,)


def _after_g3(w: Walk, g3: Vector, A: Vector) -> Held:  # line 12
    w.add_(A, g3, "b")  # lines 13 and 14: A = g0 + beta (alpha h0 + (1 - alpha) h1)
    return (A,)


def _after_last_g1(w: Walk, g1: Vector, A: Vector) -> Held:
    return (w.lerp_(A, g1, "a"),)  # A = g0 + a (g1 - g0)


ALGORITHM_1 = (Visit(after_g0), Visit(_after_g1), Visit(_after_g2), Visit(_after_g3))
ZEROTH_ORDER = (Visit(after_g0), Visit(_after_last_g1))
