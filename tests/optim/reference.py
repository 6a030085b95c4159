"""Slow, obvious float64 versions of the methods, written from their equations for the tests alone.

Weights are one flat vector; `grad(theta)` is the gradient there; hyperparameters are numbers or
flat vectors (one entry per weight, for parameter groups).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Grad = Callable[[Tensor], Tensor]
XI = 1e-12


def fad(grad: Grad, theta: Tensor, rho, alpha, beta) -> Tensor:
    """Algorithm 1, lines 5 to 14."""
    g0 = grad(theta)
    theta1 = theta + rho * g0 / (g0.norm() + XI)
    g1 = grad(theta1)
    h0 = g1 - g0
    theta2 = theta + rho * h0 / (h0.norm() + XI)
    g2 = grad(theta2)
    theta3 = theta2 + rho * g2 / (g2.norm() + XI)
    g3 = grad(theta3)
    h1 = g3 - g2
    return g0 + beta * (alpha * h0 + (1 - alpha) * h1)


def gam(grad: Grad, theta: Tensor, rho, alpha) -> Tensor:
    """The rival of the FAD paper: g0 + alpha h1."""
    g0 = grad(theta)
    h0 = grad(theta + rho * g0 / (g0.norm() + XI)) - g0
    theta2 = theta + rho * h0 / (h0.norm() + XI)
    g2 = grad(theta2)
    h1 = grad(theta2 + rho * g2 / (g2.norm() + XI)) - g2
    return g0 + alpha * h1


def sam(grad: Grad, theta: Tensor, rho) -> Tensor:
    """Foret et al. 2021, Eq. 2 and 3 with p = 2."""
    g0 = grad(theta)
    return grad(theta + rho * g0 / (g0.norm() + XI))


def asam(grad: Grad, theta: Tensor, rho, eta) -> Tensor:
    """Kwon et al. 2021, Eq. 4, with T = |theta| + eta."""
    T = theta.abs() + eta
    g0 = grad(theta)
    return grad(theta + rho * T**2 * g0 / ((T * g0).norm() + XI))


def gam_exact(grad: Grad, theta: Tensor, rho, alpha) -> Tensor:
    """Gradients of the gradient norm from the explicit Hessian."""

    def gradient_of_norm(point: Tensor) -> Tensor:
        hessian = torch.autograd.functional.jacobian(grad, point)
        g = grad(point)
        return hessian @ g / (g.norm() + XI)

    f = gradient_of_norm(theta)
    theta2 = theta + rho * f / (f.norm() + XI)
    return grad(theta) + alpha * rho * gradient_of_norm(theta2)


def gam_release(grad: Grad, theta: Tensor, rho, rho_norm, beta_0, beta_1, gamma) -> Tensor:
    """The released update: G - gamma (M - projection of M on G)."""
    g0 = grad(theta)
    g1 = grad(theta + rho * g0 / (g0.norm() + XI))
    theta2 = theta + rho_norm * (g1 - g0) / ((g1 - g0).norm() + XI)
    g2 = grad(theta2)
    g3 = grad(theta2 + rho * g2 / (g2.norm() + XI))
    G = beta_1 * g1 + (1 - beta_1) * g3
    M = g0 + abs(1 - beta_0) * g2
    orthogonal = M - (M @ G) / (G @ G) * G
    return G - gamma * orthogonal


class SGD:
    """v = momentum v + (direction + weight_decay theta);  theta = theta - lr v."""

    def __init__(self, lr, momentum: float, weight_decay: float) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.v: Tensor | None = None

    def __call__(self, theta: Tensor, direction: Tensor) -> Tensor:
        d = direction + self.weight_decay * theta
        self.v = d if self.v is None else self.momentum * self.v + d
        return theta - self.lr * self.v
