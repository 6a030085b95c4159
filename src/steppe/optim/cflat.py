"""C-Flat (Bian et al., NeurIPS 2024), without Hessians, as its authors released it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import Choice

from .engine import FlatnessOptimizer
from .fad import FAD
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models


@register_optimizer(
    "c-flat",
    citation="Bian et al., Make Continual Learning Stronger via C-Flat, NeurIPS 2024",
    passes=4,
    radii=("rho",),
)
class CFlat(FlatnessOptimizer):
    r"""SAM plus first-order flatness: direction $g_1 + \lambda\,(g_3 - g_2)$.

    The gradients are those of `FAD`: ``CFlat(lam=l)`` equals ``FAD(alpha=1/(1+l), beta=1+l)``.
    ``lam = 0`` is SAM.

    Four passes (the release takes five); two when ``lam = 0``, one when ``rho = 0``.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbations; a number or a schedule.
        lam: weight of first-order flatness.

    Examples:
        >>> import torch
        >>> from steppe.optim import CFlat
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = CFlat(base, rho=0.2, lam=0.2, model=model)
    """

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(Choice((0.05, 0.1, 0.2, 0.5, 1.0, 2.0)))] = 0.2,
        lam: Annotated[Hyper, Option(Choice((0.05, 0.1, 0.2, 0.5)))] = 0.2,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        super().__init__(base, {"rho": rho, "lam": lam}, model=model, **options)

    def coefficients(self, hyper: Mapping[str, float]) -> Mapping[str, float]:
        return {"rho": hyper["rho"], "a": 1.0, "b": hyper["lam"]}

    visits = FAD.visits
