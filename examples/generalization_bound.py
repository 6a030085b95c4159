"""The generalization bound of the paper's Proposition 3.1, term by term, and how loose it is.

python examples/generalization_bound.py --loss 0.1 --flatness 0.05 --rho 0.1 --n 8000 --d 23500000
    --weight_norm 90 --M 1
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from steppe.errors import UserError


@dataclass(frozen=True)
class Bound:
    r"""The right-hand side of Proposition 3.1.

    Attributes:
        loss: the empirical loss on the training set.
        flatness: $R^{\mathrm{FAD}}_{\rho, \alpha}$.
        discrepancy: distance between the training and test distributions; None if unknown.
        tail: $M / \sqrt n$, for noise outside the ball.
        complexity: the square-root term, of PAC-Bayes type.
        M: upper bound on the loss of an image.
        n: images in the training set.
        d: parameters.
        rho: the radius.
        weight_norm: the Euclidean norm of all weights.
        delta: the bound holds with probability $1 - \delta$ over training sets.
    """

    loss: float
    flatness: float
    discrepancy: float | None
    tail: float
    complexity: float
    M: float
    n: int
    d: int
    rho: float
    weight_norm: float
    delta: float

    @property
    def known(self) -> float:
        """The sum of all known terms: without the discrepancy if that is unknown."""
        return math.fsum(
            [self.loss, self.flatness, self.discrepancy or 0.0, self.tail, self.complexity]
        )

    @property
    def total(self) -> float | None:
        """The bound; None if the discrepancy is unknown."""
        return None if self.discrepancy is None else self.known

    @property
    def is_vacuous(self) -> bool:
        """Whether the bound reaches `M`, which the loss never exceeds anyway.

        Includes the factor `M` that the complexity term needs if `M` exceeds 1, which the paper
        omits.
        """
        return self._counted >= self.M

    @property
    def _counted(self) -> float:
        """The known terms, including that factor."""
        return self.known + (_factor(self.M) - 1) * self.complexity

    @property
    def noise(self) -> float:
        """The standard deviation of the weight noise under which the bound holds."""
        return _noise(self.rho, self.n, self.d)

    @property
    def images_needed(self) -> int:
        """The smallest training set for which the complexity term alone is below `M`."""

        def is_enough(n: int) -> bool:
            term = _complexity(self.rho, n, self.d, self.weight_norm, self.delta)
            return _factor(self.M) * term < self.M

        few, enough = 1, 2
        while not is_enough(enough):
            few, enough = enough, 2 * enough
        while enough - few > 1:  # the term falls with n
            middle = (few + enough) // 2
            few, enough = (few, middle) if is_enough(middle) else (middle, enough)
        return enough

    @property
    def statement(self) -> str:
        """Describe how loose the bound is."""
        ratio = _factor(self.M) * self.complexity / self.M
        verdict = (
            "The bound is vacuous: its known terms reach or exceed the largest possible loss"
            if self.is_vacuous
            else "The known terms are below the largest possible loss"
        )
        scale = (
            "so as printed it is right for M <= 1, as here."
            if self.M <= 1
            else f"so as printed it is right for M <= 1 only; for M = {self.M:g} it should be "
            f"{self.M:g} times as large, {self.M * self.complexity:.3g}, which is used here."
        )
        images = f"{float(f'{self.images_needed:.2g}'):,.0f}"
        size = (
            f"it is below M for training sets of about {images} images or more"
            if self.images_needed <= self.n
            else f"to fall below M, it would need about {images} images instead of "
            f"{self.n:,}, all else equal"
        )
        unknown = (
            " The discrepancy between training and test domains adds to this and cannot be "
            "measured without the test domain."
            if self.discrepancy is None
            else ""
        )
        return (
            f"{verdict} ({self._counted:.3g} against M = {self.M:g}).{unknown} "
            f"The complexity term carries no factor M, {scale} "
            f"Alone it is {ratio:.3g} times M; {size}. "
            "The proposition assumes a loss that is bounded, symmetric and obeys the triangle "
            "inequality; cross-entropy satisfies none of these. The bound is on the mean test loss "
            f"under Gaussian noise on the weights (standard deviation {self.noise:.3g} each), not "
            "on the test loss of the model itself."
        )

    def __str__(self) -> str:
        terms = [
            f"{self.loss:.4g} (empirical loss)",
            f"{self.flatness:.4g} (flatness)",
            "discrepancy" if self.discrepancy is None else f"{self.discrepancy:.4g} (discrepancy)",
            f"{self.tail:.4g} (M / sqrt n)",
            f"{self.complexity:.4g} (complexity)",
        ]
        rest = " + discrepancy" if self.discrepancy is None else ""
        return f"test loss <= {' + '.join(terms)} = {self.known:.4g}{rest}"


def ood_bound(
    *,
    loss: float,
    flatness: float,
    rho: float,
    n: int,
    d: int,
    weight_norm: float,
    M: float,
    delta: float = 0.05,
    discrepancy: float | None = None,
) -> Bound:
    r"""Compute the right-hand side of Proposition 3.1.

    With probability at least $1 - \delta$ over training sets of $n$ images,

    $$\mathbb{E}_{\epsilon} \mathcal{E}_{\mathrm{test}}(\theta + \epsilon) \le
    \hat{\mathcal{E}}(\theta) + R^{\mathrm{FAD}}_{\rho, \alpha}(\theta) + \mathrm{disc} +
    \frac{M}{\sqrt n} + \sqrt{\frac{\frac{d}{4} \log\left(1 + \frac{\|\theta\|^2}{d
    \sigma^2}\right) + \frac14 + \log \frac{n}{\delta} + 2 \log(6n + 3d)}{n - 1}}$$

    where $\epsilon$ has independent normal entries with standard deviation
    $\sigma = \rho / (\sqrt d + \sqrt{\log n})$. For a deep network the last term is far larger than
    any loss; `Bound.statement` says by how much.

    Args:
        loss: the empirical loss, from 0 to `M`.
        flatness: `Flatness.fad`, measured with the same `rho`.
        rho: the radius.
        n: number of training images.
        d: number of parameters.
        weight_norm: the Euclidean norm of all weights.
        M: the largest possible loss of an image.
        delta: the probability that the bound fails.
        discrepancy: distance between the training and test distributions: the largest difference
            in the mean disagreement of two models. None keeps it symbolic.

    Examples:
        >>> bound = ood_bound(
        ...     loss=0.1, flatness=0.05, rho=0.1, n=8_000, d=23_500_000, weight_norm=100.0, M=1.0
        ... )
        >>> print(bound)
        test loss <= 0.1 (empirical loss) + 0.05 (flatness) + discrepancy + 0.01118 (M / sqrt n)
        + 100.7 (complexity) = 100.9 + discrepancy
        >>> bound.is_vacuous
        True
    """
    for name, least, value in (
        ("loss", 0, loss),
        ("flatness", 0, flatness),
        ("weight_norm", 0, weight_norm),
        ("discrepancy", 0, discrepancy or 0.0),
        ("n", 2, n),
        ("d", 1, d),
    ):
        if not least <= value < math.inf:
            raise UserError(f"{name} must be finite and at least {least}, got {value}")
    for name, positive in (("rho", rho), ("M", M)):
        if not 0 < positive < math.inf:
            raise UserError(f"{name} must be positive and finite, got {positive}")
    if not 0 < delta < 1:
        raise UserError(f"delta must be between 0 and 1, got {delta}")
    if loss > M:
        raise UserError(
            f"loss={loss} exceeds M={M}, which must be the largest possible loss of an image: "
            "pass a larger M"
        )
    return Bound(
        loss=loss,
        flatness=flatness,
        discrepancy=discrepancy,
        tail=M / math.sqrt(n),
        complexity=_complexity(rho, n, d, weight_norm, delta),
        M=M,
        n=n,
        d=d,
        rho=rho,
        weight_norm=weight_norm,
        delta=delta,
    )


def _factor(M: float) -> float:
    """Return the factor of the complexity term, which is derived for losses up to 1."""
    return max(1.0, M)


def _noise(rho: float, n: int, d: int) -> float:
    """Return the standard deviation at which noise leaves the ball 1 in sqrt n times."""
    return rho / (math.sqrt(d) + math.sqrt(math.log(n)))


def _complexity(rho: float, n: int, d: int, weight_norm: float, delta: float) -> float:
    signal = (weight_norm / _noise(rho, n, d)) ** 2 / d
    return math.sqrt(
        (d / 4 * math.log1p(signal) + 0.25 + math.log(n / delta) + 2 * math.log(6 * n + 3 * d))
        / (n - 1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The bound of Proposition 3.1.")
    for name in ("loss", "flatness", "rho", "weight_norm", "M"):
        parser.add_argument(f"--{name}", type=float, required=True)
    for name in ("n", "d"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--delta", type=float, default=0.05)
    parser.add_argument("--discrepancy", type=float)
    bound = ood_bound(**vars(parser.parse_args()))
    print(bound)
    print(bound.statement)


if __name__ == "__main__":
    main()
