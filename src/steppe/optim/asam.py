"""Adaptive Sharpness-Aware Minimization (Kwon et al., ICML 2021)."""

from __future__ import annotations

from typing import Annotated, Any

from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import Choice

from .registry import register_optimizer
from .sam import SAM
from .schedules import Hyper
from .still import Models


@register_optimizer(
    "asam",
    citation="Kwon et al., ASAM: Adaptive Sharpness-Aware Minimization, ICML 2021",
    passes=2,
    order=0,
)  # no `radii`: its rho is relative to the weights, not a length
class ASAM(SAM):
    r"""SAM within a neighborhood that is scaled by the size of each weight.

    The same as `SAM(base, rho, adaptive=True, eta=eta)`, with its paper's defaults for CIFAR-10.
    With $T = \lvert\theta\rvert + \eta$, elementwise, the base optimizer gets the gradient at
    $\theta + \rho\, T^2 g_0 / (\lVert T g_0 \rVert + \xi)$. Two passes; one when ``rho = 0``.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbation, relative to the weights: about ten times SAM's.
        eta: added to the size of each weight, so that zero weights move too.

    Examples:
        >>> import torch
        >>> from steppe.optim import ASAM
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = ASAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=1.0, model=model)
        >>> opt.adaptive, opt.param_groups[0]["rho"], opt.param_groups[0]["eta"]
        (True, 1.0, 0.01)
    """

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(Choice((0.1, 0.2, 0.5, 1.0, 2.0)))] = 0.5,
        eta: Annotated[Hyper, Option()] = 0.01,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        super().__init__(base, rho, True, eta, model=model, **options)
