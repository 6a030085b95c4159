"""The spectral density of a symmetric operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.errors import UserError

from .krylov import Krylov, random_vector, seeded
from .results import Progress, Report
from .symmetric import Symmetric, check_matrix


@dataclass(frozen=True)
class Density:
    r"""An estimate of the distribution of the eigenvalues.

    Each random vector gives a quadrature rule: nodes $\theta_i$ with weights $w_i \ge 0$ that sum
    to 1, such that $\sum_i w_i f(\theta_i)$ estimates the mean of $f$ over the eigenvalues.

    Attributes:
        nodes: `probes x steps`, float64 on the CPU.
        weights: the same shape and type; each row sums to 1.
        products: number of vectors multiplied.
    """

    nodes: Tensor
    weights: Tensor
    products: int

    def mean(self, function: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """The mean of a function over the eigenvalues, and its standard error.

        With one probe, the standard error is infinite.
        """
        of_probes = (self.weights * function(self.nodes)).sum(1)
        probes = len(of_probes)
        stderr = float(of_probes.std()) / math.sqrt(probes) if probes > 1 else math.inf
        return float(of_probes.mean()), stderr

    def at(self, points: Tensor, width: float | None = None) -> Tensor:
        """The density at `points`, smoothed by a Gaussian.

        Args:
            points: where to evaluate it.
            width: the Gaussian's standard deviation (default: 1% of the spectrum's range).
        """
        if width is None:
            width = float(self.nodes.max() - self.nodes.min()) / 100 or 1.0
        if not width > 0:
            raise UserError(f"width must be positive, got {width}")
        points = points.to("cpu", torch.float64)
        out = torch.zeros_like(points)
        norm = len(self.nodes) * width * math.sqrt(2 * math.pi)
        for node, weight in zip(self.nodes.flatten(), self.weights.flatten(), strict=True):
            out += weight / norm * torch.exp(-0.5 * ((points - node) / width) ** 2)
        return out


def spectral_density(
    op: Symmetric,
    *,
    probes: int = 4,
    steps: int = 80,
    seed: int = 0,
    progress: Report | None = None,
) -> Density:
    r"""Estimate the spectral density by stochastic Lanczos quadrature.

    From a random vector, Lanczos builds a small matrix. Its eigenvalues are the nodes, and the
    squared first entries of its eigenvectors the weights, of a Gauss quadrature that is exact for
    polynomials of degree $2 \cdot \text{steps} - 1$ (Golub and Welsch, 1969). For these, the mean
    over random vectors is an unbiased estimate of the mean over eigenvalues.

    Args:
        op: a `HessianOperator`, a `GaussNewtonOperator`, or a symmetric matrix.
        probes: number of random vectors; more reduce the statistical error.
        steps: products per probe; more increase the resolution.
        seed: seed of the random vectors.
        progress: called after each product.

    Examples:
        >>> found = spectral_density(torch.diag(torch.tensor([1.0, 1.0, 1.0, 3.0])), probes=20)
        >>> mean, stderr = found.mean(lambda eigenvalue: eigenvalue)
        >>> abs(mean - 1.5) < 4 * stderr
        True
    """
    if probes < 1 or steps < 1:
        raise UserError(f"probes and steps must be at least 1, got probes={probes}, steps={steps}")
    check_matrix(op)
    generator = seeded(op, seed)
    steps = min(steps, op.shape[0])
    nodes = torch.zeros(probes, steps, dtype=torch.float64)
    weights = torch.zeros(probes, steps, dtype=torch.float64)
    products = 0
    for probe in range(probes):
        space = Krylov(op, random_vector(op, generator)[None], steps + 1, generator)
        while space.size < steps:
            space.step()
            if progress is not None:
                done = products + space.products
                progress(Progress(done / (probes * steps), done, f"probe {probe + 1} of {probes}"))
        ritz = space.ritz()
        nodes[probe], weights[probe] = ritz.values, ritz.coordinates[0] ** 2
        products += space.products
        del space  # frees its memory before the next one
    return Density(nodes, weights, products)
