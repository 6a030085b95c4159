"""Power iteration with deflation, as in the paper's tool: for reproduction, not recommended."""

from __future__ import annotations

import torch
from torch import Tensor

from .eigenvalues import Eigenvalues
from .krylov import random_vector, seeded
from .results import Progress, Report
from .symmetric import Symmetric, multiply

STEPS = 100
"""Maximum number of steps per eigenvalue."""


def power_iteration(
    op: Symmetric, k: int, *, tol: float, vectors: bool, seed: int, progress: Report | None
) -> Eigenvalues:
    """Compute the eigenvalues of largest magnitude, one after the other.

    Each iteration starts from a random vector and stays orthogonal to the vectors found before. It
    stops when the relative change of the Rayleigh quotient is at most `tol`, after `STEPS` steps,
    or when the image of the vector vanishes (eigenvalue zero).
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
            # Normalizing a rounding error would give a direction that is not orthogonal.
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
    """Deflate twice, because cancellation the first time can amplify rounding errors."""
    return _normalized(_deflated(_normalized(_deflated(vector, found)), found))


def _deflated(vector: Tensor, found: Tensor) -> Tensor:
    return vector - found.T @ (found @ vector)


def _normalized(vector: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector, dim=0, eps=0.0)
