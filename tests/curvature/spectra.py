"""Symmetric matrices with chosen spectra, and small nets with their dense Hessians."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from steppe.curvature import HessianOperator

N = 40


def symmetric(values: Tensor, seed: int = 0) -> Tensor:
    """A dense matrix with the given eigenvalues and random eigenvectors."""
    values = values.double()
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)
    q = torch.linalg.qr(square).Q
    matrix = (q * values) @ q.T
    return (matrix + matrix.T) / 2


def _top(*values: float) -> Tensor:
    """Some values above an indefinite rest."""
    rest = torch.linspace(-4, 3, N - len(values), dtype=torch.float64)
    return torch.cat([torch.tensor(values, dtype=torch.float64), rest])


SPECTRA = {
    "indefinite": _top(),
    "twice": _top(5.0, 5.0, 4.5, 4.5),
    "three times": _top(5.0, 5.0, 5.0, 4.5),
    "five times": _top(*[5.0] * 5),
    "plateau": _top(*[5.0] * 20),
    "clustered": _top(*[5 * (1 - i * 1e-6) for i in range(6)]),
    "geometric": 0.6 ** torch.arange(N, dtype=torch.float64),
    "zero": torch.zeros(N, dtype=torch.float64),
    "rank one": torch.tensor([2.0] + [0.0] * (N - 1), dtype=torch.float64),
    "identity": torch.ones(N, dtype=torch.float64),
}


class Counted:
    """A dense matrix that counts the vectors it multiplies."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.products = matrix, 0
        self.shape, self.dtype, self.device = matrix.shape, matrix.dtype, matrix.device

    def __matmul__(self, vectors: Tensor) -> Tensor:
        self.products += vectors[0].numel()
        return self.matrix @ vectors


def small_net(seed: int = 0) -> tuple[HessianOperator, Tensor]:
    """The Hessian of a classifier with 67 parameters, as an operator and dense."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    params = {name: p.detach() for name, p in model.named_parameters()}
    shapes = [p.shape for p in params.values()]

    def loss(theta: Tensor) -> Tensor:
        parts = theta.split([shape.numel() for shape in shapes])
        point = {n: t.view(s) for n, t, s in zip(params, parts, shapes, strict=True)}
        return nn.functional.cross_entropy(functional_call(model, point, (x,)), y)

    theta = torch.cat([p.reshape(-1) for p in params.values()])
    batches = [(x[:7], y[:7]), (x[7:], y[7:])]
    return HessianOperator(model, loss_fn, batches), jacrev(grad(loss))(theta)


def residuals(matrix: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """The norms of `H v - value * v`, by their definition."""
    return torch.linalg.vector_norm(matrix @ vectors - vectors * values, dim=0)
