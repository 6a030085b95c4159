"""GAM as its authors released it: four gradients and a projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import RHO

from . import vectors
from .engine import FlatnessOptimizer
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models
from .vectors import Vector
from .walk import Held, Visit, Walk


@register_optimizer(
    "gam-release",
    citation="Zhang et al., Gradient Norm Aware Minimization, CVPR 2023 (the authors' public code)",
    passes=4,
    radii=("grad_rho", "grad_norm_rho"),
)
class GAMRelease(FlatnessOptimizer):
    r"""The update of GAM's public code, with its hyperparameter names.

    The four points are FAD's, with radius `grad_rho` along $g_0$ and $g_2$ and `grad_norm_rho`
    along $g_1 - g_0$. With $\beta_2 = 1 - \beta_0$ and $\beta_3 = 1 - \beta_1$,

    $$ G = \beta_1 g_1 + \beta_3 g_3,\qquad M = g_0 + \lvert\beta_2\rvert\, g_2,\qquad
       \text{direction} = G - \gamma\, M_{\perp G}, $$

    where $M_{\perp G}$ is the part of $M$ orthogonal to $G$. Four passes, three buffers.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        grad_rho: radius of the two gradient ascents.
        grad_norm_rho: radius of the ascent of the gradient norm.
        grad_beta_0: sets the weight of g2 in M.
        grad_beta_1: weight of g1 in G.
        grad_gamma: weight of the orthogonal part. The defaults are the authors' for CIFAR-100.
    """

    def __init__(
        self,
        base: Optimizer,
        grad_rho: Annotated[Hyper, Option(RHO)] = 0.02,
        grad_norm_rho: Annotated[Hyper, Option(RHO)] = 0.2,
        grad_beta_0: Annotated[Hyper, Option()] = 0.5,
        grad_beta_1: Annotated[Hyper, Option()] = 0.6,
        grad_gamma: Annotated[Hyper, Option()] = 0.03,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        hyper = {
            "grad_rho": grad_rho,
            "grad_norm_rho": grad_norm_rho,
            "grad_beta_0": grad_beta_0,
            "grad_beta_1": grad_beta_1,
            "grad_gamma": grad_gamma,
        }
        super().__init__(base, hyper, model=model, **options)

    def coefficients(self, hyper: Mapping[str, float]) -> Mapping[str, float]:
        beta_2, beta_3 = abs(1.0 - hyper["grad_beta_0"]), 1.0 - hyper["grad_beta_1"]
        return {**hyper, "beta_2": beta_2, "beta_3": beta_3}

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        return VISITS  # four even for zero radii: the update still differs from the base's


def _after_g0(w: Walk, g0: Vector) -> Held:
    M = w.hold(g0)
    w.climb(g0, "grad_rho", spend=M is not g0)
    return (M,)


def _after_g1(w: Walk, g1: Vector, M: Vector) -> Held:
    h0 = list(torch._foreach_sub(g1, M))
    G = w.scale_(w.hold(g1), "grad_beta_1")
    w.jump(h0, "grad_norm_rho")
    return (M, G)


def _after_g2(w: Walk, g2: Vector, M: Vector, G: Vector) -> Held:
    w.add_(M, g2, "beta_2")
    w.climb(g2, "grad_rho")
    return (M, G)


def _after_g3(w: Walk, g3: Vector, M: Vector, G: Vector) -> Held:
    w.add_(G, g3, "beta_3")
    length = w.norm(G) + w.xi
    along = w.dot(M, G, scratch=g3) / length / length
    torch._foreach_copy_(g3, G)
    vectors.add_(M, g3, -along, spend=True)  # leaves the part of M orthogonal to G
    return (w.add_(G, M, "grad_gamma", sign=-1.0),)


VISITS = (Visit(_after_g0), Visit(_after_g1), Visit(_after_g2), Visit(_after_g3))
