"""Penalizing the gradient norm (Zhao et al., ICML 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import RHO, Choice

from .engine import FlatnessOptimizer
from .fad import FAD
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models


@register_optimizer(
    "pgn",
    citation="Zhao et al., Penalizing Gradient Norm for Efficiently Improving Generalization, "
    "ICML 2022",
    passes=2,
    radii=("rho",),
    order=0,
)
class PGN(FlatnessOptimizer):
    r"""Penalizes the gradient norm: direction $(1 - \alpha)\,g_0 + \alpha\,g_1$.

    $g_1$ is the gradient at $\theta + \rho\,\hat{g}_0$. ``PGN(alpha=a)`` equals
    ``FAD(alpha=1, beta=a)``, and ``alpha = 1`` is SAM.

    Two passes; one when ``alpha = 0`` or ``rho = 0``.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbation (the paper's r); a number or a schedule.
        alpha: weight of the gradient at the perturbed point.

    Examples:
        >>> import torch
        >>> from steppe.optim import PGN
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = PGN(base, rho=0.1, alpha=0.8, model=model)
    """

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(RHO)] = 0.1,
        alpha: Annotated[Hyper, Option(Choice((0.2, 0.5, 0.8, 1.0)), high=1.0)] = 0.8,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        super().__init__(base, {"rho": rho, "alpha": alpha}, model=model, **options)

    def coefficients(self, hyper: Mapping[str, float]) -> Mapping[str, float]:
        return {"rho": hyper["rho"], "a": hyper["alpha"], "b": 0.0}

    def validate(self, hyper: Mapping[str, float]) -> None:
        super().validate(hyper)
        if hyper["alpha"] > 1.0:
            raise ValueError(f"alpha must be in [0, 1], got {hyper['alpha']}")

    visits = FAD.visits
