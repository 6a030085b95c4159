"""Variance-Suppressed Sharpness-Aware Optimization (Li and Giannakis, NeurIPS 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import RHO, Choice

from . import vectors
from .engine import FlatnessOptimizer
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models
from .vectors import Vector
from .walk import PLAIN, Held, Visit, Walk


@register_optimizer(
    "vasso",
    citation="Li and Giannakis, Enhancing Sharpness-Aware Optimization Through Variance "
    "Suppression, NeurIPS 2023",
    passes=2,
    radii=("rho",),
    order=0,
)
class VaSSO(FlatnessOptimizer):
    r"""SAM that climbs along a running mean of the gradient, which varies less between batches.

    With $m \leftarrow (1 - \tau)\,m + \tau\,g_0$ (in the first step, $m = g_0$), the base gets the
    gradient at $\theta + \rho\,\hat{m}$. ``tau = 1`` is SAM.

    Two passes; one when ``rho = 0``, which leaves $m$ as it is. One vector lives between steps.
    Under ``perturbation="local"`` it is averaged over processes.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbation; a number or a schedule.
        tau: weight of the new gradient in the mean (the paper's theta).

    Examples:
        >>> import torch
        >>> from steppe.optim import VaSSO
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = VaSSO(base, rho=0.05, tau=0.9, model=model)
    """

    scale_free = False

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(RHO)] = 0.05,
        tau: Annotated[Hyper, Option(Choice((0.2, 0.4, 0.9)), high=1.0)] = 0.9,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        super().__init__(base, {"rho": rho, "tau": tau}, model=model, **options)

    def validate(self, hyper: Mapping[str, float]) -> None:
        super().validate(hyper)
        if hyper["tau"] > 1.0:
            raise ValueError(f"tau must be in [0, 1], got {hyper['tau']}")

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        return PLAIN if all(c["rho"] == 0 for c in coefficients) else VISITS


def _after_g0(w: Walk, g0: Vector) -> Held:
    m: Vector = []
    lengths = []
    for span, mean in w.averaged("mean", g0, new="tau"):
        m += mean
        if span.coefficients["rho"] != 0:
            lengths.append(vectors.lengths(mean))
    w.climb(m, "rho", norm=w.joined(lengths), spend=False)
    w.remember("mean", m)
    return ()


VISITS = (Visit(_after_g0), *PLAIN)
