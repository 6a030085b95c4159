"""Friendly Sharpness-Aware Minimization (Li et al., CVPR 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
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
    "f-sam",
    citation="Li et al., Friendly Sharpness-Aware Minimization, CVPR 2024",
    passes=2,
    radii=("rho",),
    order=0,
)
class FriendlySAM(FlatnessOptimizer):
    r"""SAM that climbs along the batch's own part of the gradient, without the running mean.

    With $m \leftarrow \lambda m + (1 - \lambda)\,g_0$, the base gets the gradient at
    $\theta + \rho\,\hat{e}$, where $e = g_0 - \sigma m$. In the first step $m = g_0$ and the
    ascent is along $g_0$. ``sigma = 0`` is SAM.

    Two passes; one when ``rho = 0``, which leaves $m$ as it is. One vector lives between steps.
    Under ``perturbation="local"`` it is averaged over processes.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbation; a number or a schedule.
        sigma: how much of the mean to subtract.
        lam: decay of the mean.

    Examples:
        >>> import torch
        >>> from steppe.optim import FriendlySAM
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = FriendlySAM(base, rho=0.05, sigma=1.0, lam=0.9, model=model)
    """

    scale_free = False

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(RHO)] = 0.05,
        sigma: Annotated[Hyper, Option()] = 1.0,
        lam: Annotated[Hyper, Option(Choice((0.6, 0.9, 0.95)), high=1.0)] = 0.9,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        super().__init__(base, {"rho": rho, "sigma": sigma, "lam": lam}, model=model, **options)

    def validate(self, hyper: Mapping[str, float]) -> None:
        super().validate(hyper)
        if hyper["lam"] > 1.0:
            raise ValueError(f"lam must be in [0, 1], got {hyper['lam']}")

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        return PLAIN if all(c["rho"] == 0 for c in coefficients) else VISITS


def _after_g0(w: Walk, g0: Vector) -> Held:
    known = w.known("mean")  # a parameter's first ascent is along its gradient
    m: Vector = []
    lengths = []
    for span, mean in w.averaged("mean", g0, old="lam"):
        m += mean
        e, seen = g0[span.tensors], known[span.tensors]
        if any(seen) and (sigma := span.coefficients["sigma"]) != 0:
            vectors.add_(list(compress(e, seen)), list(compress(mean, seen)), -sigma)
        if span.coefficients["rho"] != 0:
            lengths.append(vectors.lengths(e))
    w.climb(g0, "rho", norm=w.joined(lengths))
    w.remember("mean", m)
    return ()


VISITS = (Visit(_after_g0), *PLAIN)
