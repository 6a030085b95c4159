"""GAM with Hessian-vector products (Zhang et al., CVPR 2023, before its acceleration)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from steppe.options import Option
from steppe.search import GAM_ALPHA, RHO

from .engine import FlatnessOptimizer
from .registry import register_optimizer
from .schedules import Hyper
from .still import Models
from .vectors import Vector
from .walk import PLAIN, Held, Visit, Walk


@register_optimizer(
    "gam-exact",
    citation="Zhang et al., Gradient Norm Aware Minimization, CVPR 2023 "
    "(with Hessian-vector products)",
    passes=2,
    hessian_products=2,
    radii=("rho",),
    needs_graph=True,
)
class GAMExact(FlatnessOptimizer):
    r"""GAM with exact derivatives: direction $g_0 + \alpha\, h_1$ without finite differences.

    $$ f = \nabla\lVert g_0\rVert = \frac{H(\theta)\,g_0}{\lVert g_0\rVert},\qquad
       \theta_2 = \theta + \rho\,\frac{f}{\lVert f\rVert},\qquad
       h_1 = \rho\,\nabla\lVert\nabla L(\theta_2)\rVert
           = \rho\,\frac{H(\theta_2)\,\nabla L(\theta_2)}{\lVert\nabla L(\theta_2)\rVert} $$

    Two passes, each followed by a Hessian-vector product through its graph, so the closure must
    call ``loss.backward(create_graph=True)`` (`needs_graph` is true). This rules out DDP and
    `torch.compile` of the loss.

    `base`, `model` and the other options: [`FlatnessOptimizer`][steppe.optim.FlatnessOptimizer].

    Args:
        rho: radius of the perturbation; a number, or a callable from the step (counted from 1).
        alpha: weight of first-order flatness.
    """

    needs_graph: ClassVar[bool] = True

    def __init__(
        self,
        base: Optimizer,
        rho: Annotated[Hyper, Option(RHO)] = 0.05,
        alpha: Annotated[Hyper, Option(GAM_ALPHA)] = 0.1,
        *,
        model: Models = None,
        **options: Any,
    ) -> None:
        given = (model,) if isinstance(model, torch.nn.Module) else tuple(model or ())
        if any(isinstance(one, DistributedDataParallel) for one in given):
            raise TypeError(
                "GAMExact differentiates gradients, and DistributedDataParallel's all-reduce "
                "cannot be differentiated. Use GAM, which needs only gradients."
            )
        if options.get("compile"):
            raise ValueError("GAMExact does not support compile=True: it uses autograd's graph")
        super().__init__(base, {"rho": rho, "alpha": alpha}, model=model, **options)

    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        if all(c["rho"] == 0 for c in coefficients) or all(c["alpha"] == 0 for c in coefficients):
            return PLAIN
        return VISITS


def _gradient_of_norm(w: Walk, g: Vector) -> Vector:
    """H g / (|g| + xi), from a gradient that carries its graph."""
    if not any(x.requires_grad for x in g):
        raise RuntimeError(
            "GAMExact needs the graph of the gradient: call loss.backward(create_graph=True) in "
            "the closure (required by every optimizer whose needs_graph is True)."
        )
    curved = [x for x in g if x.requires_grad]  # the others are constant
    values = [x.detach() for x in curved]
    products: tuple[Tensor, ...] = torch.autograd.grad(
        curved, w.params, grad_outputs=values, materialize_grads=True
    )
    length = w.norm([x.detach() for x in g])
    torch._foreach_div_(products, length + w.xi)
    return list(products)


def _after_g0(w: Walk, g0: Vector) -> Held:
    f = _gradient_of_norm(w, g0)
    held = w.hold([x.detach() for x in g0])
    w.climb(f, "rho")
    return (held,)


def _after_g2(w: Walk, g2: Vector, g0: Vector) -> Held:
    h1 = w.scale_(_gradient_of_norm(w, g2), "rho")
    return (w.add_(g0, h1, "alpha"),)


VISITS = (Visit(_after_g0), Visit(_after_g2))
