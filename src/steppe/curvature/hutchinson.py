"""The trace of a symmetric operator, with its standard error."""

from __future__ import annotations

import math
import warnings
from statistics import fmean
from typing import Literal, get_args

import torch
from torch import Tensor

from steppe.errors import UserError, unknown

from .eigenvalues import Eigenvalues
from .krylov import Krylov, random_signs, random_vector, seeded
from .results import Progress, Report, Trace, student_interval
from .symmetric import Symmetric, check_matrix, multiply

Method = Literal["deflated", "hutchinson"]

FEWEST = 30
"""Fewest random vectors for which the estimated standard error is trusted.

A few large eigenvalues skew the samples: with 10 vectors, 95% intervals can cover the trace in as
few as 83% of cases.
"""

CONFIRMED = 1.25
"""Once the standard error is small enough, take this many times as many samples and check again.

Stopping at once would favor samples that happen to lie close together.
"""


def trace(
    op: Symmetric,
    *,
    rtol: float = 0.01,
    eigenvalues: Eigenvalues | None = None,
    method: Method = "deflated",
    max_products: int = 300,
    seed: int = 0,
    progress: Report | None = None,
) -> Trace:
    r"""Estimate the trace.

    Hutchinson's estimate is the mean of $z^\top H z$ over random signs $z$. Its variance is twice
    the squared Frobenius norm off the diagonal, most of which comes from a few large eigenvalues.
    The default removes these: with an orthonormal basis $Q$ of vectors found by Lanczos,

    $$\operatorname{tr} H = \operatorname{tr} Q^\top H Q + \mathbb{E}\, z^\top P H P z,
    \qquad P = I - Q Q^\top,$$

    where the first part is exact and the second has little variance. The estimate is unbiased for
    any basis, because $z$ is independent of it.

    Args:
        op: a `HessianOperator`, a `GaussNewtonOperator`, or a symmetric matrix.
        rtol: the standard error to reach, relative to the trace.
        eigenvalues: the result of `top_eigenvalues` with `vectors=True`, to use its vectors as the
            basis (default: a Lanczos basis, built with a tenth of `max_products`).
        method: "deflated" (default), or "hutchinson", as in the paper.
        max_products: stop after this many products, with a warning if `rtol` is not reached.
        seed: seed of the random signs.
        progress: called after each product.

    Examples:
        >>> found = trace(torch.diag(torch.arange(1.0, 101.0)))
        >>> low, high = found.interval()
        >>> low < 5050 < high, found.stderr < 51
        (True, True)
    """
    if method not in get_args(Method):
        raise UserError(unknown("method", method, get_args(Method)))
    if not rtol > 0:
        raise UserError(f"rtol must be positive, got {rtol}")
    if method == "hutchinson" and eigenvalues is not None:
        raise UserError("method='hutchinson' does not use eigenvalues: omit them")
    if max_products < 2 * FEWEST:
        raise UserError(f"max_products must be at least {2 * FEWEST}, got {max_products}")
    check_matrix(op)
    generator = seeded(op, seed)
    rounding = 4 * torch.finfo(op.dtype).eps
    basis: Tensor | None = None
    known, products = 0.0, 0
    if eigenvalues is not None:
        basis, known, products = _given_basis(op, eigenvalues)
    elif method == "deflated":
        basis, known, products = _lanczos_basis(op, max_products, generator, progress)
    if basis is not None and len(basis) >= op.shape[0]:
        exact = {"value": known, "low": known, "high": known}
        return Trace(**exact, stderr=0.0, samples=0, rtol=rtol, converged=True, products=products)
    samples: list[float] = []
    until: int | None = None  # number of samples at which to check again
    while True:
        z = random_signs(op, generator)
        if basis is not None:
            z -= basis.T @ (basis @ z)
        samples.append(float(z.double() @ multiply(op, z).double()))
        products += 1
        value = known + fmean(samples)
        each = torch.tensor(samples, dtype=torch.float64)
        spread = float(each.std()) / math.sqrt(len(samples)) if len(samples) > 1 else math.inf
        stderr = max(spread, rounding * (abs(known) + abs(value)))
        enough = len(samples) >= FEWEST and stderr <= rtol * abs(value)
        if enough and until is None:
            until = math.ceil(CONFIRMED * len(samples))
        confirmed = enough and len(samples) == until
        if until is not None and len(samples) >= until:
            until = None
        if progress is not None:
            left = 0.0 if confirmed else _left(value, stderr, len(samples), rtol)
            left = min(left, max_products - products)
            note = f"trace {value:.4g} ± {stderr:.2g}"
            progress(Progress(products / (products + left), products, note))
        if confirmed or products >= max_products:
            if not enough:
                warnings.warn(
                    f"the trace has not converged: after {products} products its relative standard "
                    f"error is {stderr / abs(value) if value else math.inf:.2g}, above "
                    f"rtol={rtol:.2g}. Raise rtol (--trace-rtol) or max_products.",
                    stacklevel=2,
                )
            low, high = student_interval(value, stderr, len(samples))
            return Trace(value, stderr, low, high, len(samples), rtol, enough, products)


Basis = tuple[Tensor, float, int]
"""Vectors in rows, the trace of the operator on their span, and the number of products."""


def _lanczos_basis(
    op: Symmetric, max_products: int, generator: torch.Generator, progress: Report | None
) -> Basis:
    rows = max_products // 10 + 1
    space = Krylov(op, random_vector(op, generator)[None], rows, generator)
    while not (space.is_full or space.is_exhausted):
        space.step()
        if progress is not None:
            is_last = space.size == op.shape[0]
            share = 1.0 if is_last else space.products / max_products
            progress(Progress(share, space.products, "Lanczos basis"))
    return space.basis, float(space.ritz().values.sum()), space.products


def _given_basis(op: Symmetric, eigenvalues: Eigenvalues) -> Basis:
    vectors = eigenvalues.vectors
    if vectors is None:
        raise UserError("eigenvalues has no vectors: use top_eigenvalues(..., vectors=True)")
    if vectors.shape[0] != op.shape[0]:
        raise UserError(
            f"eigenvalues belongs to an operator with {vectors.shape[0]} rows, and this one has "
            f"{op.shape[0]}"
        )
    if (vectors.dtype, vectors.device) != (op.dtype, op.device):
        raise UserError(
            f"eigenvalues has vectors in {vectors.dtype} on {vectors.device}, and the operator is "
            f"in {op.dtype} on {op.device}: compute them with this operator"
        )
    # One product detects eigenpairs of another operator, or of other weights.
    values, residuals = eigenvalues.values, eigenvalues.residuals
    # From a separate generator, so that the random signs do not depend on this check.
    mix = torch.randn(len(values), generator=seeded(op, 0), dtype=op.dtype, device=op.device)
    expected = vectors @ (mix * values.to(mix))
    off = torch.linalg.vector_norm(multiply(op, vectors @ mix) - expected)
    allowed = 2 * float(mix.cpu().double().abs() @ residuals)
    # Rounding grows with the network; other weights differ by far more than this.
    coarse = torch.finfo(op.dtype).eps ** 0.5 * float(values.abs().max() * mix.norm())
    if float(off) > allowed + coarse:
        raise UserError(
            "eigenvalues are not those of this operator: they may belong to other weights, "
            "another loss or other data. Compute them again."
        )
    return vectors.T, float(values.sum()), 1


def _left(value: float, stderr: float, samples: int, rtol: float) -> float:
    """Estimate the missing samples: the error falls with the square root of their number."""
    target = rtol * abs(value)
    ratio = stderr / target if stderr < 1e6 * target else math.inf
    needed = 0.0 if stderr == 0 else samples * ratio**2
    return max(CONFIRMED * max(FEWEST, needed) - samples, 1.0)
