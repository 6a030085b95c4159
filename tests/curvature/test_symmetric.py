"""What is no symmetric matrix is refused, by every solver."""

import pytest
import torch
from torch import nn

from steppe.curvature import HessianOperator, spectral_density, top_eigenvalues, trace
from steppe.errors import UserError

SOLVERS = {
    "lanczos": lambda op: top_eigenvalues(op, 1),
    "power": lambda op: top_eigenvalues(op, 1, method="power"),
    "trace": trace,
    "hutchinson": lambda op: trace(op, method="hutchinson"),
    "density": spectral_density,
}
MATRICES = {
    "not symmetric": (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), "not symmetric"),
    "not a number": (torch.tensor([[1.0, torch.nan], [torch.nan, 1.0]]), "not finite"),
    "not square": (torch.zeros(2, 3), r"square, n x n, got shape \(2, 3\)"),
    "integers": (torch.eye(2, dtype=torch.int64), r"int64: convert it with \.float\(\)"),
    "nothing": (torch.zeros(0, 0), r"got shape \(0, 0\)"),
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_matrices(solver, matrix):
    dense, message = MATRICES[matrix]
    with pytest.raises(UserError, match=message):
        SOLVERS[solver](dense)


@pytest.mark.parametrize("solver", SOLVERS)
def test_second_derivatives_that_are_not_finite(solver):
    # A norm has a kink at zero: the loss and its (chosen) gradient are finite there.
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)

    def loss_fn(model, batch):
        return torch.linalg.vector_norm(model.weight) + model(batch).square().sum()

    with pytest.raises(UserError, match="not finite: the loss is not twice differentiable"):
        SOLVERS[solver](HessianOperator(layer, loss_fn, [torch.ones(1, 2)]))


def test_matrices_with_rounding_pass():
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(20, 20, generator=generator)
    matrix = factor @ factor.T
    found = top_eigenvalues(matrix + 1e-7 * factor, 1)
    assert float(found.values[0]) == pytest.approx(
        float(torch.linalg.eigvalsh(matrix.double())[-1]), rel=1e-5
    )
