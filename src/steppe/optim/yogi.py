"""Yogi (Zaheer et al., "Adaptive Methods for Nonconvex Optimization", NeurIPS 2018)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from steppe.search import Hyperparameter, LogUniform

from .registry import register_optimizer


def check_moments(method: str, betas: tuple[float, float], **numbers: float) -> None:
    """Raise ValueError for options that are invalid for any optimizer with moments."""
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{method}: {name} must not be negative, got {value}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{method}: betas must be in [0, 1), got {betas}")


@register_optimizer(
    "yogi",
    citation="Zaheer et al., Adaptive Methods for Nonconvex Optimization, NeurIPS 2018",
    passes=1,
    # Between Adam and SGD: an eps of 1e-3 outweighs only small gradients. At 1e-3 and above, it
    # learned PACS in none of twelve runs (docs/results/pacs-method.md).
    lr=Hyperparameter(1e-4, LogUniform(-5, -3)),
    base=None,
)
class Yogi(Optimizer):
    r"""Adam whose second moment moves by a bounded amount: Algorithm 2 of the paper.

    $$
    \begin{split}
    m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
    v_t &= v_{t-1} - (1 - \beta_2)\, \operatorname{sign}(v_{t-1} - g_t^2)\, g_t^2 \\
    \theta_t &= \theta_{t-1} - \eta\, m_t / (\sqrt{v_t} + \varepsilon)
    \end{split}
    $$

    with $m_0 = 0$ and $v_0$ = `initial_accumulator`. The paper has no bias correction, unlike
    pytorch_optimizer's Yogi, which always divides $v_t$ by $1 - \beta_2^t$ (and starts $m_0$ at
    $v_0$). The paper has no weight decay either: here it adds the gradient of
    $\tfrac{\lambda}{2} \lVert \theta \rVert^2$ to $g_t$.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: the step size $\eta$.
        betas: $\beta_1$ and $\beta_2$.
        eps: $\varepsilon$; the paper recommends 1e-3, far more than Adam's.
        initial_accumulator: $v_0$. The paper's algorithm starts at 0; 1e-6 is the default of the
            authors' TensorFlow code.
        weight_decay: $\lambda$.

    Examples:
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> optimizer = Yogi([w], lr=0.1)
        >>> for _ in range(200):
        ...     optimizer.zero_grad()
        ...     loss = (w**2).sum()
        ...     loss.backward()
        ...     _ = optimizer.step()
        >>> bool(loss < 0.01)
        True
    """

    needs_graph = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-3,
        initial_accumulator: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        numbers["initial_accumulator"] = initial_accumulator
        check_moments("Yogi", betas, **numbers)
        super().__init__(params, {**numbers, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: evaluates the model, calls ``backward`` and returns the loss. Optional.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.grad is not None]:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Any]) -> None:
        for p in params:
            if p.grad.is_sparse or p.is_complex():
                raise RuntimeError("Yogi supports neither sparse gradients nor complex weights")
            state = self.state[p]
            if not state:
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.full_like(p, group["initial_accumulator"])
        grads = [p.grad for p in params]
        exp_avgs = [self.state[p]["exp_avg"] for p in params]
        exp_avg_sqs = [self.state[p]["exp_avg_sq"] for p in params]
        beta1, beta2 = group["betas"]
        if group["weight_decay"] != 0:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        squares = torch._foreach_mul(grads, grads)
        signs = torch._foreach_sub(exp_avg_sqs, squares)
        torch._foreach_sign_(signs)
        torch._foreach_addcmul_(exp_avg_sqs, signs, squares, value=-(1 - beta2))
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, exp_avgs, denominators, value=-float(group["lr"]))
