"""Flatness against closed forms and brute force, and what it must leave alone."""

import inspect
import math
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from scipy.optimize import brentq
from torch import nn

from steppe.curvature import flatness, lambda_max_from_flatness
from steppe.curvature.ball import XI
from steppe.errors import UserError
from steppe.optim import FlatnessOptimizer

ONE = [torch.zeros(1)]  # a batch for losses that need no data


class Weights(nn.Module):
    """Weights in two tensors, so that nothing relies on there being one."""

    def __init__(self, start):
        super().__init__()
        start = start.double()
        self.a = nn.Parameter(start[:1].clone())
        self.b = nn.Parameter(start[1:].clone())

    @property
    def flat(self):
        return torch.cat([self.a, self.b])


def of(function):
    """A loss that does not look at the batch."""
    return lambda model, batch: function(model.flat)


def spectrum(*values):
    return torch.tensor(values, dtype=torch.float64)


SPECTRA = {
    "well separated": torch.cat([spectrum(10.0), 3 * 0.9 ** torch.arange(60, dtype=torch.float64)]),
    "clustered": torch.cat([torch.linspace(9.5, 10, 20), torch.linspace(0, 9, 180)]).double(),
    "even": torch.linspace(0, 1e-3, 200, dtype=torch.float64),
    "repeated top": torch.cat([torch.full((5,), 4.0), torch.linspace(0, 3, 100)]).double(),
    "large condition number": torch.logspace(-6, 4, 200, dtype=torch.float64),
    "flat directions": torch.cat([spectrum(2.0, 1.0), torch.zeros(98, dtype=torch.float64)]),
    "two weights": spectrum(1.0, 3.0),
}


@pytest.mark.parametrize(("rho", "alpha"), [(1e-3, 0.0), (0.05, 0.3), (0.5, 0.8), (2.0, 1.0)])
@pytest.mark.parametrize("name", SPECTRA)
def test_at_a_minimum_flatness_is_the_largest_eigenvalue(name, rho, alpha):
    """Eq. 4, for each order alone and for their mixtures, to 1e-3."""
    values = SPECTRA[name]
    n = len(values)
    generator = torch.Generator().manual_seed(n)
    Q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    H = Q @ torch.diag(values) @ Q.T
    minimum = torch.randn(n, generator=generator, dtype=torch.float64)
    model = Weights(minimum)
    loss_fn = of(lambda w: 0.5 * (w - minimum) @ H @ (w - minimum))
    found = flatness(model, loss_fn, ONE, rho, alpha, restarts=1)  # the one must be random
    top = pytest.approx(float(values.max()), rel=1e-3)
    assert lambda_max_from_flatness(found.zeroth, rho, 1.0) == top
    assert lambda_max_from_flatness(found.first, rho, 0.0) == top
    assert lambda_max_from_flatness(found.fad, rho, alpha) == top
    # The gradient is exactly zero, so the optimizers' point is the minimum itself.
    assert found.zeroth_one_step == found.first_one_step == found.gradient_norm == 0
    assert found.converged


def test_at_a_saddle_each_order_finds_its_end_of_the_spectrum():
    """The loss rises along the largest eigenvalue, the gradient along the largest in magnitude."""
    values = torch.linspace(-30, 10, 100, dtype=torch.float64)
    found = flatness(Weights(torch.zeros(100)), of(lambda w: 0.5 * values @ w**2), ONE, 0.1)
    assert found.zeroth == pytest.approx(0.5 * 10 * 0.1**2, rel=1e-3)
    assert found.first == pytest.approx(30 * 0.1**2, rel=1e-3)


def test_at_a_maximum_the_loss_rises_nowhere():
    values = torch.linspace(1, 3, 5, dtype=torch.float64)
    found = flatness(Weights(torch.zeros(5)), of(lambda w: -0.5 * values @ w**2), ONE, 0.1, steps=4)
    assert max(found.zeroth_starts) < 0
    assert found.zeroth == 0
    assert found.first == pytest.approx(3 * 0.01, rel=0.05)


def test_the_centre_may_be_the_steepest_place():
    """And one step back from the sphere does not quite get there."""
    function = of(lambda w: torch.tanh(w[0]) + 0.5 * torch.tanh(2 * w[1]))
    found = flatness(Weights(torch.zeros(2)), function, ONE, 0.5, restarts=1, steps=1)
    assert max(found.first_starts) < found.first
    assert found.first == 0.5 * found.gradient_norm == pytest.approx(0.5 * 2**0.5)


def test_batches_of_different_size_are_one_mean():
    """A least-squares problem: the Hessian of the mean over all rows is known."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    w = torch.randn(8, generator=generator, dtype=torch.float64)
    model = Weights(w)
    found = flatness(
        model, lambda m, x: 0.5 * (x @ m.flat - x @ w).square().mean(), [x[:31], x[31:]], 0.2, 0.7
    )
    top = float(torch.linalg.eigvalsh(x.T @ x / 50)[-1])
    assert lambda_max_from_flatness(found.fad, 0.2, 0.7) == pytest.approx(top, rel=1e-3)


def trust_region_maximum(H, g, rho):
    """max g.e + e.He/2 over the ball, by the secular equation |(mu - H)^-1 g| = rho."""
    values, vectors = torch.linalg.eigh(H)
    c = vectors.T @ g

    def excess(mu):
        return float((c / (mu - values)).norm()) - rho

    floor = max(0.0, float(values[-1]))
    if floor == 0.0 and excess(0.0) < 0:  # a maximum inside
        e = -torch.linalg.solve(H, g)
    else:
        mu = brentq(excess, floor + 1e-12, floor + float(g.norm()) / rho + 1, xtol=1e-14)
        e = vectors @ (c / (mu - values))
    return float(g @ e + 0.5 * e @ H @ e)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shift", [-8.0, 0.0, 8.0])  # concave, indefinite, convex
def test_quadratics_with_a_gradient_against_the_secular_equation(seed, shift):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    H = (A + A.T) / 2 + shift * torch.eye(12, dtype=torch.float64)
    g = torch.randn(12, generator=generator, dtype=torch.float64)
    for rho in (0.1, 1.0):
        model = Weights(torch.zeros(12))
        found = flatness(model, of(lambda w: g @ w + 0.5 * w @ H @ w), ONE, rho, tol=1e-6)
        assert found.zeroth == pytest.approx(trust_region_maximum(H, g, rho), rel=1e-3)
        # |g + He|^2 = g.g + 2 (Hg).e + e.H^2 e is a quadratic again.
        squared = float(g @ g) + 2 * trust_region_maximum(H @ H, H @ g, rho)
        assert found.first == pytest.approx(rho * math.sqrt(squared), rel=1e-3)


def wavy(w):
    return (w**2).sum() * 0.3 + torch.sin(3 * w[0]) * torch.cos(2 * w[1]) + w.prod()


def valley(w):
    return (1 - w[0]) ** 2 / 10 + (w[1:] - w[:-1] ** 2).square().sum()


def plateau(w):
    return torch.tanh(w.square().sum() - w[0])


def filled_ball(n, rho):
    """Points that fill the ball in two or three dimensions."""
    if n == 2:
        axes = torch.linspace(0, 1, 101), torch.linspace(0, 6.2832, 721)
        r, phi = torch.meshgrid(*axes, indexing="ij")
        parts = [r * phi.cos(), r * phi.sin()]
    else:
        axes = torch.linspace(0, 1, 21), torch.linspace(0, 6.2832, 121), torch.linspace(-1, 1, 61)
        r, phi, z = torch.meshgrid(*axes, indexing="ij")
        flat = r * (1 - z**2).sqrt()
        parts = [flat * phi.cos(), flat * phi.sin(), r * z]
    return rho * torch.stack([p.flatten() for p in parts], 1).double()


@pytest.mark.parametrize("rho", [0.2, 1.5])
@pytest.mark.parametrize("start", [(0.3, -0.2), (-0.5, 0.4, 0.9)])
@pytest.mark.parametrize("function", [wavy, valley, plateau])
def test_any_function_against_brute_force(function, start, rho):
    """A grid on the ball attains nearly the maximum, and the ascent no less than the grid."""
    start = spectrum(*start)
    points = start + filled_ball(len(start), rho)
    losses = torch.func.vmap(function)(points)
    norms = torch.func.vmap(torch.func.grad(function))(points).norm(dim=1)
    zeroth, first = float(losses.max() - function(start)), rho * float(norms.max())
    found = flatness(Weights(start), of(function), ONE, rho, restarts=16, tol=1e-6)
    # The grid misses the maximum by the square of its spacing at worst, some 1e-3.
    assert found.zeroth == pytest.approx(zeroth, rel=5e-3)
    assert found.first == pytest.approx(first, rel=5e-3)
    assert found.zeroth >= zeroth * (1 - 1e-4)
    assert found.first >= first * (1 - 1e-4)


def network():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    batches = [(torch.randn(k, 5).double(), torch.randint(3, (k,))) for k in (9, 4)]
    return model, batches


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_one_step_values_are_those_of_the_formulas():
    """Defs. 3.1 and 3.2 with the maxima replaced by lines 6 and 9 of Algorithm 1."""
    model, batches = network()
    rho, alpha = 0.3, 0.4
    x, y = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def L(flat):
        parts = flat.split([shape.numel() for shape in shapes.values()])
        named = {name: p.view(shapes[name]) for name, p in zip(shapes, parts, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(model, named, x), y)

    grad = torch.func.grad(L)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    g0 = grad(theta)
    theta_1 = theta + rho * g0 / (g0.norm() + XI)
    h0 = grad(theta_1) - g0
    theta_2 = theta + rho * h0 / (h0.norm() + XI)
    zeroth, first = float(L(theta_1) - L(theta)), rho * float(grad(theta_2).norm())

    found = flatness(model, cross_entropy, batches, rho, alpha, restarts=1, steps=1)
    exactly = partial(pytest.approx, rel=1e-10)
    assert found.zeroth_one_step == exactly(zeroth)
    assert found.first_one_step == exactly(first)
    assert found.fad_one_step == exactly(alpha * zeroth + (1 - alpha) * first)
    assert found.fad == exactly(alpha * found.zeroth + (1 - alpha) * found.first)
    assert (found.loss, found.gradient_norm) == (
        exactly(float(L(theta))),
        exactly(float(g0.norm())),
    )
    assert (found.rho, found.alpha) == (rho, alpha)
    assert inspect.signature(FlatnessOptimizer).parameters["xi"].default == XI


@given(
    n=st.integers(2, 6),
    rho=st.floats(0.01, 2.0),
    alpha=st.floats(0.0, 1.0),
    steps=st.sampled_from([1, 50]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40)
def test_order_of_the_values(n, rho, alpha, steps, seed):
    """One step is never more than the ascent, and R0 is never more than R1 (mean value theorem)."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(n, n, generator=generator, dtype=torch.float64)
    start = torch.randn(n, generator=generator, dtype=torch.float64)
    function = of(lambda w: torch.sin(A @ w).sum() + 0.1 * w @ w)
    restarts = 1 if steps == 1 else 2
    found = flatness(Weights(start), function, ONE, rho, alpha, restarts=restarts, steps=steps)
    assert found.zeroth >= max(0.0, found.zeroth_one_step)
    assert found.first >= max(found.first_one_step, rho * found.gradient_norm)
    assert found.fad >= found.fad_one_step
    if steps > 1:
        assert found.zeroth <= found.first * (1 + 1e-9)
    assert found.zeroth == max(0.0, *found.zeroth_starts)
    assert found.first == max(rho * found.gradient_norm, *found.first_starts)


def test_restarts_find_what_the_first_start_misses():
    """A small hill where the gradient points, and a high one on the other side."""

    def hills(w):
        near = torch.exp(-((w - 1.2) ** 2).sum())
        far = 5 * torch.exp(-((w + 0.7) ** 2).sum() * 8)
        return near + far

    model = Weights(spectrum(0.2, 0.2))
    one = flatness(model, of(hills), ONE, 1.5, restarts=1)
    many = flatness(model, of(hills), ONE, 1.5, restarts=12)
    assert one.zeroth < 1
    assert many.zeroth == pytest.approx(5 - many.loss, rel=1e-3)
    assert (len(many.zeroth_starts), len(many.first_starts)) == (12, 13)
    assert min(many.zeroth_starts) < 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_weights_come_back_bit_by_bit(error):
    """Whatever happens, and at whatever point it does."""
    model, batches = network()
    model.train()
    model[0].weight.data[0, 0] = -0.0
    before = [p.detach().clone() for p in model.parameters()]
    calls, last = 0, None

    def loss_fn(model, batch):
        nonlocal calls
        calls += 1
        if calls == last:
            raise error
        return cross_entropy(model, batch)

    def unchanged():
        return all(
            torch.equal(p, b) and torch.equal(p.signbit(), b.signbit())
            for p, b in zip(model.parameters(), before, strict=True)
        )

    first = flatness(model, loss_fn, batches, 0.37, restarts=2, steps=4)
    assert unchanged()
    total = calls
    for number in range(1, total, 11):
        calls, last = 0, number
        with pytest.raises(error):
            flatness(model, loss_fn, batches, 0.37, restarts=2, steps=4)
        assert unchanged()
    calls, last = 0, None
    assert flatness(model, loss_fn, batches, 0.37, restarts=2, steps=4) == first
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_the_callers_gradient_mode_does_not_matter(context):
    model, batches = network()
    expected = flatness(model, cross_entropy, batches[:1], 0.3)
    with context():
        assert flatness(model, cross_entropy, batches[:1], 0.3) == expected


def test_only_the_chosen_parameters_move():
    """A layer alone: the rest is constant, also while the loss is computed."""
    model, batches = network()
    body = model[0].weight.detach().clone()

    def loss_fn(model, batch):
        assert torch.equal(model[0].weight, body)
        return cross_entropy(model, batch)

    head = flatness(model, loss_fn, batches, 0.3, params=iter(model[2].parameters()))
    whole = flatness(model, cross_entropy, batches, 0.3)
    assert 0 < head.zeroth < whole.zeroth
    assert head.first < whole.first


def test_float32_agrees_with_float64():
    """To the accuracy of a difference of losses in float32."""
    model, batches = network()
    wide = flatness(model, cross_entropy, batches, 0.3)
    narrow = flatness(model.float(), cross_entropy, [(x.float(), y) for x, y in batches], 0.3)
    assert narrow.zeroth == pytest.approx(wide.zeroth, rel=1e-3)
    assert narrow.first == pytest.approx(wide.first, rel=1e-3)


def test_the_seed_decides_and_the_global_generator_is_left_alone():
    model, batches = network()
    measure = partial(flatness, model, cross_entropy, batches, 0.3, steps=3)
    state = torch.get_rng_state()
    assert measure(seed=1) == measure(seed=1)
    assert measure(seed=1).zeroth_starts[1:] != measure(seed=2).zeroth_starts[1:]
    assert torch.equal(torch.get_rng_state(), state)


def test_progress_and_passes():
    model, batches = network()
    reports, reads = [], 0

    class Batches(list):
        def __iter__(self):
            nonlocal reads
            reads += 1
            return super().__iter__()

    found = flatness(
        model, cross_entropy, Batches(batches), 0.3, restarts=2, steps=6, progress=reports.append
    )
    shares = [report.share for report in reports]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] <= 1
    assert reports[0].note.startswith("zeroth-order flatness")
    assert reports[-1].note.startswith("first-order flatness")
    assert (reports[0].products, reports[-1].products > 0) == (0, True)
    assert not found.converged
    assert found.passes == reads - 2  # the operator's check looks at the first batch twice


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho": 0.0}, "rho must be positive and finite, got 0.0"),
        ({"rho": math.inf}, "rho must be positive and finite, got inf"),
        ({"alpha": 1.5}, "alpha must be from 0 to 1, got 1.5"),
        ({"alpha": math.nan}, "alpha must be from 0 to 1, got nan"),
        ({"restarts": 0}, "restarts=0"),
        ({"steps": 0}, "steps=0"),
        ({"tol": -1.0}, "tol must be >= 0, got -1.0"),
    ],
)
def test_wrong_options(options, message):
    model, batches = network()
    with pytest.raises(UserError, match=message):
        flatness(model, cross_entropy, batches, **{"rho": 0.1, **options})


@pytest.mark.parametrize(("rho", "alpha"), [(0.0, 0.5), (-1.0, 0.5), (0.1, -0.1), (0.1, 1.1)])
def test_wrong_ball(rho, alpha):
    with pytest.raises(UserError, match="rho must be|alpha must be"):
        lambda_max_from_flatness(1.0, rho, alpha)


def test_a_loss_that_is_not_finite_in_the_ball_is_said_to_be_there():
    weight = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(weight.weight, 1.0)

    def loss_fn(model, batch):
        return model(batch).log().mean()  # not a number below zero

    with pytest.raises(UserError, match=r"within rho=2 of the weights, the loss .*, lower rho"):
        flatness(weight, loss_fn, [torch.ones(1, 1).double()], rho=2.0)
    assert weight.weight.item() == 1.0
