"""GAM as the FAD paper compares it: first-order flatness without Hessians."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import GAM_ALPHA, RHO

from .engine import FlatnessOptimizer
from .fad import FAD
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models


@register_optimizer(
    "gam",
    citation="Zhang et al., Gradient Norm Aware Minimization, CVPR 2023 "
    "(without Hessians, as in the FAD paper)",
    passes=4,
    radii=("rho",),
)
class GAM(FlatnessOptimizer):
    r"""Minimizes the loss and its first-order flatness: direction $g_0 + \alpha\,(g_3 - g_2)$.

    The gradients are those of `FAD`: ``GAM(alpha=b)`` equals ``FAD(alpha=0, beta=b)``. There are
    two other forms of GAM (Zhang et al., CVPR 2023): `GAMExact` uses Hessian-vector products, and
    `GAMRelease` is the update of the authors' code.

    Four passes; one when ``alpha = 0`` or ``rho = 0``.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbations; a number, or a callable from the step (counted from 1).
        alpha: weight of first-order flatness.
    """

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(RHO)] = 0.05,
        alpha: Annotated[Hyper, Option(GAM_ALPHA)] = 0.1,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        super().__init__(base, {"rho": rho, "alpha": alpha}, model=model, **options)

    def coefficients(self, hyper: Mapping[str, float]) -> Mapping[str, float]:
        return {"rho": hyper["rho"], "a": 0.0, "b": hyper["alpha"]}

    visits = FAD.visits
