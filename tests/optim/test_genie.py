"""GENIE against its equation, and its noise, which repeats."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from steppe.optim import GENIE, SAM
from steppe.optim.noise import generator, seed_of
from tests.optim.problems import PROBLEMS, Problem, mlp, train, twin

STEPS = 20
HYPER = {"lr": 0.05, "beta": 0.9, "p": 0.3, "weight_decay": 0.01}


class Reference:
    """The docstring's equation, one tensor at a time; it draws what GENIE draws."""

    def __init__(self, theta: list[Tensor], hyper: list[dict[str, Any]]) -> None:
        self.theta, self.hyper, self.t = theta, hyper, 0
        self.m = [torch.zeros_like(x) for x in theta]
        self.v = [torch.zeros_like(x) for x in theta]

    def step(self, grads: list[Tensor]) -> None:
        self.t += 1
        for i, (g, h) in enumerate(zip(grads, self.hyper, strict=True)):
            beta, eta, p = h["beta"], h["lr"], h["p"]
            self.m[i] = beta * self.m[i] + (1 - beta) * g
            self.v[i] = beta * self.v[i] + (1 - beta) * g**2
            z = 1 - beta**self.t
            r = (1 - beta) * (2 - z) / ((1 + beta) * z)
            mean = self.m[i] / z
            variance = torch.full_like(g, 1e-8)
            if self.t > 1:
                variance = (self.v[i] / z - mean**2) / (1 - r)
                variance = torch.where(variance > 0, variance, 1e-8)
            T = torch.tanh(torch.clamp(1 / variance, max=10))
            u = mean / (1 + r * variance / (mean**2 + 1e-8))
            n = (T * u.abs()).sum() / T.sum()
            draw = generator(g.device, h["seed"], i, self.t)
            mask = (torch.rand(g.shape, dtype=g.dtype, generator=draw) > p).double() / (1 - p)
            nu = torch.randn(g.shape, dtype=g.dtype, generator=draw)
            decayed = (1 - eta * h["weight_decay"]) * self.theta[i]
            self.theta[i] = decayed - eta * mask * (T * u + (1 - T) * n * nu)


def scaled(problem: Problem, factor: float) -> Callable[[], Tensor]:
    """A closure for a loss with larger gradients: variances above 0.1 bring noise."""

    def closure() -> Tensor:
        problem.model.zero_grad()
        loss = factor * problem.loss()
        loss.backward()
        return loss

    return closure


def split(problem: Problem, theta: Tensor) -> list[Tensor]:
    params = list(problem.model.parameters())
    pieces = theta.split([p.numel() for p in params])
    return [x.reshape(p.shape) for x, p in zip(pieces, params, strict=True)]


@pytest.mark.parametrize("factor", [1.0, 30.0])
@pytest.mark.parametrize("name", PROBLEMS)
def test_genie_is_its_equation(name: str, factor: float) -> None:
    problem = PROBLEMS[name]()
    first = {"lr": 0.02, "beta": 0.8, "p": 0.6}
    hyper = {**HYPER, "seed": 7}
    opt = GENIE(problem.groups(**first), **hyper)
    params = list(problem.model.parameters())
    each = [{**hyper, **(first if i < (problem.split or 0) else {})} for i in range(len(params))]
    expected = Reference(split(problem, problem.weights()), each)
    for t in range(STEPS):
        here = torch.cat([x.reshape(-1) for x in expected.theta])
        expected.step([factor * g for g in split(problem, problem.gradient(here, seed=t))])
        torch.manual_seed(t)
        opt.step(scaled(problem, factor))
        for ours, theirs in zip(params, expected.theta, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=1e-10, atol=1e-10)


def test_large_variances_bring_noise_and_small_ones_do_not() -> None:
    """Without a mask, the seed decides nothing but the noise; in float32, T rounds to 1."""

    def gap(factor: float) -> float:
        ends = []
        for seed in (0, 1):
            problem = mlp()
            problem.model.float()
            problem.x = problem.x.float()
            opt = GENIE(problem.model.parameters(), p=0.0, seed=seed)
            for t in range(5):
                problem.x = torch.randn(16, 6, generator=torch.Generator().manual_seed(t))
                opt.step(scaled(problem, factor))
            ends.append(problem.weights())
        return float((ends[0] - ends[1]).abs().max())

    assert gap(1.0) == 0.0
    assert gap(100.0) > 1e-3


def test_the_first_step_has_no_noise() -> None:
    """The release divides rounding errors by zero there; see the docstring."""
    weight = nn.Parameter(torch.zeros(1000))
    weight.grad = 1 + torch.rand(1000, generator=torch.Generator().manual_seed(0))
    GENIE([weight], lr=1.0, p=0.0).step()
    torch.testing.assert_close(weight.detach(), -weight.grad)


def test_the_mask_keeps_its_share_and_the_mean() -> None:
    weight = nn.Parameter(torch.zeros(100_000))
    weight.grad = torch.ones_like(weight)
    GENIE([weight], lr=1.0, p=0.8).step()
    stayed = float((weight == 0).double().mean())
    assert stayed == pytest.approx(0.8, abs=0.01)  # six standard errors are 0.0076
    assert float(weight.detach().mean()) == pytest.approx(-1.0, abs=0.05)


def test_equal_tensors_and_later_steps_draw_anew() -> None:
    a, b = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(50))
    opt = GENIE([{"params": [a]}, {"params": [b]}], lr=1.0)
    seen = []
    for _ in range(2):
        before = a.detach().clone(), b.detach().clone()
        a.grad, b.grad = torch.ones(50), torch.ones(50)
        opt.step()
        seen += [a.detach() != before[0], b.detach() != before[1]]
    assert len({tuple(mask.tolist()) for mask in seen}) == 4


def test_draws_depend_on_seed_tensor_and_step_alone() -> None:
    """Not on torch's generators, nor on which other tensors got a gradient."""
    ends = []
    for other in (True, False):
        torch.manual_seed(int(other))
        a, b = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(50))
        opt = GENIE([a, b], seed=3)
        rng = torch.get_rng_state()
        for _ in range(3):
            b.grad = torch.ones(50)
            a.grad = torch.ones(50) if other else None
            opt.step()
        assert torch.equal(torch.get_rng_state(), rng)
        ends.append(b.detach())
    assert torch.equal(*ends)
    assert seed_of(0, 1) == 8566881351708354045  # what runs drew once, they draw again


def test_weights_changed_from_outside_stay_changed() -> None:
    weight = nn.Parameter(torch.zeros(3))
    opt = GENIE([weight])
    for _ in range(2):
        weight.grad = torch.zeros(3)
        opt.step()
        with torch.no_grad():
            weight.fill_(5.0)
    opt.step()
    assert torch.equal(weight.detach(), torch.full((3,), 5.0))


def test_resuming_is_bit_identical_whatever_the_new_seed() -> None:
    problem = PROBLEMS["dropout"]()
    opt = GENIE(problem.model.parameters(), **HYPER, seed=5)
    for t in range(3):
        torch.manual_seed(t)
        opt.step(scaled(problem, 30.0))
    other = twin(problem)
    resumed = GENIE(other.model.parameters())
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    for p, o in ((problem, opt), (other, resumed)):
        for t in range(3, 6):
            torch.manual_seed(t)
            o.step(scaled(p, 30.0))
    assert torch.equal(problem.weights(), other.weights())


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies_go_on_as_the_original_does(clone: Callable[[Any], Any]) -> None:
    problem = mlp()
    opt = GENIE(problem.model.parameters(), **HYPER, seed=5)
    opt.step(scaled(problem, 30.0))
    other, copied = clone((problem, opt))
    for p, o in ((problem, opt), (other, copied)):
        o.step(scaled(p, 30.0))
    assert torch.equal(problem.weights(), other.weights())


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_that_a_scaler_skips_leaves_no_trace(wrapped: bool) -> None:
    """A run with an overflow equals one without that step, bit for bit."""
    ends = []
    for broken in (None, 2):
        problem = mlp()
        base = GENIE(problem.model.parameters(), **HYPER)
        opt: Any = SAM(base, rho=0.1) if wrapped else base
        scaler = GradScaler("cpu", init_scale=1024.0, backoff_factor=0.5)
        for t in range(6):
            if t == 2 and broken is None:
                continue

            def closure(t: int = t, scaler: GradScaler = scaler, p: Problem = problem) -> Tensor:
                p.model.zero_grad()
                loss = p.loss()
                scaler.scale(loss * float("inf") if t == 2 else loss).backward()
                return loss

            if wrapped:
                opt.step(closure, scaler=scaler)
            else:
                closure()
                scaler.step(opt)
            scaler.update()
        ends.append(problem.weights())
        assert {int(state["step"]) for state in base.state.values()} == {5}
    assert torch.equal(*ends)


def test_schedulers_drive_the_learning_rate() -> None:
    problem = mlp()
    opt = GENIE(problem.model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.0 if epoch else 1.0)
    train(problem, opt, 1)
    scheduler.step()
    before = problem.weights()
    train(problem, opt, 1)
    assert torch.equal(problem.weights(), before)


def test_parameters_without_gradient_stay_as_they_are() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt = GENIE([used, unused], weight_decay=0.1)
    (used**3).sum().backward()
    opt.step()
    assert not torch.equal(used, torch.ones(3))
    assert torch.equal(unused, torch.ones(3))
    assert unused not in opt.state


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for size in (1, 2**20):
        monkeypatch.setattr("steppe.optim.genie.CPU_BLOCK", size)
        problem = mlp()
        opt = GENIE(problem.model.parameters(), **HYPER)
        for _ in range(3):
            opt.step(scaled(problem, 30.0))
        ends.append(problem.weights())
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative, got -1.0"),
        ({"lr": float("nan")}, "lr"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"beta": 0.0}, "beta must be between 0 and 1, got 0.0"),
        ({"beta": 1.0}, "beta"),
        ({"p": 1.0}, r"p must be in \[0, 1\), got 1.0"),
        ({"p": -0.1}, "p must be"),
    ],
)
def test_bad_options_are_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GENIE([nn.Parameter(torch.ones(1))], **options)


def test_what_it_does_not_support_is_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="neither sparse gradients nor complex weights"):
        GENIE([table.weight]).step()
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    with pytest.raises(RuntimeError, match="float16 weights"):
        GENIE([half]).step()
