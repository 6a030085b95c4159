"""Where one method must equal another exactly; a pass that cannot matter costs nothing."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from steppe.optim import FAD, GAM, SAM, InverseSqrt
from tests.optim import reference
from tests.optim.problems import METHODS, PROBLEMS, Problem, sgd, train

STEPS = 6


def run(problem_name, make):
    """Weights after a few steps, and the closure calls of each."""
    problem = PROBLEMS[problem_name]()
    opt = make(problem)
    calls = []
    for t in range(STEPS):
        count = 0
        inner = problem.closure(opt)

        def closure(inner=inner):
            nonlocal count
            count += 1
            return inner()

        torch.manual_seed(t)
        opt.step(closure)
        calls.append(count)
    return problem.weights(), calls


class Plain(torch.optim.SGD):
    """The base alone, with gradients cleared by the step, as the wrappers do."""

    def step(self, closure):
        self.zero_grad()
        return super().step(closure)


def base_alone(problem):
    return Plain(problem.model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)


def wrapped(cls, **hyper):
    return lambda problem: cls(sgd(problem.model.parameters()), model=problem.model, **hyper)


EQUAL = {
    "FAD with beta 0 is the base": (wrapped(FAD, beta=0.0), base_alone, 1),
    "FAD with rho 0 is the base": (wrapped(FAD, rho=0.0), base_alone, 1),
    "SAM with rho 0 is the base": (wrapped(SAM, rho=0.0), base_alone, 1),
    "GAM with alpha 0 is the base": (wrapped(GAM, alpha=0.0), base_alone, 1),
    "GAM with rho 0 is the base": (wrapped(GAM, rho=0.0), base_alone, 1),
    "FAD with alpha = beta = 1 is SAM": (
        wrapped(FAD, rho=0.2, alpha=1.0, beta=1.0),
        wrapped(SAM, rho=0.2),
        2,
    ),
    "FAD with alpha 0 is GAM": (
        wrapped(FAD, rho=0.2, alpha=0.0, beta=0.4),
        wrapped(GAM, rho=0.2, alpha=0.4),
        4,
    ),
}


@pytest.mark.parametrize("problem_name", PROBLEMS)
@pytest.mark.parametrize("case", EQUAL)
def test_equal_to_the_last_bit(case, problem_name):
    ours, other, passes = EQUAL[case]
    weights, calls = run(problem_name, ours)
    expected, _ = run(problem_name, other)
    assert torch.equal(weights, expected)
    assert calls == [passes] * STEPS


def test_alpha_1_costs_two_passes_and_is_the_full_formula():
    weights, calls = run("mlp", wrapped(FAD, rho=0.2, alpha=1.0, beta=0.3))
    assert calls == [2] * STEPS
    problem = PROBLEMS["mlp"]()
    expected, update = problem.weights(), reference.SGD(0.1, 0.9, 1e-2)
    for t in range(STEPS):
        grad = lambda point, t=t: problem.gradient(point, seed=t)  # noqa: E731
        expected = update(expected, reference.fad(grad, expected, 0.2, 1.0, 0.3))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


def test_groups_decide_together_which_passes_run():
    """A group with alpha 1 beside one with alpha 0.5 still needs four passes; beta 0 needs none."""
    problem = PROBLEMS["mlp"]()
    opt = FAD(sgd(problem.groups(alpha=1.0)), alpha=0.5, beta=0.5)
    assert len(list(_phases(problem, opt))) == 4
    opt = FAD(sgd(PROBLEMS["mlp"]().groups(beta=0.0)), alpha=1.0, beta=0.5)
    assert len(opt.visits([opt.coefficients(opt._values(g, 1)) for g in opt.param_groups])) == 2


def _phases(problem, opt):
    for phase in opt.phases():
        with phase:
            problem.loss().backward()
        yield phase


@pytest.mark.parametrize("name", METHODS)
def test_passes(name):
    problem = PROBLEMS["mlp"]()
    _, calls = run("mlp", lambda p: METHODS[name](sgd(p.model.parameters()), model=p.model))
    assert calls == [METHODS[name].passes_at(t) for t in range(STEPS)]
    assert problem  # the problem itself is untouched by building others


@pytest.mark.parametrize(
    ("ratio", "flat"), [(1.0, 200), (0.5, 100), (0.1, 20), (0.05, 10), (0.29, 58), (1 / 49, 4)]
)
def test_ratio_is_the_share_of_flat_steps(ratio, flat):
    problem = PROBLEMS["mlp"]()
    opt = SAM(sgd(problem.model.parameters()), ratio=ratio)
    calls = []
    for _ in range(200):
        count, due = 0, opt.due
        for phase in opt.phases():
            with phase:
                problem.loss().backward()
            count += 1
        opt.step()
        calls.append(count)
        assert due == (count == 2)
    assert calls.count(2) == flat
    assert calls.count(1) == 200 - flat
    gaps = [t for t, c in enumerate(calls, 1) if c == 2]
    assert gaps[0] == math.ceil(1 / ratio - 1e-9)  # the first is due when a whole one is owed


def test_plain_steps_of_a_ratio_are_base_steps():
    problem, plain = PROBLEMS["mlp"](), PROBLEMS["mlp"]()
    train(problem, FAD(sgd(problem.groups()), ratio=0.25), 3)
    train(plain, base_alone(plain), 3)
    assert torch.equal(problem.weights(), plain.weights())
    train(problem, opt := FAD(sgd(problem.groups()), ratio=0.25), 4)
    train(plain, base_alone(plain), 4)
    assert opt.steps == 4
    assert not torch.equal(problem.weights(), plain.weights())


def test_rho_schedule_counts_from_one():
    seen = []

    def rho(step):
        seen.append(step)
        return 0.1 / step

    problem = PROBLEMS["mlp"]()
    train(problem, SAM(sgd(problem.model.parameters()), rho=rho), 3)
    assert seen[-3:] == [1, 2, 3]  # the constructor asks once to check the value
    assert [InverseSqrt(0.3)(t) for t in (1, 9)] == [0.3, pytest.approx(0.1)]


def test_scheduled_rho_equals_setting_it_by_hand():
    scheduled, manual = PROBLEMS["mlp"](), PROBLEMS["mlp"]()
    train(scheduled, FAD(sgd(scheduled.groups()), rho=InverseSqrt(0.2)), 4)
    opt = FAD(sgd(manual.groups()), rho=1.0)
    for t in range(4):
        for group in opt.param_groups:
            group["rho"] = 0.2 / (t + 1) ** 0.5
        train(manual, opt, 1, first=t)
    assert torch.equal(scheduled.weights(), manual.weights())


@given(
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=4),
    rho=st.floats(1e-3, 3.0),
    alpha=st.floats(0.0, 1.0),
    beta=st.floats(0.0, 2.0),
    seed=st.integers(0, 2**16),
)
def test_any_shapes_and_hyper_parameters(shapes, rho, alpha, beta, seed):
    """FAD on a random non-convex function of tensors of any shape, scalars included."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [int(torch.tensor(s, dtype=torch.int64).prod()) for s in shapes]
    n = sum(sizes)
    A = torch.randn(n, n, generator=generator, dtype=torch.float64)
    start = torch.randn(n, generator=generator, dtype=torch.float64)

    def f(theta):
        return 0.1 * theta @ (A + A.T) @ theta + torch.sin(theta).sum()

    def grad(theta):
        return torch.func.grad(f)(theta)

    parts = start.split(sizes)
    params = [nn.Parameter(t.reshape(s).clone()) for t, s in zip(parts, shapes, strict=True)]
    opt = FAD(torch.optim.SGD(params, lr=0.1), rho=rho, alpha=alpha, beta=beta)

    def closure():
        loss = f(torch.cat([p.reshape(-1) for p in params]))
        loss.backward()
        return loss

    opt.step(closure)
    expected = start - 0.1 * reference.fad(grad, start, rho, alpha, beta)
    got = torch.cat([p.detach().reshape(-1) for p in params])
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_the_problem_helper_sees_perturbed_weights():
    """Guards the oracle: the reference gradient must depend on where it is asked."""
    problem: Problem = PROBLEMS["mlp"]()
    theta = problem.weights()
    assert not torch.equal(problem.gradient(theta, 0), problem.gradient(theta + 0.1, 0))
