"""Extreme eigenvalues against dense ones, curvlinops and SciPy."""

import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from scipy.sparse.linalg import eigsh
from torch import nn

from steppe.curvature import HessianOperator, top_eigenvalues
from steppe.errors import UserError
from tests.curvature.nets import curvlinops
from tests.curvature.spectra import SPECTRA, Counted, N, residuals, small_net, symmetric

TIGHT = 1e-9


def wanted(matrix, k, which):
    """The dense eigenvalues, descending."""
    values = torch.linalg.eigvalsh(matrix.double())
    key = {"LA": -values, "SA": values, "LM": -values.abs()}[which]
    return values[key.argsort()[:k]].sort(descending=True).values


def check(found, matrix, k, which, tol=TIGHT):
    """Everything that a result promises, with rounding that grows with restarts."""
    scale = float(torch.linalg.eigvalsh(matrix).abs().max())
    rounding = 1e-11 * max(scale, 1e-3)
    expected = wanted(matrix, k, which)
    values = found.values
    assert torch.equal(values, values.sort(descending=True).values)
    if which == "LM":  # among values of equal magnitude, the sign is anyone's choice
        expected, values = expected.abs().sort().values, values.abs().sort().values
    torch.testing.assert_close(values, expected, rtol=0, atol=tol * scale + rounding)
    vectors = found.vectors
    assert vectors.shape == (len(matrix), k)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(k).double(), rtol=0, atol=1e-11)
    true = residuals(matrix, found.values, vectors)
    torch.testing.assert_close(found.residuals, true, rtol=0, atol=rounding)
    assert true.max() <= tol * scale + rounding
    assert found.converged


@pytest.mark.parametrize("which", ["LA", "SA", "LM"])
@pytest.mark.parametrize("name", SPECTRA)
def test_equals_the_dense_eigenvalues(name, which):
    matrix = symmetric(SPECTRA[name])
    for k in (1, 6, N - 1, N):
        for block_size in (1, 2, 3, 7, N + 5):
            op = Counted(matrix)
            found = top_eigenvalues(
                op, k, which, tol=TIGHT, block_size=block_size, vectors=True, max_products=2000
            )
            check(found, matrix, k, which)
            assert found.products == op.products


@pytest.mark.parametrize("extra", [0, 2, 5, 9])
@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("which", ["LA", "SA", "LM"])
def test_restarts_lose_nothing(which, block_size, extra):
    matrix = symmetric(SPECTRA["indefinite"])
    basis = 4 + 2 * (block_size + 1) + extra
    options = {"tol": 1e-7, "block_size": block_size, "vectors": True, "max_products": 20000}
    found = top_eigenvalues(matrix, 4, which, basis=basis, **options)
    check(found, matrix, 4, which, tol=1e-7)
    assert found.products > 3 * basis  # there were several


@pytest.mark.parametrize("block_size", [1, 2])
def test_equals_the_hessian_of_a_net(block_size):
    op, dense = small_net()
    for which in ("LA", "SA", "LM"):
        before = op.products
        found = top_eigenvalues(op, 10, which, tol=TIGHT, block_size=block_size, vectors=True)
        check(found, dense, 10, which)
        assert found.products == op.products - before
    assert torch.linalg.eigvalsh(dense)[0] < -1e-3  # indefinite


@st.composite
def problems(draw):
    n = draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    square = torch.randn(n, n, generator=generator, dtype=torch.float64)
    k, block_size = draw(st.integers(1, n)), draw(st.integers(1, 8))
    basis = draw(st.none() | st.integers(min(n, k + 2 * block_size + 2), n + 3))
    return square + square.T, k, draw(st.sampled_from(["LA", "SA", "LM"])), block_size, basis


@given(problems())
def test_equals_the_dense_eigenvalues_of_any_matrix(problem):
    matrix, k, which, block_size, basis = problem
    found = top_eigenvalues(
        matrix,
        k,
        which,
        tol=1e-6,
        block_size=block_size,
        basis=basis,
        vectors=True,
        max_products=100_000,
    )
    check(found, matrix, k, which, tol=1e-6)


def test_the_seed_decides_and_does_not_matter():
    matrix = symmetric(SPECTRA["indefinite"])
    first, same, other = (top_eigenvalues(matrix, 5, vectors=True, seed=s) for s in (1, 1, 2))
    assert torch.equal(first.values, same.values)
    assert torch.equal(first.vectors, same.vectors)
    assert not torch.equal(first.vectors, other.vectors)
    torch.testing.assert_close(first.values, other.values, rtol=0, atol=2e-3 * 4)
    assert top_eigenvalues(matrix, 5).vectors is None


@pytest.mark.parametrize("name", ["indefinite", "geometric", "clustered"])
def test_single_precision(name):
    exact = symmetric(SPECTRA[name])
    matrix = exact.float()
    found = top_eigenvalues(matrix, 6, vectors=True)
    assert found.values.dtype == torch.float64
    assert found.vectors.dtype == torch.float32
    top = float(SPECTRA[name].abs().max())
    tight = top_eigenvalues(matrix, 6, tol=1e-5)
    torch.testing.assert_close(tight.values, wanted(exact, 6, "LA"), rtol=0, atol=1e-5 * top)
    true = residuals(exact, found.values, found.vectors.double())
    assert true.max() <= 1e-3 * top * 1.01
    torch.testing.assert_close(found.residuals, true, rtol=0, atol=1e-5 * top)


REPEATED = {
    "twice": [5.0, 5.0, 4.0, 4.0, 3.5],
    "three times": [5.0, 5.0, 5.0, 4.0, 3.5],
    "lower": [6.0, 5.5, 5.0, 4.0, 4.0],
    "five times": [5.0] * 5,
    "plateau": [5.0] * 20,
}


@pytest.mark.parametrize("rows", [None, 50])
@pytest.mark.parametrize("name", REPEATED)
def test_repeated_eigenvalues_are_found_because_they_are_looked_for(name, rows):
    """One vector's Krylov space holds one copy; 30 seeds each, without and with a second look."""
    rest = 2.5 * 0.9 ** torch.arange(110)
    matrix, k = symmetric(torch.cat([torch.tensor(REPEATED[name]), rest])), 5
    expected = wanted(matrix, k, "LA")
    wrong = 0
    for seed in range(30):
        careless = top_eigenvalues(matrix, k, verify=0, basis=rows, seed=seed)
        wrong += bool((careless.values - expected).abs().max() > 0.1)
        assert careless.converged
        found = top_eigenvalues(matrix, k, basis=rows, seed=seed)
        torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-3 * 6)
        assert found.converged
    assert wrong == 30


def test_a_basis_without_room_to_look_says_so():
    matrix = symmetric(torch.cat([torch.full((5,), 5.0), torch.linspace(-0.5, 0.5, 35)]))
    with pytest.warns(UserWarning, match="basis of 9 vectors has no room .* Raise basis"):
        found = top_eigenvalues(matrix, 5, basis=9, tol=1e-6, max_products=5000, vectors=True)
    assert not found.converged
    true = residuals(matrix, found.values, found.vectors)
    torch.testing.assert_close(found.residuals, true, rtol=0, atol=1e-11)
    assert true.max() <= 1e-6 * 5


@pytest.mark.parametrize("block_size", [1, 3])
def test_stopping_early_warns_and_stays_below_the_truth(block_size):
    op = Counted(symmetric(SPECTRA["indefinite"]))
    with pytest.warns(UserWarning, match="after 12 products: .* Raise max_products"):
        found = top_eigenvalues(
            op, 5, tol=TIGHT, max_products=12, block_size=block_size, vectors=True
        )
    assert not found.converged
    assert found.products == op.products == 12
    # Cauchy's interlacing: Rayleigh-Ritz values lie below the true ones.
    assert (found.values <= wanted(op.matrix, 5, "LA") + 1e-12).all()
    true = residuals(op.matrix, found.values, found.vectors)
    torch.testing.assert_close(found.residuals, true, rtol=0, atol=1e-12)
    assert true.max() > TIGHT * 4


def test_stopping_before_the_second_look_warns():
    matrix = symmetric(SPECTRA["geometric"])
    enough = top_eigenvalues(matrix, 3, verify=0).products
    with pytest.warns(UserWarning, match="did not suffice to search for missed copies of repeated"):
        found = top_eigenvalues(matrix, 3, max_products=enough + 2)
    assert not found.converged
    torch.testing.assert_close(found.values, wanted(matrix, 3, "LA"), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["indefinite", "twice", "zero"])
def test_progress_goes_from_nothing_to_everything(name):
    matrix, reports = symmetric(SPECTRA[name]), []
    found = top_eigenvalues(matrix, 4, tol=1e-6, basis=14, progress=reports.append)
    shares = [report.share for report in reports]
    assert all(0 <= share <= 1 for share in shares)
    assert shares[-1] == 1
    assert reports[-1].products == found.products
    assert reports[-1].note == "4 of 4 eigenvalues have converged"
    products = [report.products for report in reports]
    assert products == sorted(products)
    steps = [after - before for before, after in pairwise(products)]
    assert max(steps) <= 2  # residuals are checked again soon, also after restarts
    if name == "indefinite":
        assert shares[0] < 0.3
        third = len(shares) // 3
        parts = [sum(shares[i : i + third]) for i in (0, third, 2 * third)]
        assert parts == sorted(parts)


class Coarse:
    """Products with a relative error of length `noise`, as if in TF32."""

    def __init__(self, op, noise):
        self.op, self.noise, self.products = op, noise, 0
        self.shape, self.dtype, self.device = op.shape, op.dtype, op.device
        self.generator = torch.Generator().manual_seed(0)

    def __matmul__(self, vectors):
        self.products += vectors[0].numel()
        exact = self.op.matrix @ vectors
        error = torch.randn(exact.shape, generator=self.generator, dtype=exact.dtype)
        return exact + self.noise * exact.norm() * error / error.norm()


def mixed(values, noise):
    op = Counted(symmetric(values))
    op.tf32 = Coarse(op, noise)
    return op


NOISE = [0.0, 1e-3, 0.05, 10.0]


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("which", ["LA", "SA", "LM"])
@pytest.mark.parametrize("name", SPECTRA)
def test_coarse_products_give_exact_results(name, which, noise):
    """Whatever the noise, residuals are those of exact products, and as small as requested."""
    for k in (1, 6, N):
        op = mixed(SPECTRA[name], noise)
        options = {"tol": 1e-7, "vectors": True, "max_products": 2000}
        found = top_eigenvalues(op, k, which, precision="tf32", **options)
        # Which members of a cluster narrower than `tol` are the wanted ones stays open.
        check(found, op.matrix, k, which, tol=2e-7)
        assert found.products == op.products + op.tf32.products


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("which", ["LA", "SA", "LM"])
def test_refining_in_a_small_basis_restarts(which, noise):
    op = mixed(SPECTRA["indefinite"], noise)
    options = {"tol": 1e-7, "vectors": True, "basis": 16, "max_products": 20000}
    found = top_eigenvalues(op, 4, which, precision="tf32", **options)
    check(found, op.matrix, 4, which, tol=1e-7)


def test_coarse_products_save_exact_ones():
    """Of a spectrum like a Hessian's: some large eigenvalues above a slowly decaying rest."""
    tail = torch.cat([8 * 0.97 ** torch.arange(300), -torch.rand(100)])
    values = torch.cat([300 * 0.5 ** torch.arange(6), tail])
    exact = top_eigenvalues(Counted(symmetric(values)), 30).products
    needed = []
    for noise in (0.0, 1e-3, 5e-3):
        op = mixed(values, noise)
        found = top_eigenvalues(op, 30, precision="tf32", vectors=True)
        check(found, op.matrix, 30, "LA", tol=1e-3)
        needed.append(op.products)
    assert needed[0] == 30  # to verify the vectors
    assert needed == sorted(needed)
    assert needed[-1] < exact / 2


def test_running_out_of_exact_products_warns():
    op = mixed(SPECTRA["indefinite"], 0.05)
    with pytest.warns(UserWarning, match="after 60 products: .* Raise max_products"):
        found = top_eigenvalues(
            op, 5, precision="tf32", tol=TIGHT, max_products=60, basis=30, vectors=True
        )
    assert not found.converged
    assert found.products == op.products + op.tf32.products == 60
    true = residuals(op.matrix, found.values, found.vectors)
    torch.testing.assert_close(found.residuals, true, rtol=0, atol=1e-12)
    assert true.max() > TIGHT * 4


def test_progress_with_coarse_products_goes_on():
    op, reports = mixed(SPECTRA["indefinite"], 1e-3), []
    found = top_eigenvalues(op, 4, tol=1e-6, precision="tf32", progress=reports.append)
    assert all(0 <= report.share <= 1 for report in reports)
    assert reports[-1].share == 1
    assert reports[-1].products == found.products
    products = [report.products for report in reports]
    assert products == sorted(products)


@pytest.mark.slow
def test_agrees_with_curvlinops_and_scipy_on_a_conv_net():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 20, 3, stride=2),
        nn.BatchNorm2d(20), nn.ReLU(), nn.Flatten(), nn.Linear(20 * 4, 10),
    ).double()  # fmt: skip
    x, y = torch.randn(20, 3, 8, 8, dtype=torch.float64), torch.randint(10, (20,))
    with torch.no_grad():
        model(x)  # fills the running statistics
    model.eval()
    batches = list(zip(x.split(8), y.split(8), strict=True))
    with warnings.catch_warnings():  # of torch, about what curvlinops uses
        warnings.simplefilter("ignore")
        peer = curvlinops().HessianLinearOperator(
            model, nn.CrossEntropyLoss(), list(model.parameters()), batches
        )
        expected = eigsh(peer.to_scipy(), k=20, which="LA", tol=1e-7, return_eigenvectors=False)
    op = HessianOperator(model, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), batches)
    assert op.shape[0] > 2500
    found = top_eigenvalues(op, 20, tol=1e-7)
    expected = torch.from_numpy(expected).sort(descending=True).values
    torch.testing.assert_close(found.values, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be from 1 to 6, .* got 0"),
        ({"k": 7}, "k must be from 1 to 6, .* got 7"),
        ({"which": "la"}, "unknown which 'la', did you mean 'LA'"),
        ({"precision": "tf23"}, "unknown precision 'tf23', did you mean 'tf32'"),
        ({"precision": "tf32"}, "Tensor has no TF32 products, .* use precision='fp32'"),
        ({"precision": "tf32", "method": "power"}, "precision='tf32' needs method='lanczos'"),
        ({"precision": "tf32", "basis": 5}, "basis must be at least 8 .* precision=tf32, got 5"),
        ({"precision": "tf32", "max_products": 3}, "max_products must be at least 4 .* got 3"),
        ({"method": "lanzcos"}, "unknown method 'lanzcos', did you mean 'lanczos'"),
        ({"tol": 0.0}, "tol must be positive, got 0.0"),
        ({"tol": float("nan")}, "tol must be positive, got nan"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"k": 1, "basis": 4}, r"basis must be at least 5 .* got 4"),
        ({"k": 1, "basis": 2, "verify": 0}, r"basis must be at least 3 .* got 2"),
        ({"verify": -1}, "verify must be >= 0, got -1"),
        ({"k": 3, "max_products": 2}, "max_products must be at least 3 for k=3 .* got 2"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(UserError, match=message):
        top_eigenvalues(torch.eye(6), **{"k": 2, **options})
