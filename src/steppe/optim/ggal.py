"""GGA-L: Gradient-Guided Annealing with Langevin noise (Ballas and Diou, CVPR 2025)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any

import torch
from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import Choice

from . import vectors
from .engine import FlatnessOptimizer
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models
from .vectors import Vector
from .walk import PLAIN, Held, Visit, Walk


@register_optimizer(
    "gga-l",
    citation="Ballas and Diou, Gradient-Guided Annealing for Domain Generalization, CVPR 2025",
    passes=2,
    order=0,
)
class GGAL(FlatnessOptimizer):
    r"""Adds noise that grows as the gradients of the source domains disagree.

    The direction is $g_0 + \gamma\,(1 - \bar c)\,\nu$ with Gaussian noise $\nu$, where $\bar c$ is
    the mean cosine between the gradients of two domains. A domain whose gradient is zero has no
    direction and does not count. The authors' code draws Gaussian noise; the paper says uniform.
    ``gamma = 0`` is the base.

    One pass over the batch, and one over each domain's part of it: the closure is called with
    ``"domain:0"``, ``"domain:1"``, ... and differentiates the loss of that domain alone. About two
    passes in all. Noise is drawn from the optimizer's own generator, equal on all processes.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        gamma: size of the noise. It adds to the gradient of the loss itself, so under a GradScaler
            it is multiplied by the loss scale.
        domains: the number of source domains; `steppe train` knows it.
        seed: seed of the noise.

    Examples:
        >>> import torch
        >>> from steppe.optim import GGAL
        >>> model = torch.nn.Linear(3, 1)
        >>> x = [torch.randn(8, 3), torch.randn(8, 3) + 1]  # two domains
        >>> opt = GGAL(torch.optim.SGD(model.parameters(), lr=0.1), domains=2, model=model)
        >>> def closure(name="main"):
        ...     losses = [model(part).square().mean() for part in x]
        ...     main = torch.stack(losses).mean()
        ...     (main if name == "main" else losses[int(name.removeprefix("domain:"))]).backward()
        ...     return main
        >>> first = opt.step(closure)
        >>> bool(opt.step(closure) < first)
        True
    """

    draws = True
    scale_free = False

    def __init__(
        self,
        base: Optimizer,
        gamma: Annotated[Hyper, Option(Choice((0.0001, 0.001, 0.01)))] = 0.001,
        domains: int | None = None,
        seed: int = 0,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        self.domains, self.seed = domains, seed
        super().__init__(base, {"gamma": gamma}, model=model, **options)

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        if all(c["gamma"] == 0 for c in coefficients):
            return PLAIN
        if not isinstance(self.domains, int) or self.domains < 2:
            raise ValueError(
                f"domains must be a whole number >= 2, got {self.domains}: pass the number of "
                "source domains, whose gradients GGAL compares"
            )
        return _compared(self.domains)


def _after_g0(w: Walk, g0: Vector) -> Held:
    return (w.hold(g0), [torch.zeros_like(t) for t in w.theta])


def _after_domain(w: Walk, g: Vector, A: Vector, units: Vector) -> Held:
    length = w.norm(g)
    w.numbers.append(length)
    vectors.add_(units, g, 1.0 / (length + w.xi), spend=True)
    return (A, units)


@cache
def _compared(domains: int) -> tuple[Visit, ...]:
    def after_last(w: Walk, g: Vector, A: Vector, units: Vector) -> Held:
        _after_domain(w, g, A, units)
        # |sum of unit vectors|^2 = n + the sum of the cosines of all n (n - 1) ordered pairs.
        n: Any = sum(length > 0 for length in w.numbers)
        disagreement = (n**2 - w.norm(units) ** 2) / (n * (n - 1) + (n < 2))  # 0 without a pair
        noise = w.normal()
        for span in w.spans:
            size = span.coefficients["gamma"] * disagreement * w.scale
            vectors.add_(A[span.tensors], noise[span.tensors], size, spend=True)
        return (A,)

    middle = (Visit(_after_domain, loss=f"domain:{i}") for i in range(domains - 1))
    return (Visit(_after_g0), *middle, Visit(after_last, loss=f"domain:{domains - 1}"))
