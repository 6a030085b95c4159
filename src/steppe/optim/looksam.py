"""LookSAM (Liu et al., CVPR 2022)."""

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


@register_optimizer(
    "looksam",
    citation="Liu et al., Towards Efficient and Scalable Sharpness-Aware Minimization, CVPR 2022",
    passes=1.2,
    radii=("rho",),
    order=0,
)
class LookSAM(FlatnessOptimizer):
    r"""SAM in the first of every `k` steps; the others reuse what it added to the gradient.

    A SAM step keeps $u = g_1 - \langle g_1, \hat{g}_0\rangle\,\hat{g}_0$, the part of its
    direction orthogonal to $g_0$. The other steps take one pass and move along
    $g_0 + \alpha\,\lVert g_0\rVert\,\hat{u}$. Norms and the projection are over all parameters
    together. ``k = 1`` is SAM.

    $1 + 1/k$ passes on average. One vector lives between steps. Under ``perturbation="local"`` it
    is averaged over processes. A weight without a gradient in a SAM step keeps its part of $u$.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbation; a number or a schedule.
        k: steps from one SAM step to the next.
        alpha: length of the reused part, relative to the gradient.

    Examples:
        >>> import torch
        >>> from steppe.optim import LookSAM
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> opt = LookSAM(torch.optim.SGD([w], lr=0.1), k=3)
        >>> passes = []
        >>> def closure():
        ...     passes.append(opt.steps)
        ...     loss = (w**4).sum()
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(4):
        ...     _ = opt.step(closure)
        >>> passes
        [0, 0, 1, 2, 3, 3]
    """

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(RHO)] = 0.05,
        k: Annotated[int, Option(Choice((2, 5, 10)), low=1)] = 5,
        alpha: Annotated[Hyper, Option()] = 0.7,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        if k not in range(1, 2**31):
            raise ValueError(f"k must be a whole number of steps, at least 1, got {k!r}")
        if (ratio := options.get("ratio", 1.0)) != 1.0 and k > 1:
            raise ValueError(
                f"LookSAM does not support ratio with k > 1, got ratio={ratio}: leave it out, or "
                "use SAM(ratio=...)"
            )
        self.k = int(k)
        super().__init__(base, {"rho": rho, "alpha": alpha}, model=model, **options)

    @property
    def _looks(self) -> bool:
        """Whether the next step is a SAM step; also true if a skipped one left nothing to reuse."""
        return self.steps % self.k == 0 or not self._memory

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        if all(c["rho"] == 0 for c in coefficients):
            return PLAIN
        reusing = self.k > 1 and any(c["alpha"] != 0 for c in coefficients)
        if not reusing:
            return sam.VISITS if self.steps % self.k == 0 else PLAIN
        return LOOK if self._looks else REUSE


def _after_g1(w: Walk, g1: Vector, A: Vector) -> Held:
    along = w.along(g1, A)
    for span in w.spans:  # u = g1 - along g0, while its tensors are in the cache
        u = A[span.tensors]
        torch._foreach_mul_(u, -along)
        torch._foreach_add_(u, g1[span.tensors])
    w.remember("orthogonal", A)
    return (g1,)


def _after_reused_g0(w: Walk, g0: Vector) -> Held:
    u = w.recall("orthogonal")
    length = w.norm(g0) / (w.norm(u) + w.xi)
    for span in w.spans:
        alpha = span.coefficients["alpha"]
        vectors.add_(g0[span.tensors], u[span.tensors], alpha * length)
    return (g0,)


LOOK = (Visit(fad.after_g0), Visit(_after_g1))
REUSE = (Visit(_after_reused_g0),)
