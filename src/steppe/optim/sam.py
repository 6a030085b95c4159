"""Sharpness-Aware Minimization (Foret et al., ICLR 2021) and ASAM (Kwon et al., ICML 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import RHO

from .engine import FlatnessOptimizer, Hyper
from .registry import register_optimizer
from .still import Models
from .vectors import Vector
from .walk import PLAIN, Held, Visit, Walk


@register_optimizer(
    "sam",
    citation="Foret et al., Sharpness-Aware Minimization, ICLR 2021",
    passes=2,
    radii=("rho",),
    order=0,
)
class SAM(FlatnessOptimizer):
    r"""Steps along the gradient at the (approximately) worst point within `rho`.

    The base optimizer gets $g_1 = \nabla L(\theta + \rho\, g_0 / (\lVert g_0 \rVert + \xi))$. With
    ``adaptive=True`` it is [`ASAM`][steppe.optim.ASAM], whose useful radii are about ten times
    larger.

    Two passes; one when ``rho = 0``.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbation; a number, or a callable from the step (counted from 1).
        adaptive: scale the perturbation by the weights (ASAM).
        eta: added to the size of each weight when adaptive; the ASAM paper uses 0.01, most
            implementations 0.

    Examples:
        >>> import torch
        >>> from steppe.optim import SAM
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> opt = SAM(torch.optim.SGD([w], lr=1.0), rho=0.5)
        >>> def closure():
        ...     loss = 0.5 * (w * w).sum()  # its gradient is w
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure).item()  # the loss at the unperturbed weights
        12.5
        >>> [round(x, 4) for x in w.tolist()]  # w - (w + 0.5 w / |w|)
        [-0.3, -0.4]
    """

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(RHO)] = 0.05,
        adaptive: bool = False,
        eta: Hyper = 0.0,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        if eta != 0 and not adaptive:
            raise ValueError(f"eta={eta} has no effect without adaptive=True (ASAM)")
        self.adaptive = adaptive
        hyper: dict[str, Hyper] = {"rho": rho, "eta": eta} if adaptive else {"rho": rho}
        super().__init__(base, hyper, model=model, **options)

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        if all(c["rho"] == 0 for c in coefficients):
            return PLAIN
        return ADAPTIVE_VISITS if self.adaptive else VISITS


def _after_g0(w: Walk, g0: Vector) -> Held:
    w.climb(g0, "rho")
    return ()


def _after_g0_adaptive(w: Walk, g0: Vector) -> Held:
    T = list(torch._foreach_abs(w.theta))
    for span in w.spans:
        torch._foreach_add_(T[span.tensors], span.coefficients["eta"])
    torch._foreach_mul_(g0, T)
    length = w.norm(g0)  # |T g0|
    torch._foreach_mul_(g0, T)  # T^2 g0
    del T
    w.climb(g0, "rho", norm=length)
    return ()


VISITS = (Visit(_after_g0), *PLAIN)  # the gradient at the second point is the direction
ADAPTIVE_VISITS = (Visit(_after_g0_adaptive), *PLAIN)
