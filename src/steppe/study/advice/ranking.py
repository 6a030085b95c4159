r"""Predict how optimizers rank on a dataset from its indicators.

With $y_i$ the mean scores of the optimizers on task $i$, less their mean, $g_i$ the leads of the
optimizers in short runs, less theirs, and $x_i$ the standardized indicators,

$$y_i = b g_i + \mu + x_i B + e_i, \quad e_i \sim N(0, \Sigma), \quad
   B \sim \mathrm{MN}(0, \lambda^{-1} I, \Sigma), \quad \mu \sim N(0, \kappa^{-1} \Sigma)$$

(Minka, *Bayesian linear regression*, 2000, section 3; Gelman et al., *Bayesian Data Analysis*, 3rd
ed., section 14.8). With $\bar y, \bar x$ the weighted means, $X$ and $Y$ centered at
them, $A = X^T W X + \lambda I$ and $k = F / (F + \kappa)$,

$$y \mid x \sim t_{F - 1}\big(k \bar y + (x - \bar x) A^{-1} X^T W Y, \; s(x) \Sigma\big), \quad
   s(x) = 1 + k / F + (x - \bar x) A^{-1} (x - \bar x)^T.$$

Relatives are not independent. A family of any size counts as one task: $W$ divides by the
family's size, and $F$ is the number of families. $\Sigma$ comes from leave-one-family-out
residuals $r_i$, as the mean of $r_i r_i^T / s(x_i)$, so that it needs no degrees of freedom
of the fit. It includes the sampling error of a mean over seeds: what is predicted is what as many
seeds would measure, and not an accuracy without noise. `choose` estimates $\lambda$, and `kept`
estimates $k$.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import fmean

import numpy as np
from scipy import special

from steppe.errors import UserError, unknown

from .extent import BASELINE, GAIN, RELATIVES
from .table import Example, check

STRENGTHS = (*np.logspace(-1, 3, 13).tolist(), math.inf)
r"""Candidates for $\lambda$; infinity uses no indicators."""
CLIP = 3.0
"""Deviations beyond which an indicator's value counts as outside."""
DRAWS = 20_000
FEWEST = 3
"""Families."""
FLOOR = 1e-6
"""Squared points, added to variances."""
LEAST = 0.05
"""Smallest factor of the mean scores."""

_Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
_Codes = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class Forecast:
    """What to expect of every optimizer on a dataset.

    Attributes:
        optimizers: their names, in the order of `location` and `scale`.
        baseline: the optimizer that `mean` and `interval` are relative to.
        location: center of the predictive Student's t distribution, in points.
        scale: its scale matrix.
        freedom: its degrees of freedom.
        outside: indicators far from all tasks of the table. They were clipped.
    """

    optimizers: tuple[str, ...]
    baseline: str
    location: _Array
    scale: _Array
    freedom: int
    outside: tuple[str, ...] = ()

    @property
    def mean(self) -> dict[str, float]:
        """Expected score less the baseline's, in points."""
        base = self.location[self._at(self.baseline)]
        return dict(zip(self.optimizers, (self.location - base).tolist(), strict=True))

    def interval(self, level: float = 0.95) -> dict[str, tuple[float, float]]:
        """Central interval of the score less the baseline's, in points."""
        t = float(special.stdtrit(self.freedom, (1 + level) / 2))
        reach = {n: t * self._difference(n, self.baseline)[1] for n in self.optimizers}
        return {n: (mean - reach[n], mean + reach[n]) for n, mean in self.mean.items()}

    def pair(self, a: str, b: str) -> float:
        """Probability that `a` scores higher than `b`."""
        mean, deviation = self._difference(a, b)
        if deviation == 0:
            return 0.5
        return float(special.stdtr(self.freedom, mean / deviation))

    @cached_property
    def best(self) -> dict[str, float]:
        """Probability that an optimizer scores highest, by Monte Carlo with a fixed seed."""
        root = np.linalg.cholesky(self.scale)
        draws = self.location + _standard(len(self.optimizers), self.freedom) @ root.T
        counts = np.bincount(draws.argmax(1), minlength=len(self.optimizers))
        return dict(zip(self.optimizers, (counts / DRAWS).tolist(), strict=True))

    def _difference(self, a: str, b: str) -> tuple[float, float]:
        i, j = self._at(a), self._at(b)
        variance = self.scale[i, i] + self.scale[j, j] - 2 * self.scale[i, j]
        return float(self.location[i] - self.location[j]), math.sqrt(max(0.0, float(variance)))

    def _at(self, name: str) -> int:
        if name not in self.optimizers:
            raise UserError(unknown("optimizer", name, self.optimizers))
        return self.optimizers.index(name)


@dataclass(frozen=True, eq=False)
class Ranking:
    """A fitted model.

    Attributes:
        optimizers: what is ranked.
        indicators: what it is predicted from.
        baseline: the optimizer that forecasts are relative to.
        families: how many the model was fitted to.
        strength: of the ridge prior. Infinity: no indicator helps, and `predict` says what is best
            on average.
        errors: leave-one-family-out error of every candidate strength, relative to the error
            without indicators.
        standard: how indicators are standardized.
        slope: $b$, how much of a lead in short runs is expected to remain.
        ridge: the regression of the rest on the indicators.
        covariance: of a task's scores around their prediction, in squared points.
    """

    optimizers: tuple[str, ...]
    indicators: tuple[str, ...]
    baseline: str
    families: int
    strength: float
    errors: Mapping[float, float]
    standard: Standard
    slope: float
    ridge: Ridge
    covariance: _Array

    def predict(self, indicators: Mapping[str, float]) -> Forecast:
        """Predict a dataset from its indicators; those that were not fitted are ignored.

        Raises:
            UserError: an indicator is missing or not finite.
        """
        x, outside = self.standard(_values(indicators, self.indicators))
        mean, spread = self.ridge.predict(x[None], [self.strength])
        scale = float(spread[0, 0]) * self.covariance
        names = tuple(n for n, far in zip(self.indicators, outside, strict=True) if far)
        center = mean[0, 0]
        if self.slope:
            center = center + self.slope * leads(indicators, self.optimizers)
        return Forecast(self.optimizers, self.baseline, center, scale, self.families - 1, names)


def fit(
    examples: Sequence[Example],
    indicators: Sequence[str] | None = None,
    baseline: str = BASELINE,
    short_runs: bool = True,
) -> Ranking:
    """Fit the model to a table.

    Args:
        examples: tasks of at least three families.
        indicators: the names to use; None uses all.
        baseline: the optimizer that forecasts are relative to.
        short_runs: whether leads in short runs count directly, with one slope for all optimizers.

    Raises:
        UserError: there are fewer than three families, or a name is unknown.
    """
    check(examples, "the table of tasks")
    optimizers = tuple(examples[0].scores)
    if baseline not in optimizers:
        raise UserError(unknown("optimizer", baseline, optimizers))
    names = tuple(examples[0].indicators if indicators is None else dict.fromkeys(indicators))
    raw = np.stack([_values(example.indicators, names) for example in examples])
    families = np.unique([example.family for example in examples], return_inverse=True)[1]
    count = int(families.max()) + 1
    if count < FEWEST:
        raise UserError(f"a ranking needs tasks of at least {FEWEST} families, got {count}")
    standard = standardize(raw)
    x, y = standard(raw)[0], relative(examples)
    lead = np.zeros_like(y)
    if short_runs:
        lead = np.stack([leads(example.indicators, optimizers) for example in examples])
    residuals, spreads = left_out(x, y, families, STRENGTHS, lead)
    chosen, errors = choose(residuals, families)
    b = slope(lead, y, shares(families))
    fitted = ridge(x, y - b * lead, shares(families))
    covariance = shrunk(residuals[chosen], spreads[chosen], families)
    return Ranking(
        optimizers,
        names,
        baseline,
        count,
        STRENGTHS[chosen],
        dict(zip(STRENGTHS, errors.tolist(), strict=True)),
        standard,
        b,
        replace(fitted, keep=kept(fitted.y_mean, covariance, count)),
        covariance,
    )


def relative(examples: Sequence[Example]) -> _Array:
    """Scores averaged over seeds, less their mean over optimizers (tasks x optimizers)."""
    names = tuple(examples[0].scores)
    y = np.array([[fmean(example.scores[name]) for name in names] for example in examples])
    centered: _Array = y - y.mean(1, keepdims=True)
    return centered


def leads(indicators: Mapping[str, float], optimizers: Sequence[str]) -> _Array:
    """Each optimizer's lead in short runs, its own or its relative's, less the mean of all."""
    names = (RELATIVES.get(name, name) for name in optimizers)
    values = np.array([indicators.get(GAIN.format(name), 0.0) for name in names])
    centered: _Array = values - values.mean()
    return centered


def slope(lead: _Array, y: _Array, weights: _Array) -> float:
    """The least-squares slope of scores on leads; a negative one would be chance, and is 0."""
    squares = float(weights @ (lead**2).sum(1))
    return max(0.0, float(weights @ (lead * y).sum(1)) / squares) if squares > 0 else 0.0


@dataclass(frozen=True, eq=False)
class Standard:
    """The center and deviation of each indicator over the fitted tasks."""

    center: _Array
    deviation: _Array

    def __call__(self, values: _Array) -> tuple[_Array, _Flags]:
        """Standardized and clipped values, and which of them were outside."""
        with np.errstate(over="ignore"):  # infinity is clipped
            z = (values - self.center) / self.deviation
        return np.clip(z, -CLIP, CLIP), np.abs(z) > CLIP


def standardize(raw: _Array) -> Standard:
    """Means and deviations after moving the extreme tenth at either end to its border.

    A single unusual family therefore does not decide an indicator's unit. An indicator that is
    nearly constant takes the deviation of all values, and a constant one has no influence.
    """
    trimmed = np.clip(raw, *np.quantile(raw, [0.1, 0.9], axis=0)) if raw.size else raw
    center, tiny = trimmed.mean(0), 1e-9 * np.maximum(1e-300, np.abs(raw).max(0, initial=0))
    deviation = np.where(trimmed.std(0) > tiny, trimmed.std(0), raw.std(0))
    return Standard(center, np.where(deviation > tiny, deviation, np.maximum(tiny, 1e-300)))


@dataclass(frozen=True, eq=False)
class Ridge:
    """A ridge regression for all strengths at once, from one eigendecomposition."""

    x_mean: _Array
    y_mean: _Array
    values: _Array
    vectors: _Array
    target: _Array
    """Eigenvectors of X'WX, times X'WY."""
    weight: float
    keep: float = 1.0
    """Factor of the mean scores."""

    def predict(self, x: _Array, strengths: Sequence[float]) -> tuple[_Array, _Array]:
        """Means (strengths x tasks x optimizers), and the factors s(x) (strengths x tasks)."""
        z = (x - self.x_mean) @ self.vectors
        inverse = 1 / (self.values + np.asarray(strengths)[:, None])
        mean = self.keep * self.y_mean + (z * inverse[:, None]) @ self.target
        return mean, 1 + self.keep / self.weight + inverse @ (z**2).T


def ridge(x: _Array, y: _Array, weights: _Array) -> Ridge:
    """Regress `y` on `x`, with a weight for each task."""
    total = weights.sum()
    x_mean, y_mean = weights @ x / total, weights @ y / total
    weighted = (x - x_mean).T * weights
    values, vectors = np.linalg.eigh(weighted @ (x - x_mean))
    target = vectors.T @ weighted @ (y - y_mean)
    return Ridge(x_mean, y_mean, np.maximum(values, 0), vectors, target, float(total))


def shares(families: _Codes) -> _Array:
    """The weight of each task: one over the size of its family."""
    weights: _Array = 1 / np.bincount(families)[families]
    return weights


def left_out(
    x: _Array,
    y: _Array,
    families: _Codes,
    strengths: Sequence[float],
    lead: _Array | None = None,
) -> tuple[_Array, _Array]:
    """Leave-one-family-out residuals and factors s(x) at every strength."""
    lead = np.zeros_like(y) if lead is None else lead
    residuals = np.empty((len(strengths), *y.shape))
    spreads = np.empty((len(strengths), len(y)))
    weights = shares(families)
    for family in range(int(families.max()) + 1):
        out = families == family
        b = slope(lead[~out], y[~out], weights[~out])
        fitted = ridge(x[~out], y[~out] - b * lead[~out], weights[~out])
        mean, spreads[:, out] = fitted.predict(x[out], strengths)
        residuals[:, out] = y[out] - b * lead[out] - mean
    return residuals, spreads


def choose(residuals: _Array, families: _Codes) -> tuple[int, _Array]:
    """The index of the best strength, and the error of each relative to no indicators.

    Squared errors are divided by those without indicators, optimizer by optimizer, so that one that
    sometimes collapses does not decide. Indicators are used only if they reduce the error by more
    than one standard error over families: the minimum of many noisy errors is always tempting, and
    the best optimizer on average is the safer advice.
    """
    weights = shares(families)
    squares = residuals**2
    usual = weights @ squares[-1] / weights.sum() + FLOOR
    by_task = (squares / usual).mean(2) * weights
    by_family = np.stack([np.bincount(families, row) for row in by_task])
    errors = by_family.mean(1)
    best = int(errors.argmin())
    gains = by_family[-1] - by_family[best]
    certain = gains.mean() > gains.std(ddof=1) / math.sqrt(len(gains))
    return (best if certain else len(errors) - 1), errors


def shrunk(residuals: _Array, spreads: _Array, families: _Codes) -> _Array:
    """The covariance of residuals, with covariances shrunk to zero and variances to their mean.

    The shares are the estimated sampling variances of all entries over their squared distances from
    the target (Schaefer and Strimmer 2005, equation 8; Opgen-Rhein and Strimmer 2007), with
    families as the unit. Residuals sum to zero over optimizers, so the target is multiplied by
    m / (m - 1): the mean variance of a difference of two optimizers stays the same.
    """
    scaled = residuals / np.sqrt(spreads)[:, None]
    products = scaled[:, :, None] * scaled[:, None, :] * shares(families)[:, None, None]
    count, m = int(families.max()) + 1, residuals.shape[1]
    by_family = np.zeros((count, m, m))
    np.add.at(by_family, families, products)
    covariance: _Array = by_family.mean(0)
    noise = by_family.var(0, ddof=1) / count
    own = np.eye(m, dtype=bool)
    variances = covariance[own]
    even = _share(noise[own], variances - variances.mean())
    diagonal = np.diag((1 - even) * variances + even * variances.mean())
    apart = _share(noise[~own], covariance[~own])
    covariance[own] = diagonal[own]
    scale = m / max(1, m - 1)
    return (1 - apart) * covariance + apart * scale * diagonal + FLOOR * np.eye(m)


def _share(noise: _Array, distance: _Array) -> float:
    total = float((distance**2).sum())
    return min(1.0, float(noise.sum()) / total) if total > 0 else 1.0


def kept(y_mean: _Array, covariance: _Array, count: int) -> float:
    r"""The factor $k$ of the mean scores, $1 - 1 / T$ (Efron and Morris 1973).

    T compares the squared means with what equal optimizers would show over `count` families. The
    factor is never zero, so that the order of the means remains.
    """
    centering = np.eye(len(y_mean)) - 1 / len(y_mean)
    usual = np.diag(centering @ covariance @ centering)
    t = float((count * y_mean**2 / np.maximum(usual, FLOOR)).mean())
    return max(LEAST, 1 - 1 / t) if t > 0 else LEAST


@cache
def _standard(size: int, freedom: int) -> _Array:
    """Draws from the standard multivariate t distribution."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((DRAWS, size))
    return normal / np.sqrt(rng.chisquare(freedom, (DRAWS, 1)) / freedom)


def _values(indicators: Mapping[str, float], names: Sequence[str]) -> _Array:
    for name in names:
        if name not in indicators:
            raise UserError(unknown("indicator", name, indicators))
        if not math.isfinite(indicators[name]):
            raise UserError(f"indicator {name!r} must be finite, got {indicators[name]}")
    return np.array([indicators[name] for name in names], dtype=np.float64)
