"""Results and progress of the solvers as plain numbers, so that reading records needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from steppe.errors import UserError


def working(default: Any) -> Any:
    """A field about how a result was computed: neither compared nor stored with a run."""
    return field(default=default, compare=False)


@dataclass(frozen=True)
class Progress:
    """The progress of a solver.

    Attributes:
        share: the fraction done, from 0 to 1; an estimate if the end is unknown.
        products: number of vectors multiplied so far.
        note: a description for users.
    """

    share: float
    products: int
    note: str


Report = Callable[[Progress], None]
"""A callback for progress."""


@dataclass(frozen=True)
class Trace:
    """An unbiased estimate of a trace.

    Attributes:
        value: the estimate.
        stderr: its standard error, at least that of rounding; 0 if the trace was computed exactly.
        low: lower end of the 95% confidence interval.
        high: upper end of the 95% confidence interval.
        samples: number of random vectors.
        rtol: the requested standard error, relative to the trace.
        converged: whether the standard error reached `rtol`.
        products: number of vectors multiplied.
    """

    value: float
    stderr: float
    low: float
    high: float
    samples: int
    rtol: float
    converged: bool
    products: int = working(0)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The confidence interval, from Student's t distribution."""
        return student_interval(self.value, self.stderr, self.samples, confidence)


@dataclass(frozen=True)
class Flatness:
    r"""How flat the loss is around the weights; smaller is flatter.

    Attributes:
        rho: the radius.
        alpha: the share of zeroth-order flatness in `fad`.
        zeroth: $R^0_\rho = \max_{\|e\| \le \rho} L(\theta + e) - L(\theta)$ (Def. 3.1).
        first: $R^1_\rho = \rho \max_{\|e\| \le \rho} \|\nabla L(\theta + e)\|$ (Def. 3.2).
        fad: $\alpha R^0_\rho + (1 - \alpha) R^1_\rho$ (Eq. 3).
        zeroth_one_step: $L(\theta_1) - L(\theta)$ at SAM's point
            $\theta_1 = \theta + \rho\, \hat g_0$ instead of the maximum.
        first_one_step: $\rho \|\nabla L(\theta_2)\|$ at FAD's point
            $\theta_2 = \theta + \rho\, \hat h_0$, with $h_0 = \nabla L(\theta_1) - g_0$, instead of
            the maximum.
        fad_one_step: Eq. 3 with the one-step values.
        lambda_max: the largest eigenvalue that `fad` implies by Eq. 4, which holds at the minimum
            of a quadratic.
        converged: whether the ascents that found `zeroth` and `first` converged within `steps`.
        passes: number of passes over the data.
        loss: $L(\theta)$.
        gradient_norm: $\|\nabla L(\theta)\|$.
        zeroth_starts: the value that each ascent reached: from $\theta_1$, then from random points.
            If they disagree, more restarts may find a higher value.
        first_starts: the same, from $\theta_2$, from the point of `zeroth`, then from random
            points.
    """

    rho: float
    alpha: float
    zeroth: float
    first: float
    fad: float
    zeroth_one_step: float
    first_one_step: float
    fad_one_step: float
    lambda_max: float
    converged: bool
    passes: int
    loss: float = working(math.nan)
    gradient_norm: float = working(math.nan)
    zeroth_starts: tuple[float, ...] = working(())
    first_starts: tuple[float, ...] = working(())


def lambda_max_from_flatness(value: float, rho: float, alpha: float) -> float:
    r"""The largest eigenvalue of the Hessian at a minimum, from the flatness there (Eq. 4).

    $$\lambda_{\max} = \frac{R}{\rho^2 (1 - \alpha / 2)}$$

    Valid if the loss is quadratic within the radius and the gradient vanishes.

    Args:
        value: `fad`; pass `zeroth` with `alpha=1`, or `first` with `alpha=0`.
        rho: the radius used to measure it.
        alpha: the share of zeroth-order flatness in it.

    Examples:
        >>> lambda_max_from_flatness(0.75, rho=0.5, alpha=0.5)
        4.0
    """
    check_ball(rho, alpha)
    return value / (rho**2 * (1 - alpha / 2))


def check_ball(rho: float, alpha: float) -> None:
    """Raise an error for a radius or share outside the domain of Eq. 3."""
    if not 0 < rho < math.inf:
        raise UserError(f"rho must be positive and finite, got {rho}")
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha must be from 0 to 1, got {alpha}")


def student_interval(
    value: float, stderr: float, samples: int, confidence: float = 0.95
) -> tuple[float, float]:
    """The confidence interval of a mean of `samples` values."""
    if not 0 < confidence < 1:
        raise UserError(f"confidence must be between 0 and 1, got {confidence}")
    if not stderr:
        return value, value
    width = student_quantile((1 + confidence) / 2, samples - 1) * stderr
    return value - width, value + width


def student_quantile(p: float, degrees: int) -> float:
    """A quantile of Student's t distribution, by expansion around the normal quantile.

    Abramowitz and Stegun, 26.7.5: within 0.1% for nine or more degrees of freedom.

    Examples:
        >>> round(student_quantile(0.975, 9), 2)
        2.26
    """
    x = NormalDist().inv_cdf(p)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + math.fsum(term / degrees ** (i + 1) for i, term in enumerate(terms))
