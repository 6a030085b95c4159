"""Surrogate Gap Guided Sharpness-Aware Minimization (Zhuang et al., ICLR 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import RHO, Choice

from . import fad, sam, vectors
from .engine import FlatnessOptimizer
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models
from .vectors import Vector
from .walk import PLAIN, Held, Visit, Walk

ALPHA = Choice((0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6))


@register_optimizer(
    "gsam",
    citation="Zhuang et al., Surrogate Gap Guided Sharpness-Aware Minimization, ICLR 2022",
    passes=2,
    radii=("rho",),
    order=0,
)
class GSAM(FlatnessOptimizer):
    r"""SAM that also shrinks the gap between the perturbed loss and the loss.

    With $g_1$ the gradient at $\theta + \rho\,\hat{g}_0$, the direction is

    $$ g_1 - \alpha\,\Bigl(g_0 - \frac{\langle g_0, g_1\rangle}{\lVert g_1\rVert^2}\,g_1\Bigr), $$

    SAM's gradient minus the part of $g_0$ that is orthogonal to it. ``alpha = 0`` is SAM.

    Two passes; one when ``rho = 0``. The paper shrinks `rho` with the learning rate: pass
    ``rho=FollowLR(high, low, lr_high)``.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbation; a number or a schedule.
        alpha: weight of the orthogonal part: 0.6 for the paper's ViT, 0.001 in code for domain
            generalization.

    Examples:
        >>> import torch
        >>> from steppe.optim import GSAM, FollowLR
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = GSAM(base, rho=FollowLR(0.6, 0.1, lr_high=0.1), alpha=0.6, model=model)
    """

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(RHO)] = 0.05,
        alpha: Annotated[Hyper, Option(ALPHA)] = 0.001,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        super().__init__(base, {"rho": rho, "alpha": alpha}, model=model, **options)

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        if all(c["rho"] == 0 for c in coefficients):
            return PLAIN
        return sam.VISITS if all(c["alpha"] == 0 for c in coefficients) else VISITS


def _after_g1(w: Walk, g1: Vector, A: Vector) -> Held:
    along = w.along(A, g1)
    for span in w.spans:  # (1 + alpha along) g1 - alpha g0, while its tensors are in the cache
        alpha = span.coefficients["alpha"]
        new, old = g1[span.tensors], A[span.tensors]
        torch._foreach_mul_(new, 1.0 + alpha * along)
        vectors.add_(new, old, -alpha)
    return (g1,)


VISITS = (Visit(fad.after_g0), Visit(_after_g1))
