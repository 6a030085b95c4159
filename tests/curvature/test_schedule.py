"""The schedules of Theorem 3.2, and the rate they promise."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from steppe.curvature.schedule import convergence_schedule
from steppe.errors import UserError
from steppe.optim import FAD
from tests.optim import reference

RHO_0, ETA_0, ALPHA, BETA = 0.5, 0.5, 0.4, 0.8
STEEPNESS = torch.linspace(0.5, 2.0, 10, dtype=torch.float64)


def gradient(w):
    """Of sum a w^2 / (1 + w^2) / 2: smooth, bounded, not convex, with bounded gradients."""
    return STEEPNESS * w / (1 + w * w) ** 2


def averages(steps, *, decay, noise):
    """The running mean of the squared norm of FAD's direction, without and with the noise.

    The noise is uniform, and the same in all passes of a step, which see one batch.
    """
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.linspace(-1.0, 1.5, 10, dtype=torch.float64))
    schedule = convergence_schedule(RHO_0, ETA_0)
    opt = FAD(
        torch.optim.SGD([w], lr=ETA_0), schedule.rho if decay else RHO_0, alpha=ALPHA, beta=BETA
    )
    rates = schedule.scheduler(opt) if decay else None
    clean, noisy = [], []
    for t in range(1, steps + 1):
        xi = noise * (2 * torch.rand(10, generator=generator, dtype=torch.float64) - 1)

        def closure(xi=xi):
            w.grad = gradient(w.detach()) + xi
            return w.new_zeros(())

        before = w.detach().clone()
        rho = RHO_0 / math.sqrt(t) if decay else RHO_0
        clean.append(float(reference.fad(gradient, before, rho, ALPHA, BETA).square().sum()))
        lr = opt.param_groups[0]["lr"]
        opt.step(closure)
        noisy.append(float(((before - w.detach()) / lr).square().sum()))
        if rates is not None:
            rates.step()
    counts = torch.arange(1, steps + 1)
    return [torch.tensor(values).cumsum(0) / counts for values in (clean, noisy)]


def slope(values, first, last):
    """Of a line through two points of a double-logarithmic plot."""
    return math.log(float(values[last - 1] / values[first - 1])) / math.log(last / first)


@pytest.mark.parametrize(
    "horizons", [[30, 300, 3_000], pytest.param([100, 1_000, 30_000], marks=pytest.mark.slow)]
)
def test_the_average_direction_falls_at_the_promised_rate(horizons):
    """(C1 + C2 log T) / sqrt T with noise, faster without; constant rho and eta level off."""
    first, middle, last = horizons
    clean, noisy = averages(last, decay=True, noise=0.5)
    scaled = [float(clean[T - 1]) * math.sqrt(T) / (1 + math.log(T)) for T in horizons]
    assert scaled == sorted(scaled, reverse=True)
    assert -0.9 < slope(clean, first, last) < -0.5
    # What the printed theorem says of the noisy direction cannot hold: it keeps the noise.
    variance = 10 * 0.5**2 / 3
    assert float(noisy[-1]) == pytest.approx(variance, rel=0.2)

    exact, seen = averages(middle, decay=True, noise=0.0)
    torch.testing.assert_close(seen, exact)  # the optimizer's direction is the reference's
    assert slope(exact, first, middle) < -0.6

    level, _ = averages(middle, decay=False, noise=0.5)
    assert slope(level, first, middle) > -0.1
    assert float(level[middle - 1]) > 3 * float(clean[middle - 1])


def two_groups():
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    return torch.optim.SGD(
        [{"params": params[:1], "lr": 7.0}, {"params": params[1:]}], lr=1e-5, momentum=0.9
    )


OPTIMIZERS = {
    "SGD": two_groups,
    "FAD": lambda: FAD(two_groups(), rho=convergence_schedule(0.1, 0.3).rho),
}


def step(opt):
    def closure():
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = p.detach().clone()
        return torch.zeros(())

    opt.step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rates_of_every_group_whatever_it_was_built_with(name):
    opt, schedule = OPTIMIZERS[name](), convergence_schedule(0.1, 0.3)
    rates = schedule.scheduler(opt)
    for t in range(1, 6):
        expected = 0.3 / t**0.5
        assert schedule.lr(t) == pytest.approx(expected, rel=1e-15)
        assert schedule.rho(t) == pytest.approx(0.1 / t**0.5, rel=1e-15)
        assert [group["lr"] for group in opt.param_groups] == [schedule.lr(t)] * 2
        assert rates.get_last_lr() == [schedule.lr(t)] * 2
        step(opt)
        rates.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(name):
    opt, schedule = OPTIMIZERS[name](), convergence_schedule(0.1, 0.3)
    rates = schedule.scheduler(opt)
    for _ in range(3):
        step(opt)
        rates.step()
    saved = pickle.loads(pickle.dumps((opt.state_dict(), rates.state_dict())))
    weights = [copy.deepcopy(group["params"]) for group in opt.param_groups]

    other = OPTIMIZERS[name]()
    with torch.no_grad():
        for group, values in zip(other.param_groups, weights, strict=True):
            for p, value in zip(group["params"], values, strict=True):
                p.copy_(value)
    again = schedule.scheduler(other)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert [group["lr"] for group in other.param_groups] == [schedule.lr(4)] * 2
    for _ in range(3):
        for o, r in ((opt, rates), (other, again)):
            step(o)
            r.step()
    for group, twin in zip(opt.param_groups, other.param_groups, strict=True):
        assert group["lr"] == twin["lr"] == schedule.lr(7)
        for p, q in zip(group["params"], twin["params"], strict=True):
            assert torch.equal(p, q)


def test_a_rate_that_is_a_tensor_is_filled():
    """As CUDA graphs need it: the optimizer keeps the tensor it has."""
    rate = torch.tensor(1.0)
    opt = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=rate, capturable=False, foreach=False)
    scheduler = convergence_schedule(0.1, 0.3).scheduler(opt)
    held = opt.param_groups[0]["lr"]
    step(opt)
    scheduler.step()
    assert opt.param_groups[0]["lr"] is held
    assert float(held) == pytest.approx(0.3 / 2**0.5)


def test_a_schedule_can_be_pickled():
    schedule = convergence_schedule(0.1, 0.3)
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@pytest.mark.parametrize(("rho_0", "eta_0"), [(0.0, 0.1), (0.1, -1.0), (math.inf, 0.1)])
def test_wrong_numbers(rho_0, eta_0):
    with pytest.raises(UserError, match="rho_0=|eta_0="):
        convergence_schedule(rho_0, eta_0)
