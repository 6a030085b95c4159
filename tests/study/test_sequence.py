"""`study.sequence`: the interval is that of a Bayes factor, and holds at every look."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import integrate, stats

from steppe.study import e_value, half_width, interval


@pytest.mark.parametrize("g", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("values", [[1.0, 2.5, 0.3], [-0.2, 0.1, 0.4, -0.3, 0.2, 2.0, 1.1]])
def test_an_e_value_is_a_ratio_of_densities_of_t(values: list[float], g: float) -> None:
    """Of the noncentral t averaged over effect sizes, and of Student's."""
    n = len(values)
    t = math.sqrt(n) * np.mean(values) / np.std(values, ddof=1)
    size = stats.norm(0, math.sqrt(g))

    def density(effect: float) -> float:
        return float(stats.nct.pdf(t, n - 1, math.sqrt(n) * effect) * size.pdf(effect))

    averaged = integrate.quad(density, -8 * math.sqrt(g), 8 * math.sqrt(g), limit=400)[0]
    assert e_value(values, g=g) == pytest.approx(averaged / stats.t.pdf(t, n - 1), rel=1e-5)


@given(
    st.lists(st.floats(-20, 20), min_size=2, max_size=30),
    st.sampled_from([0.05, 0.01]),
    st.floats(-25, 25),
)
def test_the_interval_has_the_means_that_e_values_do_not_reject(
    values: list[float], alpha: float, mean: float
) -> None:
    found = interval(values, alpha)
    if min(abs(mean - found.low), abs(mean - found.high)) > 1e-6 and found.spread > 1e-6:
        assert (found.low < mean < found.high) == (e_value(values, mean) < 1 / alpha)


def test_nothing_is_known_from_equal_differences() -> None:
    assert interval([1.0] * 50, 0.05).low == -math.inf
    assert half_width(1, 0.05) == half_width(3, 0.05) == math.inf


def test_it_holds_at_every_look() -> None:
    """A fixed-n interval, looked at as often, would exclude the true mean in a third of studies."""
    rng, studies, most = np.random.default_rng(1), 4000, 60
    draws = rng.normal(2.0, 3.0, (studies, most))
    missed, usual = np.zeros(studies, bool), np.zeros(studies, bool)
    for n in range(3, most + 1):
        distance = np.abs(draws[:, :n].mean(axis=1) - 2.0) / draws[:, :n].std(axis=1, ddof=1)
        missed |= distance > half_width(n, 0.05)
        usual |= distance > stats.t.ppf(0.975, n - 1) / math.sqrt(n)
    assert 0.015 < missed.mean() < 0.035
    assert usual.mean() > 0.3
