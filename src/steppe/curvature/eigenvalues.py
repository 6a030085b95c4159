"""The extreme eigenvalues of a symmetric operator."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from steppe.errors import UserError, unknown

from .krylov import Krylov, Ritz, random_vector, seeded
from .results import Progress, Report
from .symmetric import Symmetric, check_matrix, in_tf32

Which = Literal["LA", "LM", "SA"]
"""Largest, largest in magnitude, or smallest."""

Method = Literal["lanczos", "power"]
Precision = Literal["fp32", "tf32"]

_ROUNDING = 64
"""Assumed rounding error of a product, in units in the last place; the largest observed."""
_AT_ONCE = 10
"""Vectors to verify in one pass over the data, to limit memory."""
_AT_LEAST = 1 << 25
"""Entries that the default basis may have even if `k` needs fewer."""


@dataclass(frozen=True)
class Eigenvalues:
    """Extreme eigenvalues, with error bounds.

    Attributes:
        values: descending, float64 on the CPU.
        residuals: the norms of `H v - value * v`, in the same order, or the rounding error of a
            product if that is larger. Each value is within its residual of a true eigenvalue.
        vectors: the eigenvectors, `n x k`, in the same order and on the operator's device, if
            requested.
        products: number of vectors multiplied.
        converged: whether the solver stopped because its criterion was met.
    """

    values: Tensor
    residuals: Tensor
    vectors: Tensor | None
    products: int
    converged: bool


def top_eigenvalues(
    op: Symmetric,
    k: int = 50,
    which: Which | None = None,
    *,
    tol: float = 1e-3,
    method: Method = "lanczos",
    precision: Precision = "fp32",
    vectors: bool = False,
    block_size: int = 1,
    basis: int | None = None,
    verify: int = 10,
    max_products: int | None = None,
    seed: int = 0,
    progress: Report | None = None,
) -> Eigenvalues:
    r"""Compute `k` extreme eigenvalues.

    Thick-restart Lanczos with full reorthogonalization, on the operator's device. It stops when
    every residual $\|H v - \lambda v\|$ is at most `tol` times the largest eigenvalue in magnitude.
    The error of an isolated eigenvalue is even smaller: of the order of the squared residual
    divided by the gap to the next eigenvalue.

    A Krylov space built from one vector contains only one copy of a repeated eigenvalue. Therefore,
    when all eigenvalues have converged, the solver adds a random direction and takes `verify` more
    steps, and continues if they find anything new. This finds copies that are well separated from
    the rest of the spectrum; a smaller `tol` helps with the others.

    With `precision="tf32"`, the solver searches with TF32 products, which are faster on a GPU. It
    then multiplies the `k` vectors found in full fp32 and continues, still in fp32, until the
    residuals are small enough. So residuals mean the same in both precisions. Of eigenvalues that
    differ by less than the error of TF32 products, the search may take the wrong one as the
    `k`-th.

    Eigenvalues below about `tol` times the largest are not resolved: their residuals are as large
    as the values. Check the residuals, and lower `tol` if the tail of the spectrum matters.

    Args:
        op: a `HessianOperator`, a `GaussNewtonOperator`, or a symmetric matrix.
        k: number of eigenvalues.
        which: "LA", the largest (default), "SA", the smallest, or "LM", the largest in magnitude.
        tol: the residual to reach, relative to the largest eigenvalue in magnitude. With
            `method="power"`, the relative change between iterations at which to stop.
        method: "lanczos", or "power" for power iteration with deflation, as in the paper. Power
            iteration finds the largest in magnitude and takes at most 100 steps for each, like the
            paper's tool; check the residuals.
        precision: "fp32", or "tf32" to search with TF32 products (only on a GPU).
        vectors: whether to return the eigenvectors.
        block_size: vectors to multiply at a time: fewer passes over the data, more products.
        basis: vectors to keep in memory before a restart: at least `k + 2 * block_size`, two more
            for `verify > 0` or "LM", and `k` more for "tf32" (default: `3 * k`, or more if vectors
            are short).
        verify: steps that search for missed copies of repeated eigenvalues; 0 disables the search.
            It is less reliable if the basis has no room for so many steps besides `k` vectors.
        max_products: stop with a warning after this many products, at least `k`, or `2 * k` for
            "tf32" (default: `20 * k + 200` per vector of a block).
        seed: seed of the random start.
        progress: called after each check of the residuals.

    Examples:
        >>> found = top_eigenvalues(torch.diag(torch.tensor([3.0, 1.0, 2.0, -5.0])), k=2)
        >>> found.values.round(decimals=4)
        tensor([3., 2.], dtype=torch.float64)
    """
    check_matrix(op)
    n = op.shape[0]
    _check_names(which, method, precision)
    _check_numbers(n, k, tol, block_size, verify)
    widest = block_size + (verify > 0 or which == "LM")  # "LM" needs room for both ends
    twice = k if precision == "tf32" else 0  # vectors to multiply again in fp32
    least = k + twice + 2 * widest
    if basis is not None and basis < min(n, least):
        raise UserError(
            f"basis must be at least {least} for k={k}, block_size={block_size}, verify={verify} "
            f"and precision={precision}, got {basis}"
        )
    if max_products is not None and max_products < k + twice:
        raise UserError(
            f"max_products must be at least {k + twice} for k={k} and precision={precision}, got "
            f"{max_products}"
        )
    if method == "power":
        from .power import power_iteration  # here, because it imports Eigenvalues

        return power_iteration(op, k, tol=tol, vectors=vectors, seed=seed, progress=progress)
    which = which or "LA"
    limit = (20 * k + 200) * block_size if max_products is None else max_products
    if basis is None:  # avoid restarts, which cost products, if vectors are short
        basis = max(3 * k, k + 20 * block_size, min(_AT_LEAST // n, limit + 2 * block_size))
    generator = seeded(op, seed)
    start = torch.stack([random_vector(op, generator) for _ in range(min(block_size, n))])
    problem = _Problem(k, which, tol, limit)
    if precision == "fp32":
        space = Krylov(op, start, basis, generator)
        ritz, wanted, missing = _search(space, problem, verify, progress)
    else:
        space = Krylov(in_tf32(op), start, basis, generator)
        first, second = _halves(progress)
        most = replace(problem, limit=limit - k)
        ritz, wanted, missing = _search(space, most, verify, first, coarse=True)
        space.restart(ritz, wanted)
        ritz, wanted, unreached = _refine(space, op, problem, second)
        missing = unreached or missing
    if missing is not None:
        warnings.warn(missing, stacklevel=2)
    return _result(space, ritz, wanted, vectors, missing is None)


@dataclass(frozen=True)
class _Problem:
    k: int
    which: Which
    tol: float
    limit: int

    def wanted(self, ritz: Ritz) -> Tensor:
        return order(ritz.values, self.which)[: self.k]

    def allowed(self, ritz: Ritz) -> float:
        return self.tol * float(ritz.values.abs().max())


_Found = tuple[Ritz, Tensor, str | None]
"""The Ritz pairs, the indices of those wanted, and what is missing, if anything."""


def _search(
    space: Krylov,
    problem: _Problem,
    verify: int,
    progress: Report | None,
    *,
    coarse: bool = False,
) -> _Found:
    """Grow the space until it contains the wanted eigenvectors, and repeated ones as well."""
    k = problem.k
    look = _Lookout(k, verify)
    due = 0
    while True:
        space.step()
        full, spent = space.is_full, space.products >= problem.limit
        if space.size < due and not (full or spent or space.is_exhausted):
            continue
        # A check costs a small eigendecomposition, so check less often as the basis grows.
        due = space.size + max(1, space.size // 20)
        ritz = space.ritz()
        wanted = problem.wanted(ritz)
        # More coarse products would not lower residuals below their noise.
        allowed = max(problem.allowed(ritz), space.noise if coarse else 0.0)
        if progress is not None:
            progress(_progress(ritz, wanted, k, allowed, space.products))
        if look.is_satisfied(space, ritz, wanted, allowed):
            return ritz, wanted, None
        if spent:
            return ritz, wanted, _shortfall(ritz, wanted, problem)
        # A restart during the search for copies would discard what it has found.
        steps, width = (verify, space.block + 1) if look.wants_more else (1, space.block)
        if not space.has_room(steps, width):
            if space.rows < k + 2 * width:
                missing = (
                    "the residuals are small enough, but eigenvalues are repeated and a basis of "
                    f"{space.rows} vectors has no room to search for more of them. Raise basis."
                )
                return ritz, wanted, missing
            room = max(k, space.rows - (steps + 1) * width)
            number = min(room, k + (space.rows - k) // 2)
            space.restart(ritz, _kept(ritz.values, problem.which, k, number))
            due = 0
        if look.wants_more:
            look.begin(space)


def _refine(space: Krylov, op: Symmetric, problem: _Problem, progress: Report | None) -> _Found:
    """Multiply the basis by another operator, and continue with it where residuals are too large.

    The residuals of few pairs span few directions, so each step multiplies only these.
    """
    k = problem.k
    space.reopen(op)
    while space.size < k:
        space.step(min(_AT_ONCE, k - space.size))
    while True:
        ritz = space.ritz()
        wanted, allowed = problem.wanted(ritz), problem.allowed(ritz)
        if progress is not None:
            progress(_progress(ritz, wanted, k, allowed, space.products))
        left = wanted[ritz.residuals[wanted] > allowed]
        if not len(left):
            return ritz, wanted, None
        if space.products >= problem.limit:
            return ritz, wanted, _shortfall(ritz, wanted, problem)
        needed = space.focus(ritz, left, allowed / 2)
        width = min(needed, problem.limit - space.products)
        if not space.has_room_for(width):
            room = space.rows - space.block
            width = min(width, room - k)
            number = k + (room - width - k) // 2
            space.restart(ritz, _kept(ritz.values, problem.which, k, number))
        space.step(width)


def order(values: Tensor, which: Which) -> Tensor:
    """Indices that sort ascending values, the wanted ones first."""
    if which == "LM":
        return values.abs().argsort(descending=True)
    indices = torch.arange(len(values))
    return indices if which == "SA" else indices.flip(0)


def _kept(values: Tensor, which: Which, k: int, number: int) -> Tensor:
    """The Ritz values that a restart keeps: the wanted ones and further candidates.

    For "LM", candidates come from both ends: otherwise one end could crowd out values that are
    still growing at the other.
    """
    ordered = order(values, which)
    if which != "LM":
        return ordered[:number]
    rest = ordered[k:].sort().values
    ends = torch.stack([rest, rest.flip(0)], dim=1).flatten()  # low, high, low, ...
    return torch.cat([ordered[:k], ends[: min(number - k, len(rest))]])


class _Lookout:
    """Decides when to stop, and widens the space to search for missed copies."""

    def __init__(self, k: int, verify: int) -> None:
        self._k, self._verify = k, verify
        self._until: int | None = None  # number of products at which the search ends
        self._found: Tensor | None = None  # the values when the search began
        self.wants_more = False
        """Whether to widen now. The caller makes room first, then calls `begin`."""

    def is_satisfied(self, space: Krylov, ritz: Ritz, wanted: Tensor, allowed: float) -> bool:
        self.wants_more = False
        if len(wanted) < self._k or not (ritz.residuals[wanted] <= allowed).all():
            return False
        if space.is_exhausted or not self._verify:
            return True
        if self._until is not None and space.products < self._until:
            return False
        values = ritz.values[wanted].sort().values
        if self._found is not None and (values - self._found).abs().max() <= allowed:
            return True
        self._found = values
        self.wants_more = True
        return False

    def begin(self, space: Krylov) -> None:
        space.widen()  # fails only if the next block completes the space
        self._until = space.products + self._verify * space.block


def _result(
    space: Krylov, ritz: Ritz, wanted: Tensor, vectors: bool, converged: bool
) -> Eigenvalues:
    chosen = wanted[ritz.values[wanted].argsort(descending=True)]
    found = space.vectors(ritz.coordinates[:, chosen]).T if vectors else None
    # Lanczos residuals ignore the rounding of products, which bounds the accuracy.
    floor = _ROUNDING * torch.finfo(space.basis.dtype).eps * float(ritz.values.abs().max())
    residuals = ritz.residuals[chosen].clamp_min(floor)
    return Eigenvalues(ritz.values[chosen], residuals, found, space.products, converged)


def _progress(ritz: Ritz, wanted: Tensor, k: int, allowed: float, products: int) -> Progress:
    """Progress of the residuals toward `allowed`, in orders of magnitude."""
    scale = max(float(ritz.values.abs().max()), torch.finfo(torch.float64).tiny)
    tol = allowed / scale
    relative = (ritz.residuals[wanted] / scale).clamp(tol, 1)
    ways = relative.log() / math.log(tol) if 0 < tol < 1 else torch.ones_like(relative)
    good = int((ritz.residuals[wanted] <= allowed).sum())
    return Progress(float(ways.sum()) / k, products, f"{good} of {k} eigenvalues have converged")


def _shortfall(ritz: Ritz, wanted: Tensor, problem: _Problem) -> str:
    tol, limit = problem.tol, problem.limit
    if (ritz.residuals[wanted] <= problem.allowed(ritz)).all():
        return (
            f"the residuals are small enough, but {limit} products did not suffice to search for "
            "missed copies of repeated eigenvalues. Raise max_products, or pass verify=0."
        )
    worst = float(ritz.residuals[wanted].max() / ritz.values.abs().max())
    return (
        f"not all eigenvalues converged after {limit} products: the largest residual is "
        f"{worst:.1e} of the largest eigenvalue, but tol={tol:.1e}. Raise max_products or tol."
    )


def _halves(report: Report | None) -> tuple[Report | None, Report | None]:
    """Report the progress of two successive computations as that of one."""
    if report is None:
        return None, None

    def at(start: float) -> Report:
        return lambda said: report(replace(said, share=start + said.share / 2))

    return at(0.0), at(0.5)


def _check_names(which: str | None, method: str, precision: str) -> None:
    if which is not None and which not in get_args(Which):
        raise UserError(unknown("which", which, get_args(Which)))
    if method not in get_args(Method):
        raise UserError(unknown("method", method, get_args(Method)))
    if precision not in get_args(Precision):
        raise UserError(unknown("precision", precision, get_args(Precision)))
    if method == "power" and precision != "fp32":
        raise UserError("precision='tf32' needs method='lanczos'")
    if method == "power" and which not in (None, "LM"):
        raise UserError(
            f"which={which!r}: power iteration finds the largest eigenvalues in magnitude, 'LM'; "
            "use method='lanczos' for others"
        )


def _check_numbers(n: int, k: int, tol: float, block_size: int, verify: int) -> None:
    if not 1 <= k <= n:
        raise UserError(f"k must be from 1 to {n}, the size of the operator, got {k}")
    if not tol > 0:
        raise UserError(f"tol must be positive, got {tol}")
    if block_size < 1:
        raise UserError(f"block_size must be at least 1, got {block_size}")
    if verify < 0:
        raise UserError(f"verify must be >= 0, got {verify}")
