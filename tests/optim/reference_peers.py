"""The update equations of Yogi, AdaBelief and AdaHessian, written out one tensor at a time.

Slow and obvious on purpose: float64, explicit Hessians, no in-place operation. Each function takes
`loss(t, theta)`, the weights, one dictionary of hyperparameters for each weight, and returns the
weights after `steps` steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[int, list[Tensor]], Tensor]
Hyper = Sequence[dict[str, Any]]


def gradient(loss: Loss, t: int, theta: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in theta]
    return list(torch.autograd.grad(loss(t, leaves), leaves))


def hessian(loss: Loss, t: int, theta: list[Tensor]) -> Tensor:
    """The whole Hessian, over all weights laid end to end."""
    sizes = [x.numel() for x in theta]

    def flat_loss(flat: Tensor) -> Tensor:
        pieces = flat.split(sizes)
        return loss(t, [piece.reshape(x.shape) for piece, x in zip(pieces, theta, strict=True)])

    flat = torch.cat([x.detach().reshape(-1) for x in theta])
    return torch.autograd.functional.hessian(flat_loss, flat)


def yogi(loss: Loss, theta: list[Tensor], hyper: Hyper, steps: int) -> list[Tensor]:
    """Zaheer et al. 2018, Algorithm 2; weight decay is an L2 term of the objective."""
    m = [torch.zeros_like(x) for x in theta]
    v = [torch.full_like(x, h["v0"]) for x, h in zip(theta, hyper, strict=True)]
    for t in range(1, steps + 1):
        g = gradient(loss, t, theta)
        for i, h in enumerate(hyper):
            beta1, beta2 = h["betas"]
            gi = g[i] + h["weight_decay"] * theta[i]
            m[i] = beta1 * m[i] + (1 - beta1) * gi
            v[i] = v[i] - (1 - beta2) * torch.sign(v[i] - gi**2) * gi**2
            theta[i] = theta[i] - h["lr"] * m[i] / (torch.sqrt(v[i]) + h["eps"])
    return theta


def adabelief(loss: Loss, theta: list[Tensor], hyper: Hyper, steps: int) -> list[Tensor]:
    """Zhuang et al. 2020, Algorithm 2 with bias correction; weight decay is decoupled."""
    m = [torch.zeros_like(x) for x in theta]
    s = [torch.zeros_like(x) for x in theta]
    for t in range(1, steps + 1):
        g = gradient(loss, t, theta)
        for i, h in enumerate(hyper):
            beta1, beta2 = h["betas"]
            m[i] = beta1 * m[i] + (1 - beta1) * g[i]
            s[i] = beta2 * s[i] + (1 - beta2) * (g[i] - m[i]) ** 2 + h["eps"]
            m_hat = m[i] / (1 - beta1**t)
            s_hat = s[i] / (1 - beta2**t)
            update = m_hat / (torch.sqrt(s_hat) + h["eps"]) + h["weight_decay"] * theta[i]
            theta[i] = theta[i] - h["lr"] * update
    return theta


def averaged(d: Tensor) -> Tensor:
    """Yao et al. 2021, spatial averaging: every entry of a kernel gets the kernel's mean."""
    if d.dim() < 3:
        return d
    result = torch.empty_like(d)
    for i in range(d.shape[0]):
        for j in range(d.shape[1]):
            kernel = d[i, j].reshape(-1).tolist()
            result[i, j] = sum(kernel) / len(kernel)
    return result


def adahessian(
    loss: Loss, theta: list[Tensor], hyper: Hyper, steps: int, probes: list[list[Tensor]]
) -> list[Tensor]:
    """Yao et al. 2021, the algorithm with the probes given; weight decay is decoupled."""
    sizes = [x.numel() for x in theta]
    m = [torch.zeros_like(x) for x in theta]
    v = [torch.zeros_like(x) for x in theta]
    for t in range(1, steps + 1):
        g = gradient(loss, t, theta)
        z = torch.cat([piece.reshape(-1) for piece in probes[t - 1]])
        diagonal = (z * (hessian(loss, t, theta) @ z)).split(sizes)
        for i, h in enumerate(hyper):
            beta1, beta2 = h["betas"]
            d = diagonal[i].reshape(theta[i].shape)
            d = averaged(d) if h["average_kernels"] else d
            m[i] = beta1 * m[i] + (1 - beta1) * g[i]
            v[i] = beta2 * v[i] + (1 - beta2) * d * d
            m_hat = m[i] / (1 - beta1**t)
            v_hat = torch.sqrt(v[i] / (1 - beta2**t)) ** h["hessian_power"]
            update = m_hat / (v_hat + h["eps"]) + h["weight_decay"] * theta[i]
            theta[i] = theta[i] - h["lr"] * update
    return theta
