"""Weighted Sharpness-Aware Minimization (Yue et al., KDD 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import RHO, Choice

from . import fad, vectors
from .engine import FlatnessOptimizer
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models
from .vectors import Vector
from .walk import PLAIN, Held, Visit, Walk


@register_optimizer(
    "wsam",
    citation="Yue et al., Sharpness-Aware Minimization Revisited: Weighted Sharpness as a "
    "Regularization Term, KDD 2023",
    passes=2,
    radii=("rho",),
    order=0,
)
class WSAM(FlatnessOptimizer):
    r"""Adds weighted sharpness to the loss, by default outside the base's step.

    With $a = \gamma / (1 - \gamma)$ and $g_1$ the gradient at $\theta + \rho\,\hat{g}_0$, the
    base steps along $g_0$, and then the weights move by $-\eta\,a\,(g_1 - g_0)$ with the learning
    rate $\eta$. With ``decouple=False``, the base steps along $g_0 + a\,(g_1 - g_0)$, which equals
    ``FAD(alpha=1, beta=a)``. Both agree for SGD without momentum; ``gamma = 0.5`` is then SAM.

    Two passes; one when ``gamma = 0`` or ``rho = 0``.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbation; a number or a schedule.
        gamma: share of sharpness in the objective, below 1.
        decouple: keep sharpness out of the base's moments. `max_norm` then clips $g_0$ alone.

    Examples:
        >>> import torch
        >>> from steppe.optim import WSAM
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> opt = WSAM(base, rho=0.05, gamma=0.9, model=model)
    """

    reads_lr = True
    scale_free = False

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(RHO)] = 0.05,
        gamma: Annotated[Hyper, Option(Choice((0.5, 0.8, 0.9, 0.95)), high=0.999)] = 0.9,
        decouple: bool = True,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        self.decouple = decouple
        super().__init__(base, {"rho": rho, "gamma": gamma}, model=model, **options)

    def validate(self, hyper: Mapping[str, float]) -> None:
        super().validate(hyper)
        if hyper["gamma"] >= 1.0:
            raise ValueError(f"gamma must be in [0, 1), got {hyper['gamma']}")

    def coefficients(self, hyper: Mapping[str, float]) -> Mapping[str, float]:
        a = hyper["gamma"] / (1.0 - hyper["gamma"])
        own = {"rho": hyper["rho"], "a": a, "b": 0.0}
        return {**own, "push": hyper["lr"] * a} if self.decouple else own

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        coupled = fad.cheapest(coefficients)
        return DECOUPLED if self.decouple and coupled is not PLAIN else coupled

    def after(self, walk: Walk, *kept: Vector) -> None:
        (h0,) = kept
        for span in walk.spans:
            push = -span.coefficients["push"] / walk.scale
            vectors.add_(walk.theta[span.tensors], h0[span.tensors], push, spend=True)


def _after_g1(w: Walk, g1: Vector, A: Vector) -> Held:
    torch._foreach_sub_(g1, A)
    return (A, w.hold(g1))


DECOUPLED = (Visit(fad.after_g0), Visit(_after_g1))
