r"""Krylov spaces of a symmetric operator, which can grow, restart and widen.

One mechanism serves eigenvalues, trace and density: an orthonormal basis $V$ with known images
under the operator, $H V = V T + Q\,C$, where the next block $Q$ is orthogonal to $V$. Every new
vector is orthogonalized against all others, repeatedly if much cancels, so the basis stays
orthonormal up to rounding and $T = V^\top H V$ always holds. The residuals of the Ritz pairs are
the norms of the columns of $C S$, with the eigenvectors $S$ of $T$.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .float32 import full_float32
from .symmetric import Symmetric, multiply

_CHUNK = 1 << 22
"""Columns of the basis to rotate at a time, in place, to save memory."""


@dataclass(frozen=True)
class Ritz:
    """Approximate eigenpairs from the operator restricted to the basis: float64 on the CPU."""

    values: Tensor
    """Ascending."""
    coordinates: Tensor
    """The vectors in the basis, in columns."""
    residuals: Tensor
    """The norms of `H v - value * v`."""


class Krylov:
    """A Krylov space that grows one block at a time.

    Args:
        op: the operator.
        start: the first block, `b x n`; will be orthonormalized.
        rows: vectors to allocate memory for, including the next block.
        generator: draws new directions when the old ones are exhausted.
    """

    def __init__(self, op: Symmetric, start: Tensor, rows: int, generator: torch.Generator) -> None:
        self._op, self._generator = op, generator
        self._n = op.shape[0]
        self.rows = min(rows, self._n)
        # Allocated once: growing by copies would need twice the memory.
        self._basis = torch.empty(self.rows, self._n, dtype=op.dtype, device=op.device)
        self._t = torch.zeros(self.rows, self.rows, dtype=torch.float64)
        self.size = 0
        """Number of vectors in the basis."""
        self.block = 0
        """Number of vectors in the next block, whose images are not known yet."""
        self.products = 0
        self.noise = 0.0
        """The largest asymmetry of the products, by which residuals may be wrong."""
        for vector in start:
            self._append(vector.to(op.device, op.dtype, copy=True), self.block)
            self.block += 1
        self._coupling = torch.zeros(self.block, 0, dtype=torch.float64)

    @property
    def is_full(self) -> bool:
        return not self.has_room(1, self.block)

    def has_room(self, steps: int, width: int) -> bool:
        """Whether `steps` blocks of `width` vectors fit, and the block after them."""
        return width == 0 or min(self.size + (steps + 1) * width, self._n) <= self.rows

    def has_room_for(self, width: int) -> bool:
        """Whether a step of this width fits, if each vector adds one to the next block."""
        return min(self.size + self.block + width, self._n) <= self.rows

    @property
    def is_exhausted(self) -> bool:
        """Whether the basis spans everything that can be reached."""
        return self.block == 0

    @property
    def basis(self) -> Tensor:
        """The vectors with known images, in rows."""
        return self._basis[: self.size]

    def step(self, width: int | None = None) -> None:
        """Multiply the next block, or its first `width` vectors, and add them to the basis."""
        width = self.block if width is None else width
        size, total, top = self.size, self.size + width, self.size + self.block
        block = self._basis[size:total]
        images = multiply(self._op, block[0] if width == 1 else block.T)
        self.products += width
        images = images.reshape(self._n, -1).T.contiguous()
        columns = torch.zeros(top + width, width, dtype=torch.float64)
        for column, image in enumerate(images):
            coefficients, length = self._append(image, top, self._coupling[column])
            columns[:top, column] = coefficients
            if length is not None:
                columns[top, column] = length
                top += 1
        inside = columns[:total]
        # By symmetry, the products of the old vectors have already determined these.
        off = inside[:size] - self._coupling[:width].T
        self.noise = max(self.noise, float(torch.linalg.vector_norm(off, dim=0).max()))
        self._t[:total, size:total] = inside
        self._t[size:total, :total] = inside.T
        self._t[size:total, size:total] = (inside[size:] + inside[size:].T) / 2
        coupling = torch.zeros(top - total, total, dtype=torch.float64)
        coupling[: self.block - width, :size] = self._coupling[width:]
        coupling[:, size:] = columns[total:top]
        self.size, self.block, self._coupling = total, top - total, coupling

    def ritz(self) -> Ritz:
        values, coordinates = torch.linalg.eigh(self._t[: self.size, : self.size])
        residuals = torch.linalg.vector_norm(self._coupling @ coordinates, dim=0)
        return Ritz(values, coordinates, residuals)

    def restart(self, ritz: Ritz, kept: Tensor) -> None:
        """Reduce the basis to some Ritz vectors (thick restart: Wu and Simon, 2000)."""
        coordinates = ritz.coordinates[:, kept]
        size, old = len(kept), self.size
        rotation = coordinates.T.to(self._basis)
        with full_float32(self._op.device):
            for columns in self._basis.split(_CHUNK, dim=1):  # views
                next_block = columns[old : old + self.block].clone()
                columns[:size] = rotation @ columns[:old]
                columns[size : size + self.block] = next_block
        self._t.zero_()
        self._t[:size, :size] = torch.diag(ritz.values[kept])
        self._coupling = self._coupling @ coordinates
        self.size = size

    def reopen(self, op: Symmetric) -> None:
        """Make the basis the next block, to be multiplied by another operator."""
        self._op = op
        self.size, self.block, self.noise = 0, self.size, 0.0
        self._t.zero_()
        self._coupling = torch.zeros(self.block, 0, dtype=torch.float64)

    def focus(self, ritz: Ritz, pairs: Tensor, enough: float) -> int:
        """Rotate the next block so that its first vectors span the residuals of some Ritz pairs.

        Returns:
            The number of these vectors. The rest contributes at most `enough` to any residual.
        """
        left, lengths, _ = torch.linalg.svd(self._coupling @ ritz.coordinates[:, pairs])
        self._coupling = left.T @ self._coupling
        rotation = left.T.to(self._basis)
        block = self._basis[self.size : self.size + self.block]
        with full_float32(self._op.device):
            for columns in block.split(_CHUNK, dim=1):  # views
                columns.copy_(rotation @ columns)
        return max(1, int((lengths > enough).sum()))

    def widen(self) -> bool:
        """Add a random direction to the next block; return False if there is no room."""
        top = self.size + self.block
        if top + 1 > self.rows or self._append_random(top) is None:
            return False
        self.block += 1
        nothing = torch.zeros(1, self.size, dtype=torch.float64)
        self._coupling = torch.cat([self._coupling, nothing])
        return True

    def vectors(self, coordinates: Tensor) -> Tensor:
        """Vectors, in rows, from their coordinates in the basis, in columns."""
        rotation = coordinates.T.to(self._basis)
        out = torch.empty(len(rotation), self._n, dtype=self._basis.dtype, device=self._op.device)
        with full_float32(self._op.device):
            torch.matmul(rotation, self.basis, out=out)
        return out

    def _append(
        self, vector: Tensor, top: int, expected: Tensor | None = None
    ) -> tuple[Tensor, float | None]:
        """Orthonormalize a vector against the first `top` rows and write it into the next row.

        `expected` are its coefficients in the basis, as far as they are known.

        Returns:
            Its coefficients and the length of the remainder. The length is 0 if nothing remained
            and a random direction was written instead, and None if there is no direction left.
        """
        before = float(torch.linalg.vector_norm(vector))
        coefficients, length = self._orthogonalize(vector, top, expected)
        # Below this, the remainder is rounding error.
        if length > 16 * torch.finfo(vector.dtype).eps * before and top < self.rows:
            self._basis[top] = vector.div_(length)
            return coefficients, length
        return coefficients, self._append_random(top)

    def _append_random(self, top: int) -> float | None:
        """Write a random unit vector, orthogonal to the first `top` rows, into the next row."""
        if top >= self.rows or top >= self._n:
            return None
        vector = random_vector(self._op, self._generator)
        _, length = self._orthogonalize(vector.div_(self._n**0.5), top)
        self._basis[top] = vector.div_(length)
        return 0.0

    def _orthogonalize(
        self, vector: Tensor, top: int, expected: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """Subtract from a vector, in place, its components along the first `top` rows."""
        basis = self._basis[:top]
        total = torch.zeros(top, dtype=torch.float64)
        if expected is not None:  # most of what cancels, so that one pass over all rows suffices
            total[: self.size] = expected
            total[self.size :] = (basis[self.size :] @ vector).to("cpu", torch.float64)
            known = total.nonzero()
            first = int(known[0]) if len(known) else top
            vector.addmv_(basis[first:].T, total[first:].to(vector), alpha=-1)
        length = float(torch.linalg.vector_norm(vector))
        for _ in range(5):  # classical Gram-Schmidt, until little cancels
            coefficients = basis @ vector
            vector.addmv_(basis.T, coefficients, alpha=-1)
            total += coefficients.to("cpu", torch.float64)
            length, before = float(torch.linalg.vector_norm(vector)), length
            if length > 0.7 * before:
                break
        return total, length


def random_vector(op: Symmetric, generator: torch.Generator) -> Tensor:
    return torch.randn(op.shape[0], generator=generator, dtype=op.dtype, device=op.device)


def random_signs(op: Symmetric, generator: torch.Generator) -> Tensor:
    size = (op.shape[0],)
    signs = torch.randint(0, 2, size, generator=generator, dtype=op.dtype, device=op.device)
    return signs.mul_(2).sub_(1)


def seeded(op: Symmetric, seed: int) -> torch.Generator:
    """A private generator, so that solvers do not change global random states."""
    return torch.Generator(op.device).manual_seed(seed)
