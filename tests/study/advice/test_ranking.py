"""`study.advice.ranking`: against explicit formulas, and on tasks whose truth is known."""

import math
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from steppe.errors import UserError
from steppe.study.advice import ranking
from steppe.study.advice.extent import GAIN
from steppe.study.advice.ranking import (
    CLIP,
    Forecast,
    fit,
    leads,
    left_out,
    relative,
    ridge,
    shares,
    shrunk,
    slope,
)
from steppe.study.advice.table import Example
from tests.study.advice.simulated import NAMES, table

FAMILIES = np.array([0, 0, 0, 1, 2, 2, 3, 3, 3, 4])


def test_the_regression_is_the_posterior_of_its_model() -> None:
    """Against conditioning the joint normal of all tasks and a new one, written out in full."""
    rng = np.random.default_rng(0)
    x, y, new = rng.normal(size=(10, 3)), rng.normal(size=(10, 4)), rng.normal(size=(1, 3))
    weights, strength, kappa = shares(FAMILIES), 0.7, 0.3
    fitted = replace(ridge(x, y, weights), keep=5 / (5 + kappa))
    mean, spread = fitted.predict(new, [strength])
    # The prior on mu is on the mean at x_mean, where the intercept and B are independent.
    design = np.column_stack([np.ones(11), np.vstack([x, new]) - weights @ x / weights.sum()])
    prior = np.diag([1 / kappa, *[1 / strength] * 3])
    joint = design @ prior @ design.T + np.diag([*1 / weights, 1.0])
    known = joint[10:, :10] @ np.linalg.inv(joint[:10, :10])
    np.testing.assert_allclose(mean[0], known @ y, rtol=1e-9)
    np.testing.assert_allclose(spread[0], joint[10, 10] - known @ joint[:10, 10], rtol=1e-9)


def test_shrinking_a_covariance_keeps_the_variance_of_differences() -> None:
    rng = np.random.default_rng(0)
    raw = rng.normal(size=(10, 4)) @ rng.normal(size=(4, 4))
    residuals = raw - raw.mean(1, keepdims=True)
    spreads = rng.uniform(1, 2, size=10)
    weights = shares(FAMILIES) / 5 / spreads
    expected = sum(w * np.outer(r, r) for w, r in zip(weights, residuals, strict=True))
    found = shrunk(residuals, spreads, FAMILIES)

    def differences(covariance: np.ndarray) -> float:
        variances = np.diag(covariance)
        return float((variances[:, None] + variances - 2 * covariance).sum())

    assert differences(found) == pytest.approx(differences(expected), rel=1e-4)
    off = ~np.eye(4, dtype=bool)
    ratio = found[off] / expected[off]
    assert 0 < ratio[0] < 1
    assert ratio == pytest.approx(ratio[0])
    assert np.ptp(np.diag(found)) < np.ptp(np.diag(expected))
    assert np.linalg.eigvalsh(found).min() > 0


@pytest.mark.parametrize("strength", [0.5, 20.0, math.inf])
def test_leaving_out_a_family_is_fitting_without_it(strength: float) -> None:
    """Against normal equations with one pseudo-observation for each coefficient."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(10, 3)), rng.normal(size=(10, 4))
    residuals, _ = left_out(x, y, FAMILIES, [strength])
    for family in range(5):
        rest = family != FAMILIES
        root = np.sqrt(shares(FAMILIES)[rest])[:, None]
        design = np.column_stack([np.ones(rest.sum()), x[rest]]) * root
        penalty = np.diag([0.0, *[min(strength, 1e12)] * 3])
        b = np.linalg.solve(design.T @ design + penalty, design.T @ (y[rest] * root))
        out = ~rest
        expected = y[out] - np.column_stack([np.ones(out.sum()), x[out]]) @ b
        np.testing.assert_allclose(residuals[0, out], expected, atol=1e-8)


def test_without_indicators_it_predicts_the_shrunk_mean_over_families() -> None:
    examples = table(0, 0)
    model = fit(examples, indicators=())
    assert model.strength == math.inf
    y = relative(examples).reshape(11, 4, 5).mean((0, 1))
    keep = model.ridge.keep
    assert ranking.LEAST <= keep < 1
    found = model.predict({})
    assert list(found.mean.values()) == pytest.approx(keep * (y - y[0]))
    infinite = replace(fit(examples), strength=math.inf).predict(examples[0].indicators)
    assert infinite.mean == pytest.approx(found.mean)


def test_probabilities_are_those_of_the_predictive_distribution() -> None:
    root = np.random.default_rng(2).normal(size=(3, 3))
    found = Forecast(("adamw", "sam", "fad"), "adamw", np.array([0.0, 0.5, 0.2]), root @ root.T, 10)
    t = stats.multivariate_t(found.location, found.scale, df=10, seed=1)
    draws = t.rvs(100_000)
    best = np.bincount(draws.argmax(1), minlength=3) / len(draws)
    assert list(found.best.values()) == pytest.approx(best, abs=0.015)  # four standard errors
    assert sum(found.best.values()) == pytest.approx(1)
    assert found.pair("sam", "fad") == pytest.approx(np.mean(draws[:, 1] > draws[:, 2]), abs=0.01)
    assert found.pair("sam", "fad") + found.pair("fad", "sam") == pytest.approx(1)
    assert found.pair("sam", "sam") == 0.5
    low, high = np.quantile(draws[:, 1] - draws[:, 0], [0.1, 0.9])
    assert found.interval(0.8)["sam"] == pytest.approx((low, high), abs=0.05)
    assert found.interval(0.8)["adamw"] == (0, 0)


def test_intervals_cover_new_families_and_indicators_are_used() -> None:
    covered, errors, usual = [], [], []
    for seed in range(15):
        model = fit(table(1.5, seed))
        plain = fit(table(1.5, seed), indicators=())
        for new in table(1.5, 100 + seed, families=10, relatives=1):
            truth = {n: np.mean(s) - np.mean(new.scores["adamw"]) for n, s in new.scores.items()}
            found = model.predict(new.indicators)
            reach = found.interval(0.8)
            covered += [reach[n][0] < truth[n] < reach[n][1] for n in NAMES[1:]]
            errors += [(found.mean[n] - truth[n]) ** 2 for n in NAMES[1:]]
            usual += [(plain.predict({}).mean[n] - truth[n]) ** 2 for n in NAMES[1:]]
    assert 0.75 < np.mean(covered) < 0.9
    assert np.mean(errors) < 0.75 * np.mean(usual)


def test_indicators_that_predict_nothing_are_not_used() -> None:
    infinite = [math.isinf(fit(table(0, seed)).strength) for seed in range(40)]
    assert np.mean(infinite) > 0.7
    used = [math.isfinite(fit(table(2, seed)).strength) for seed in range(40)]
    assert np.mean(used) > 0.9


def test_far_values_are_clipped_and_reported() -> None:
    examples = [replace(e, indicators={**e.indicators, "flat": 2.0}) for e in table(2, 0)]
    model = fit(examples)
    near = {**examples[0].indicators, "x0": 0.0}
    assert "x0" not in model.predict(near).outside
    edge = float(model.standard.center[0] + CLIP * model.standard.deviation[0])
    far = model.predict({**near, "x0": 1e308})
    assert "x0" in far.outside
    assert far.mean == pytest.approx(model.predict({**near, "x0": edge}).mean)
    assert "flat" in model.predict({**near, "flat": 3.0}).outside
    assert "flat" not in model.predict(near).outside


def test_units_and_order_do_not_matter() -> None:
    examples = table(2, 3)
    other = [
        replace(e, indicators={n: 1e6 * v - 3 for n, v in e.indicators.items()})
        for e in examples[::-1]
    ]
    first, second = fit(examples), fit(other)
    found = second.predict(other[0].indicators)
    assert found.mean == pytest.approx(first.predict(examples[-1].indicators).mean)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(UserError, match="at least 3 families, got 2"):
        fit(table(0, 0, families=2))
    with pytest.raises(UserError, match="unknown indicator 'x99'"):
        fit(table(0, 0), ["x99"])
    with pytest.raises(UserError, match="unknown optimizer 'lion'"):
        fit(table(0, 0), baseline="lion")
    model = fit(table(0, 0))
    with pytest.raises(UserError, match="unknown indicator 'x0'"):
        model.predict({})
    with pytest.raises(UserError, match="'x0' must be finite"):
        model.predict({**table(0, 0)[0].indicators, "x0": math.nan})
    with pytest.raises(UserError, match="unknown optimizer 'lion'"):
        model.predict(table(0, 0)[0].indicators).pair("adamw", "lion")


def test_equal_optimizers_are_forecast_to_be_equal() -> None:
    same = [replace(e, scores=dict.fromkeys(NAMES, (50.0, 51.0))) for e in table(0, 0)]
    found = fit(same).predict(same[0].indicators)
    assert set(found.mean.values()) == {0.0}
    assert list(found.best.values()) == pytest.approx([0.2] * 5, abs=0.02)


def with_leads(examples: list[Example], factor: float, seed: int = 0) -> list[Example]:
    """Examples whose short runs show `factor` times the lead of sgd, sam and fad over adamw."""
    rng, found = np.random.default_rng(seed), []
    for one in examples:
        mean = {name: fmean(scores) for name, scores in one.scores.items()}
        own = {
            GAIN.format(name): factor * (mean[name] - mean["adamw"]) + rng.normal(0, 0.1)
            for name in ("sgd", "sam", "fad")
        }
        found.append(replace(one, indicators={**one.indicators, **own}))
    return found


def test_leads_in_short_runs_count_with_one_slope() -> None:
    examples = with_leads(table(0, 0, names=("adamw", "sgd", "sam", "fad")), factor=2.0)
    model = fit(examples, indicators=())
    # The obvious computation: every optimizer's lead and score, less their means, in one line.
    names = model.optimizers
    x = np.array([[e.indicators.get(GAIN.format(n), 0.0) for n in names] for e in examples])
    x, y = x - x.mean(1, keepdims=True), relative(examples)
    assert model.slope == pytest.approx(float((x * y).sum() / (x * x).sum()), rel=1e-9)
    assert model.slope == pytest.approx(0.5, rel=0.05)
    found = model.predict({GAIN.format("sgd"): 8.0, GAIN.format("sam"): 0.0}).mean
    usual = model.predict({}).mean
    assert found["sgd"] - usual["sgd"] == pytest.approx(8 * model.slope)
    assert found["sam"] - usual["sam"] == pytest.approx(0, abs=1e-9)
    assert fit(examples, indicators=(), short_runs=False).slope == 0


def test_an_optimizer_without_short_runs_follows_its_relative() -> None:
    values = {GAIN.format("sam"): 3.0, GAIN.format("fad"): 6.0}
    found = leads(values, ("adamw", "adam", "sam", "sagm", "gam"))
    np.testing.assert_allclose(found, np.array([0, 0, 3, 3, 6]) - 12 / 5)


def test_leads_that_mislead_are_ignored() -> None:
    assert fit(with_leads(table(0, 0), factor=-2.0), indicators=()).slope == 0


def test_the_slope_is_fitted_without_the_family_that_is_left_out() -> None:
    """One family alone has huge opposite leads, which must not decide its own forecast."""
    examples = with_leads(table(0, 0), factor=1.0)
    y, families = relative(examples), np.repeat(np.arange(11), 4)
    lead = np.stack([leads(e.indicators, tuple(e.scores)) for e in examples])
    lead[:4] = -50 * y[:4]
    nothing = np.zeros((len(y), 0))
    residuals, _ = left_out(nothing, y, families, [math.inf], lead)
    b = slope(lead[4:], y[4:], shares(families[4:]))
    assert b > 0.5
    mean = (y - b * lead)[4:].mean(0)
    np.testing.assert_allclose(residuals[0, :4], y[:4] - b * lead[:4] - mean, atol=1e-9)
