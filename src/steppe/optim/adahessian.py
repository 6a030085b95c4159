"""AdaHessian (Yao et al., AAAI 2021, arXiv:2006.00719)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from steppe.search import Hyperparameter, LogUniform

from .graph import building_graph
from .registry import register_optimizer
from .yogi import check_moments


def rademacher(like: Sequence[Tensor]) -> list[Tensor]:
    """Independent random signs, from torch's global generator of each device."""
    probe = [torch.randint_like(tensor, 0, 2) for tensor in like]
    torch._foreach_mul_(probe, 2)
    torch._foreach_sub_(probe, 1)
    return probe


def hessian_diagonal(
    gradients: Sequence[Tensor], params: Sequence[Tensor], probe: Sequence[Tensor]
) -> list[Tensor]:
    r"""Hutchinson's estimate $z \odot (H z)$, whose mean over signs $z$ is the Hessian's diagonal.

    One differentiation serves all parameters and frees the graph. A gradient without a graph is
    constant, so its rows of $H$ are zero.
    """
    curved = [(g, z) for g, z in zip(gradients, probe, strict=True) if g.requires_grad]
    products = torch.autograd.grad(
        [g for g, _ in curved],
        params,
        grad_outputs=[z for _, z in curved],
        allow_unused=True,
        materialize_grads=True,
    )
    return list(torch._foreach_mul(products, list(probe)))


def spatial_average(diagonal: Tensor) -> Tensor:
    """Replace a convolution kernel's entries with their mean over its spatial dimensions.

    As in the authors' code, kernels are tensors with at least three dimensions, the first two of
    them channels. As in the paper, the mean is over signed values; the authors' code averages
    absolute values, which does not estimate the kernel's mean curvature.
    """
    if diagonal.dim() < 3:
        return diagonal
    extent = tuple(range(2, diagonal.dim()))
    return diagonal.mean(dim=extent, keepdim=True).expand_as(diagonal)


@register_optimizer(
    "adahessian",
    citation="Yao et al., ADAHESSIAN: An Adaptive Second Order Optimizer, AAAI 2021",
    passes=1,
    hessian_products=1,
    # 1 would be a pure Newton step; the NICO++ authors' code multiplies its learning rate by 100.
    lr=Hyperparameter(1e-2, LogUniform(-3, -0.5)),
    base=None,
    needs_graph=True,
)
class AdaHessian(Optimizer):
    r"""Adam with the curvature in place of the squared gradient.

    $$
    \begin{split}
    D_t &= z \odot (H_t z), \quad z \in \{-1, 1\}^n \text{ drawn anew,} \quad
        D_t^{(s)} \text{ its spatial average} \\
    m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
    v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, D_t^{(s)} \odot D_t^{(s)} \\
    \theta_t &= \theta_{t-1} - \eta \left(
        \frac{m_t / (1 - \beta_1^t)}{(v_t / (1 - \beta_2^t))^{k/2} + \varepsilon}
        + \lambda \theta_{t-1} \right)
    \end{split}
    $$

    The gradient must carry its graph: call ``loss.backward(create_graph=True)`` in the closure
    (`needs_graph` is true). The step clears gradients before the closure. At the end, it detaches
    the gradients and the loss, so that nothing keeps the graph alive. Train in one process, in
    float32, without `torch.compile`. Compiled models cannot be differentiated twice, a GradScaler
    would scale the curvature too, and under DistributedDataParallel the graph belongs to the local
    gradient.

    pytorch_optimizer's AdaHessian (4.1.0) differs: it has no spatial averaging, leaves the graph
    attached to ``.grad``, and raises autograd's error after a plain ``backward()``.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: the step size $\eta$. The step is Newton-like, so it is far larger than Adam's.
        betas: $\beta_1$ and $\beta_2$.
        eps: $\varepsilon$, 1e-4 in the authors' code and absent from the paper. It bounds the step
            of parameters without curvature.
        weight_decay: $\lambda$, decoupled from the curvature.
        hessian_power: the exponent $k$ in (0, 1].
        average_kernels: whether to average $D$ over the spatial dimensions of kernels.

    Examples:
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> optimizer = AdaHessian([w], lr=0.5)
        >>> def closure():
        ...     loss = (w**4).sum()
        ...     loss.backward(create_graph=True)
        ...     return loss
        >>> for _ in range(100):
        ...     loss = optimizer.step(closure)
        >>> bool(loss < 0.01)
        True
    """

    needs_graph = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.15,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        hessian_power: float = 1.0,
        average_kernels: bool = True,
    ) -> None:
        check_moments("AdaHessian", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        if not 0 < hessian_power <= 1:
            raise ValueError(f"AdaHessian: hessian_power must be in (0, 1], got {hessian_power}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"hessian_power": hessian_power, "average_kernels": average_kernels}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: evaluates the model, calls ``backward(create_graph=True)`` and returns the
                loss. Without one, the present gradients must come from such a call.

        Raises:
            RuntimeError: if no gradient carries a graph.
        """
        loss = None
        if closure is not None:
            self.zero_grad(set_to_none=True)
            with torch.enable_grad(), building_graph():
                loss = closure()
            if isinstance(loss, Tensor):
                loss = loss.detach()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        if params:
            diagonals = dict(zip(params, self._diagonal(params), strict=True))
            for group in self.param_groups:
                if used := [p for p in group["params"] if p in diagonals]:
                    self._update(group, used, diagonals)
        return loss

    def _diagonal(self, params: list[Tensor]) -> list[Tensor]:
        gradients: list[Tensor] = [p.grad for p in params if p.grad is not None]
        if any(g.is_sparse or g.is_complex() for g in gradients):
            raise RuntimeError("AdaHessian supports neither sparse gradients nor complex weights")
        if not any(g.requires_grad for g in gradients):
            raise RuntimeError(
                "AdaHessian differentiates the gradient, but no gradient carries a graph: "
                "call loss.backward(create_graph=True) instead of loss.backward()"
            )
        try:
            return hessian_diagonal(gradients, params, rademacher(params))
        finally:
            # Breaks the cycle between a gradient's graph and its parameter.
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient.detach()

    def _update(
        self, group: dict[str, Any], params: list[Tensor], diagonals: dict[Tensor, Tensor]
    ) -> None:
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_hessian_sq"] = torch.zeros_like(p)
            state["step"] += 1
        grads: list[Any] = [p.grad for p in params]
        exp_avgs = [self.state[p]["exp_avg"] for p in params]
        exp_hessian_sqs = [self.state[p]["exp_hessian_sq"] for p in params]
        steps = [self.state[p]["step"] for p in params]
        chosen = [diagonals[p] for p in params]
        if group["average_kernels"]:
            chosen = [spatial_average(diagonal) for diagonal in chosen]
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(exp_hessian_sqs, beta2)
        torch._foreach_addcmul_(exp_hessian_sqs, chosen, chosen, value=1 - beta2)
        denominators = torch._foreach_div(exp_hessian_sqs, [1 - beta2**t for t in steps])
        torch._foreach_pow_(denominators, group["hessian_power"] / 2)
        torch._foreach_add_(denominators, group["eps"])
        if group["weight_decay"] != 0:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        sizes = [-lr / (1 - beta1**t) for t in steps]
        torch._foreach_addcdiv_(params, exp_avgs, denominators, sizes)
