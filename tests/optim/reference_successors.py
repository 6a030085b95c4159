"""Obvious float64 versions of SAM's and FAD's successors, written from their equations.

`memory` is a dict that a method's reference keeps from step to step.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from tests.optim.reference import XI, Grad


def unit(v: Tensor) -> Tensor:
    return v / (v.norm() + XI)


def gsam(grad: Grad, theta: Tensor, rho, alpha) -> Tensor:
    g0 = grad(theta)
    g1 = grad(theta + rho * unit(g0))
    return g1 - alpha * (g0 - (g0 @ g1) / (g1 @ g1) * g1)


def sagm(grad: Grad, theta: Tensor, rho, alpha) -> Tensor:
    g0 = grad(theta)
    return 0.5 * (g0 + grad(theta + rho * unit(g0) - alpha * g0))


def c_flat(grad: Grad, theta: Tensor, rho, lam) -> Tensor:
    g0 = grad(theta)
    g1 = grad(theta + rho * unit(g0))
    theta2 = theta + rho * unit(g1 - g0)
    g2 = grad(theta2)
    return g1 + lam * (grad(theta2 + rho * unit(g2)) - g2)


def pgn(grad: Grad, theta: Tensor, rho, alpha) -> Tensor:
    g0 = grad(theta)
    return (1 - alpha) * g0 + alpha * grad(theta + rho * unit(g0))


def wsam_coupled(grad: Grad, theta: Tensor, rho, gamma) -> Tensor:
    g0 = grad(theta)
    return g0 + gamma / (1 - gamma) * (grad(theta + rho * unit(g0)) - g0)


def wsam_decoupled(grad: Grad, theta: Tensor) -> Tensor:
    """What the base gets; the sharpness follows its step."""
    return grad(theta)


def f_sam(grad: Grad, theta: Tensor, rho, sigma, lam, *, memory: dict) -> Tensor:
    g0 = grad(theta)
    if "m" not in memory:
        memory["m"] = e = g0
    else:
        memory["m"] = lam * memory["m"] + (1 - lam) * g0
        e = g0 - sigma * memory["m"]
    return grad(theta + rho * unit(e))


def vasso(grad: Grad, theta: Tensor, rho, tau, *, memory: dict) -> Tensor:
    g0 = grad(theta)
    memory["m"] = (1 - tau) * memory["m"] + tau * g0 if "m" in memory else g0
    return grad(theta + rho * unit(memory["m"]))


def looksam(grad: Grad, theta: Tensor, rho, k, alpha, *, memory: dict) -> Tensor:
    t = memory["t"] = memory.get("t", -1) + 1
    g0 = grad(theta)
    if t % k:
        return g0 + alpha * g0.norm() * unit(memory["u"])
    g1 = grad(theta + rho * unit(g0))
    memory["u"] = g1 - (g1 @ unit(g0)) * unit(g0)
    return g1


def msam(grad: Grad, theta: Tensor, rho, *, memory: dict) -> Tensor:
    """The momentum is the base's, which the test puts into `memory`."""
    v = memory.get("momentum")
    return grad(theta if v is None else theta - rho * unit(v))


def rwp(grad: Grad, theta: Tensor, gamma, alpha, *, memory: dict) -> Tensor:
    """The shapes of the parameters come from the test, in `memory`."""
    t = memory["t"] = memory.get("t", -1) + 1
    noise = []
    digest = hashlib.blake2b(repr((0, t)).encode(), digest_size=8).digest()
    generator = torch.Generator(theta.device)
    generator.manual_seed(int.from_bytes(digest, "big") >> 1)
    shapes = memory["shapes"]
    for w, shape in zip(theta.split([s.numel() for s in shapes]), shapes, strict=True):
        n = torch.empty(shape, dtype=theta.dtype, device=theta.device).normal_(generator=generator)
        rows = w.reshape(shape[0] if len(shape) > 1 else 1, -1)
        scaled = n.reshape(rows.shape) * rows.norm(dim=1, keepdim=True)
        noise.append(scaled.reshape(-1))
    return (1 - alpha) * grad(theta) + alpha * grad(theta + gamma * torch.cat(noise))
