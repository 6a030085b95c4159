"""Traces: no bias, honest intervals, and less to pay where a few eigenvalues dominate."""

import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from steppe.curvature import HessianOperator, top_eigenvalues, trace
from steppe.curvature.hutchinson import FEWEST
from steppe.curvature.results import Trace, student_quantile
from steppe.errors import UserError
from tests.curvature.spectra import Counted, small_net, symmetric

MATRICES = {
    "decaying": lambda: symmetric(1 / (1 + torch.arange(80))),
    "indefinite": lambda: symmetric(
        torch.cat([3 * 0.9 ** torch.arange(50), -(0.8 ** torch.arange(30))])
    ),
    "net": lambda: small_net()[1],
}
ONE_LARGE = symmetric(torch.cat([torch.tensor([30.0]), torch.linspace(0, 0.1, 79)]))
pytestmark = pytest.mark.filterwarnings("ignore:the trace has not converged")

SEEDS = 200


def estimates(name, kind, **options):
    """The truth, and an estimate for every seed."""
    matrix = ONE_LARGE if name == "one large" else MATRICES[name]()
    found = []
    if kind == "eigenvalues":
        options["eigenvalues"] = top_eigenvalues(matrix, 4, tol=0.1, vectors=True)
    for seed in range(SEEDS):
        if kind == "same seed":  # the signs must not depend on the basis
            options["eigenvalues"] = top_eigenvalues(matrix, 4, tol=0.1, vectors=True, seed=seed)
        method = "hutchinson" if kind == "hutchinson" else "deflated"
        found.append(trace(matrix, method=method, seed=seed, **options))
    return float(matrix.trace()), found


def coverage(truth, found):
    return sum(low <= truth <= high for low, high in (f.interval() for f in found)) / len(found)


@pytest.mark.parametrize(
    "kind",
    ["hutchinson", "deflated", "eigenvalues", pytest.param("same seed", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", MATRICES)
def test_there_is_no_bias_and_intervals_cover_the_truth(name, kind):
    """With as many samples for every seed: the rule that stops early is a question of its own."""
    truth, found = estimates(name, kind, rtol=1e-9, max_products=60)
    values = torch.tensor([f.value for f in found], dtype=torch.float64)
    assert abs(float(values.mean()) - truth) < 4 * float(values.std()) / math.sqrt(SEEDS)
    # The stated errors are those that the values have: 200 values know theirs to 5 %.
    rms = math.sqrt(sum(f.stderr**2 for f in found) / SEEDS)
    assert rms == pytest.approx(float(values.std()), rel=0.2)
    assert 0.90 <= coverage(truth, found) <= 0.99
    assert not any(f.converged for f in found)
    assert {f.products for f in found} == {60}


@pytest.mark.parametrize(
    ("name", "kind", "rtol"),
    [
        ("decaying", "deflated", 0.01),
        ("decaying", "hutchinson", 0.05),
        ("decaying", "hutchinson", 0.5),
        ("indefinite", "deflated", 0.01),
        ("indefinite", "hutchinson", 0.1),
        pytest.param("net", "deflated", 0.01, marks=pytest.mark.slow),
        pytest.param("net", "hutchinson", 0.1, marks=pytest.mark.slow),
        ("net", "eigenvalues", 0.1),
        ("one large", "hutchinson", 0.5),  # the most skew there is
    ],
)
def test_intervals_cover_the_truth_also_when_stopped_early(name, kind, rtol):
    truth, found = estimates(name, kind, rtol=rtol)
    assert 0.90 <= coverage(truth, found) <= 0.99
    for f in found:
        assert f.converged == (f.stderr <= rtol * abs(f.value))
        assert f.samples >= FEWEST
    if rtol > 0.01:
        assert sum(f.converged for f in found) > 0.5 * SEEDS


def test_a_trace_that_has_not_converged_warns():
    with pytest.warns(UserWarning, match=r"not converged: after 60 .*rtol=0.0001\..*--trace-rtol"):
        found = trace(MATRICES["decaying"](), method="hutchinson", rtol=1e-4, max_products=60)
    assert not found.converged


def test_the_estimate_is_its_formula():
    """Mean and standard error of the samples, with the basis from eigenvectors taken out."""
    matrix = MATRICES["indefinite"]()
    top = top_eigenvalues(matrix, 3, tol=1e-8, vectors=True)
    op, reports = Counted(matrix), []
    options = {"rtol": 1e-9, "max_products": 60, "seed": 7}
    found = trace(op, eigenvalues=top, progress=reports.append, **options)
    generator = torch.Generator().manual_seed(7)
    projector = torch.eye(80).double() - top.vectors @ top.vectors.T
    z = torch.stack([torch.randint(0, 2, (80,), generator=generator) for _ in range(59)])
    z = (2.0 * z - 1).double() @ projector
    samples = ((z @ matrix) * z).sum(1)
    assert found.value == pytest.approx(float(top.values.sum() + samples.mean()), rel=1e-12)
    assert found.stderr == pytest.approx(float(samples.std()) / math.sqrt(59), rel=1e-9)
    low, high = found.interval(0.8)
    expected = stats.t.interval(0.8, 58, found.value, found.stderr)
    assert (low, high) == pytest.approx(expected, rel=1e-6)
    # One product shows that the eigenvectors are this matrix's.
    assert (found.samples, found.products, op.products) == (59, 60, 60)
    assert [r.products for r in reports] == list(range(2, 61))


def test_deflation_pays_where_a_few_eigenvalues_dominate():
    matrix = symmetric(torch.cat([torch.tensor([300.0, -200.0, 100.0]), torch.rand(97)]))
    options = {"rtol": 1e-9, "max_products": 100}
    plain = trace(matrix, method="hutchinson", **options)
    deflated = trace(matrix, **options)
    assert plain.products == deflated.products == 100
    assert deflated.stderr < plain.stderr / 20
    assert abs(deflated.value - float(matrix.trace())) < 4 * deflated.stderr


def test_what_is_known_exactly_has_no_error():
    op, dense = small_net()
    truth = float(dense.trace())
    whole = top_eigenvalues(op, op.shape[0], vectors=True)
    n = op.shape[0]
    for found, products in (
        (trace(op, eigenvalues=whole), 1),  # which shows that they are of this operator
        (trace(op, max_products=10 * n), n),
    ):
        assert found.value == pytest.approx(truth, rel=1e-12)
        assert found.interval() == (found.value, found.value)
        assert (found.stderr, found.samples, found.products) == (0, 0, products)
        assert found.converged
    diagonal = trace(torch.arange(1.0, 101.0).double().diag(), method="hutchinson")
    assert diagonal.value == 5050
    assert diagonal.stderr < 1e-11  # of rounding: every sample is the same
    assert diagonal.converged


def test_the_seed_decides_and_single_precision_will_do():
    matrix = MATRICES["net"]()
    first, same, other = (trace(matrix, seed=seed) for seed in (1, 1, 2))
    assert first == same
    assert first != other
    single = trace(matrix.float(), seed=3)
    assert abs(single.value - float(matrix.trace())) < 4 * single.stderr


@pytest.mark.parametrize("rtol", [1e-300, 0.02])
@pytest.mark.parametrize("method", ["deflated", "hutchinson"])
@pytest.mark.parametrize("name", ["net", "zero", "small"])
def test_progress_is_told_after_each_product(name, method, rtol):
    matrix = {"net": MATRICES["net"](), "zero": torch.zeros(50, 50), "small": torch.eye(5)}[name]
    reports = []
    found = trace(matrix, method=method, rtol=rtol, max_products=100, progress=reports.append)
    assert [r.products for r in reports] == list(range(1, found.products + 1))
    assert all(0 <= r.share <= 1 for r in reports)
    assert reports[-1].share == 1
    assert reports[0].share < 0.3


@pytest.mark.parametrize("degrees", [9, 17, 29, 59, 299])
def test_quantiles_are_students(degrees):
    for p in (0.5, 0.75, 0.9, 0.95, 0.975, 0.995):
        expected = float(stats.t.ppf(p, degrees))
        assert student_quantile(p, degrees) == pytest.approx(expected, rel=1e-3, abs=1e-12)


def test_bad_input():
    matrix = torch.eye(6).double()
    top = top_eigenvalues(matrix, 2, vectors=True)
    for options, message in (
        ({"rtol": 0.0}, "rtol must be positive, got 0.0"),
        ({"rtol": math.nan}, "rtol must be positive, got nan"),
        ({"method": "hutchison"}, "unknown method 'hutchison', did you mean 'hutchinson'"),
        ({"max_products": 59}, "max_products must be at least 60, got 59"),
        ({"eigenvalues": top_eigenvalues(matrix, 2)}, "use top_eigenvalues.*vectors=True"),
        ({"eigenvalues": top, "method": "hutchinson"}, "does not use eigenvalues: omit them"),
    ):
        with pytest.raises(UserError, match=message):
            trace(matrix, **options)
    with pytest.raises(UserError, match="operator with 6 rows, and this one has 7"):
        trace(torch.eye(7).double(), eigenvalues=top)
    with pytest.raises(UserError, match="float64 on cpu, and the operator is in torch.float32"):
        trace(torch.eye(6), eigenvalues=top)
    for confidence in (0.0, 1.0):
        with pytest.raises(UserError, match="confidence must be between 0 and 1, got"):
            Trace(1.0, 0.1, 0.8, 1.2, 30, 0.1, converged=True).interval(confidence)


def test_eigenvalues_of_other_weights_are_refused():
    op, _ = small_net()
    found = top_eigenvalues(op, 5, vectors=True)
    trace(op, eigenvalues=found, rtol=0.5)
    for p in op.params:
        p.data.mul_(1.5)
    with pytest.raises(UserError, match="not those of this operator.*Compute them again"):
        trace(op, eigenvalues=found)
    power = top_eigenvalues(op, 3, method="power", tol=0.5, vectors=True)  # far from converged
    trace(op, eigenvalues=power, rtol=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_networks_own_eigenvalues_are_not_refused(dtype):
    """Their residuals may be below what the products of a network are rounded to."""
    for seed in range(6):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 5)
        ).to(dtype)
        x, y = torch.randn(40, 1, 8, 8, dtype=dtype), torch.randint(5, (40,))
        op = HessianOperator(net, lambda m, b: F.cross_entropy(m(b[0]), b[1]), [(x, y)])
        for k in (1, 2):
            found = top_eigenvalues(op, k, vectors=True)
            trace(op, eigenvalues=found, rtol=0.9, max_products=60)
            image = op @ found.vectors - found.vectors * found.values.to(dtype)
            assert (image.norm(dim=0).double() <= 2 * found.residuals).all()


def test_rounding_is_an_error_too():
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(300, 10, generator=generator, dtype=torch.float64)
    matrix, inside = factor @ factor.T, 0
    for seed in range(40):
        low, high = trace(matrix, seed=seed).interval()
        inside += low <= float(matrix.trace()) <= high
    assert inside >= 36
