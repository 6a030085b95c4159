"""The schedules of Theorem 3.2, and the rate they promise."""

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from steppe.optim import FAD, InverseSqrt
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
    rho = InverseSqrt(RHO_0) if decay else RHO_0
    opt = FAD(torch.optim.SGD([w], lr=ETA_0), rho, alpha=ALPHA, beta=BETA)
    rates = LambdaLR(opt, lambda step: (step + 1) ** -0.5) if decay else None
    clean, noisy = [], []
    for t in range(1, steps + 1):
        xi = noise * (2 * torch.rand(10, generator=generator, dtype=torch.float64) - 1)

        def closure(xi=xi):
            w.grad = gradient(w.detach()) + xi
            return w.new_zeros(())

        before = w.detach().clone()
        radius, lr = (RHO_0 / math.sqrt(t), ETA_0 / math.sqrt(t)) if decay else (RHO_0, ETA_0)
        clean.append(float(reference.fad(gradient, before, radius, ALPHA, BETA).square().sum()))
        assert opt.param_groups[0]["lr"] == pytest.approx(lr, rel=1e-12)
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
