"""Sharpness-Aware Gradient Matching for Domain Generalization (Wang et al., CVPR 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import RHO, Choice

from .engine import FlatnessOptimizer
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models
from .vectors import Vector
from .walk import PLAIN, Held, Visit, Walk


@register_optimizer(
    "sagm",
    citation="Wang et al., Sharpness-Aware Gradient Matching for Domain Generalization, CVPR 2023",
    passes=2,
    radii=("rho",),
    order=0,
)
class SAGM(FlatnessOptimizer):
    r"""Descends the loss and the perturbed loss together, and aligns their gradients.

    With $g_1$ the gradient at $\theta + \rho\,\hat{g}_0 - \alpha\,g_0$, the direction is
    $\tfrac12 (g_0 + g_1)$. The half is that of the authors' code; the paper prints the sum.
    ``alpha = 0`` is ``FAD(alpha=1, beta=0.5)``.

    Two passes; one when ``rho = alpha = 0``.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbation; a number or a schedule.
        alpha: length of the step back along the gradient. It acts on the gradient of the loss
            itself, so under a GradScaler it is divided by the loss scale.

    Examples:
        >>> import torch
        >>> from steppe.optim import SAGM
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> opt = SAGM(torch.optim.SGD([w], lr=1.0), rho=0.5, alpha=0.1)
        >>> def closure():
        ...     loss = 0.5 * (w * w).sum()  # its gradient is w
        ...     loss.backward()
        ...     return loss
        >>> _ = opt.step(closure)
        >>> [round(x, 4) for x in w.tolist()]  # w - (w + w + 0.5 w / |w| - 0.1 w) / 2
        [0.0, 0.0]
    """

    scale_free = False

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(RHO)] = 0.05,
        alpha: Annotated[Hyper, Option(Choice((0.0005, 0.001, 0.005, 0.01)))] = 0.001,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        super().__init__(base, {"rho": rho, "alpha": alpha}, model=model, **options)

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        return PLAIN if all(c["rho"] == c["alpha"] == 0 for c in coefficients) else VISITS


def _after_g0(w: Walk, g0: Vector) -> Held:
    A = w.hold(g0)
    w.climb(g0, "rho", spend=A is not g0, less="alpha")
    return (A,)


def _after_g1(w: Walk, g1: Vector, A: Vector) -> Held:
    for span in w.spans:
        torch._foreach_lerp_(A[span.tensors], g1[span.tensors], 0.5)
    return (A,)


VISITS = (Visit(_after_g0), Visit(_after_g1))
