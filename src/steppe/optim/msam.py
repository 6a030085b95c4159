"""Momentum-SAM (Becker et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import LogUniform

from .engine import FlatnessOptimizer
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models
from .walk import PLAIN, Visit, Walk


@register_optimizer(
    "msam",
    citation="Becker et al., Momentum-SAM: Sharpness Aware Minimization without Computational "
    "Overhead, 2024",
    passes=1,
)
class MSAM(FlatnessOptimizer):
    r"""SAM at the price of one pass: it looks ahead along the momentum instead of climbing.

    The base gets the gradient at $\theta - \rho\,\hat{v}$, where $v$ is its momentum
    (`momentum_buffer` of SGD, `exp_avg` of Adam). In the first step there is none. With
    $\rho_t = \eta\mu\lVert v\rVert$ this is Nesterov's momentum.

    One pass. The weights return before the base steps, so that evaluation, averaging and
    checkpoints see the weights themselves; the authors' code keeps them perturbed. Weight decay,
    too, acts on the weights themselves. The loss that `step` returns is the one at
    $\theta - \rho\,\hat{v}$.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbation; useful values are about ten times SAM's.

    Examples:
        >>> import torch
        >>> from steppe.optim import MSAM
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> opt = MSAM(torch.optim.SGD([w], lr=0.1, momentum=0.9), rho=0.5)
        >>> def closure():
        ...     loss = 0.5 * (w * w).sum()  # its gradient is w
        ...     loss.backward()
        ...     return loss
        >>> losses = [round(opt.step(closure).item(), 4) for _ in range(2)]
        >>> losses  # the second at w - 0.5 w / |w|, with |w| = 4.5
        [12.5, 8.0]
    """

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(LogUniform(-1.5, 0.7))] = 0.5,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        for group in getattr(base, "param_groups", ()):
            if not _decay(group):
                raise ValueError(
                    f"MSAM looks ahead along the base's momentum, and {type(base).__name__} has "
                    "none here: use torch.optim.SGD(..., momentum=0.9) or Adam."
                )
        super().__init__(base, {"rho": rho}, model=model, **options)

    def coefficients(self, hyper: Mapping[str, float]) -> Mapping[str, float]:
        return {"rho": -hyper["rho"]}

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        return PLAIN if all(c["rho"] == 0 for c in coefficients) else VISITS


def _decay(group: Mapping[str, Any]) -> float:
    """The decay rate of a group's momentum, under the names that optimizers have for it."""
    rates = [group.get("momentum"), group.get("beta"), *(group.get("betas") or ())[:1]]
    return max((float(rate) for rate in rates if rate is not None), default=0.0)


def _look_ahead(w: Walk) -> None:
    w.climb(w.momentum(), "rho", spend=False, scaled=False)


VISITS = (Visit(PLAIN[0].then, before=_look_ahead),)
