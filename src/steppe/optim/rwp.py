"""Random weight perturbation (Li et al., TMLR 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import Choice

from .engine import FlatnessOptimizer
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models
from .vectors import Vector
from .walk import PLAIN, Held, Visit, Walk


@register_optimizer(
    "rwp",
    citation="Li et al., Revisiting Random Weight Perturbation for Efficiently Improving "
    "Generalization, TMLR 2024",
    passes=2,
    order=0,
)
class RWP(FlatnessOptimizer):
    r"""Mixes the gradient with one at randomly perturbed weights: a control for SAM's direction.

    The direction is $(1 - \alpha)\,g_0 + \alpha\,\nabla L(\theta + n)$, where $n$ is Gaussian
    noise with standard deviation $\gamma\lVert w\rVert$ for each weight of a filter $w$ (a row of
    a weight matrix, or a whole tensor if it has one dimension).

    Two passes; one when ``alpha`` is 1 or 0, or ``gamma = 0``. Noise is drawn from the optimizer's
    own generator, equal on all processes.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        gamma: size of the noise, relative to each filter's norm.
        alpha: weight of the gradient at the perturbed weights.
        seed: seed of the noise.

    Examples:
        >>> import torch
        >>> from steppe.optim import RWP
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = RWP(base, gamma=0.01, alpha=0.5, model=model)
    """

    draws = True

    def __init__(
        self,
        base: Optimizer,
        gamma: Annotated[Hyper, Option(Choice((0.001, 0.005, 0.01)))] = 0.01,
        alpha: Annotated[Hyper, Option(high=1.0)] = 0.5,
        seed: int = 0,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        self.seed = seed
        super().__init__(base, {"gamma": gamma, "alpha": alpha}, model=model, **options)

    def validate(self, hyper: Mapping[str, float]) -> None:
        super().validate(hyper)
        if hyper["alpha"] > 1.0:
            raise ValueError(f"alpha must be in [0, 1], got {hyper['alpha']}")

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        if any(all(c[name] == 0 for c in coefficients) for name in ("gamma", "alpha")):
            return PLAIN
        return NOISY if all(c["alpha"] == 1 for c in coefficients) else MIXED


def _disturb(w: Walk) -> None:
    noise = w.normal()
    torch._foreach_mul_(noise, _filter_norms(w))
    w.shift(noise, "gamma")


def _filter_norms(w: Walk) -> Vector:
    """The norm of every filter, in a shape that broadcasts over its weights."""

    def norms(t: Tensor) -> Tensor:
        if t.ndim > 1:
            rows: Tensor = torch.linalg.vector_norm(t, dim=tuple(range(1, t.ndim)), keepdim=True)
            return rows
        return w.total(torch.linalg.vector_norm(t).square()).sqrt()

    return [norms(t) for t in w.theta]


def _after_g0(w: Walk, g0: Vector) -> Held:
    A = w.hold(g0)
    _disturb(w)
    return (A,)


def _after_g1(w: Walk, g1: Vector, A: Vector) -> Held:
    return (w.lerp_(A, g1, "alpha"),)


MIXED = (Visit(_after_g0), Visit(_after_g1))
NOISY = (Visit(PLAIN[0].then, before=_disturb),)
