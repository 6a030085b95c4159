"""Power iteration with deflation against its definition."""

import pytest
import torch

from steppe.curvature import top_eigenvalues
from steppe.curvature.krylov import random_vector, seeded
from steppe.errors import UserError
from tests.curvature.spectra import SPECTRA, Counted, residuals, symmetric

GAPS = torch.cat([torch.tensor([9.0, -6.0, 4.0, 2.5]), torch.linspace(-1, 1, 36)])


def reference(matrix, k, tol, seed):
    """Multiply and normalize; then take what was found out of the matrix itself."""
    generator, deflated = seeded(matrix, seed), matrix.clone()
    found = []
    for _ in range(k):
        v = random_vector(matrix, generator)
        for _, u, _ in found:
            v = v - u * (u @ v)
        v = v / v.norm()
        value, steps = None, 0
        while steps < 100:
            steps += 1
            previous, value = value, float(v @ deflated @ v)
            if previous is not None and abs(value - previous) <= tol * abs(previous):
                break
            if steps < 100:
                v = deflated @ v
                v = v / v.norm()
        found.append((value, v, steps))
        deflated = deflated - value * torch.outer(v, v)
    return found


@pytest.mark.parametrize("tol", [1e-3, 1e-6])
def test_follows_the_definition(tol):
    """To the tolerance: deflating by a vector or by the matrix differs by the vector's error."""
    op = Counted(symmetric(GAPS))
    found = top_eigenvalues(op, 4, method="power", tol=tol, seed=3, vectors=True)
    expected = sorted(reference(op.matrix, 4, tol, seed=3), key=lambda e: -e[0])
    values = torch.tensor([value for value, _, _ in expected], dtype=torch.float64)
    torch.testing.assert_close(found.values, values, rtol=5 * tol, atol=0)
    torch.testing.assert_close(found.values, GAPS[[0, 2, 3, 1]].double(), rtol=20 * tol, atol=0)
    steps = sum(steps for _, _, steps in expected)
    assert abs(found.products - steps) <= 2
    assert found.products == op.products
    assert found.converged
    true = residuals(op.matrix, found.values, found.vectors)
    torch.testing.assert_close(found.residuals, true, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        found.vectors.T @ found.vectors, torch.eye(4).double(), rtol=0, atol=1e-12
    )


def test_the_first_eigenvalue_is_the_definitions_to_rounding():
    matrix = symmetric(GAPS)
    found = top_eigenvalues(matrix, 1, "LM", method="power", tol=1e-4, seed=5, vectors=True)
    ((value, vector, steps),) = reference(matrix, 1, 1e-4, seed=5)
    torch.testing.assert_close(float(found.values), value, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.vectors[:, 0], vector, rtol=0, atol=1e-12)
    assert found.products == steps


def test_at_most_a_hundred_steps_for_each():
    """Eigenvalues close together: the quotient creeps on."""
    op, reports = Counted(symmetric(1 + 1e-3 * torch.arange(40))), []
    found = top_eigenvalues(op, 2, method="power", tol=1e-300, progress=reports.append)
    assert found.products == op.products == 200
    assert not found.converged
    assert found.vectors is None
    assert [(r.share, r.products) for r in reports] == [(0.5, 100), (1.0, 200)]


@pytest.mark.parametrize("name", ["rank one", "zero", "identity", "three times"])
def test_no_eigenvalue_is_found_twice(name):
    """Where nothing but rounding is left of a vector, that must not become a direction."""
    matrix, k = symmetric(SPECTRA[name]), 4
    expected = SPECTRA[name].abs().sort(descending=True).values[:k]
    for seed in range(5):
        found = top_eigenvalues(matrix, k, method="power", tol=1e-6, seed=seed, vectors=True)
        magnitudes = found.values.abs().sort(descending=True).values
        torch.testing.assert_close(magnitudes, expected, rtol=0, atol=1e-2)
        torch.testing.assert_close(
            found.vectors.T @ found.vectors, torch.eye(k).double(), rtol=0, atol=1e-12
        )
        assert found.converged


@pytest.mark.parametrize("which", ["LA", "SA"])
def test_finds_nothing_but_the_largest_in_magnitude(which):
    with pytest.raises(UserError, match=f"which='{which}': power iteration .* method='lanczos'"):
        top_eigenvalues(torch.eye(3), 1, which, method="power")
