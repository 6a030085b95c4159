"""Power iteration with deflation, as the paper's tool does it: to reproduce, not to recommend."""

from __future__ import annotations

import torch
from torch import Tensor

from .eigenvalues import Eigenvalues
from .krylov import random_vector, seeded
from .results import Progress, Report
from .symmetric import Symmetric, multiply

STEPS = 100
"""The most steps spent on one eigenvalue."""


def power_iteration(
    op: Symmetric, k: int, *, tol: float, vectors: bool, seed: int, progress: Report | None
) -> Eigenvalues:
    """The eigenvalues of largest magnitude, one after the other.

    Each starts from a random vector, is kept orthogonal to those found before, and stops when the
    Rayleigh quotient changes by at most `tol` relative to itself, or after 100 steps. It stops as
    well where the operator leaves nothing of the vector: that belongs to the eigenvalue zero.
    """
    generator = seeded(op, seed)
    found = torch.empty(k, op.shape[0], dtype=op.dtype, device=op.device)
    values, residuals = torch.zeros(k, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)
    products, converged = 0, True
    for i in range(k):
        vector = _orthonormal(random_vector(op, generator), found[:i])
        value, settled = float("nan"), False
        for _ in range(STEPS):
            image = multiply(op, vector)
            products += 1
            value, before = float(vector @ image), value
            residuals[i] = float(torch.linalg.vector_norm(image - value * vector))
            values[i], found[i] = value, vector
            image = _deflated(image, found[:i])
            # Made longer, rounding would be a direction like any other, and not orthogonal.
            rounding = 16 * torch.finfo(op.dtype).eps * float(values[: i + 1].abs().max())
            is_zero = float(torch.linalg.vector_norm(image)) <= rounding
            settled = is_zero or abs(value - before) <= tol * abs(before)
            if settled:
                break
            vector = _orthonormal(image, found[:i])
        converged &= settled
        if progress is not None:
            progress(Progress((i + 1) / k, products, f"{i + 1} of {k} eigenvalues"))
    chosen = values.argsort(descending=True)
    kept = found[chosen.to(found.device)].T if vectors else None
    return Eigenvalues(values[chosen], residuals[chosen], kept, products, converged)


def _orthonormal(vector: Tensor, found: Tensor) -> Tensor:
    """Deflated twice: the first time may cancel much, which makes rounding errors large."""
    return _normalized(_deflated(_normalized(_deflated(vector, found)), found))


def _deflated(vector: Tensor, found: Tensor) -> Tensor:
    return vector - found.T @ (found @ vector)


def _normalized(vector: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector, dim=0, eps=0.0)
