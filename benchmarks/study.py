"""Error rates, power and seeds of a study's intervals, compared with two other designs, simulated.

A study looks after every seed and stops when a claim is decided. "Five looks" is the design of
O'Brien and Fleming with its looks fixed beforehand; "usual" is Student's interval, looked at after
every seed. Differences between seeds are normal with a standard deviation of one point.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import numpy as np
from harness import Options as Base, Result, command, option
from scipy import stats

from steppe.study import half_width
from steppe.study.sequence import first_look

LOOKS = 5
EFFECTS = (0.0, 0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True, kw_only=True)
class Options(Base):
    studies: int = option(4000, "Simulated studies.", min=100)
    seeds: int = option(60, "Most seeds of a study.", min=10)
    claims: int = option(1, "Claims that share the error rate.", min=1)
    alpha: float = option(0.05, "Error rate of all claims together.")
    smallest: float = option(1.0, "Smallest effect that matters, in standard deviations.")
    collapses: float = option(
        0.0, "Share of differences lowered by ten standard deviations; their mean stays."
    )


def designs(options: Options) -> dict[str, tuple[list[int], Callable[[int], float]]]:
    """For each design: its looks, and half of its interval's width in standard deviations."""
    most, level = options.seeds, options.alpha / options.claims
    fixed = [round(most * k / LOOKS) for k in range(1, LOOKS + 1)]
    return {
        "steppe study": (
            list(range(first_look(level), most + 1)),
            partial(half_width, alpha=level),
        ),
        "five looks": (fixed, partial(_obrien_fleming, fixed, level)),
        "usual": (
            list(range(3, most + 1)),
            lambda n: float(stats.t.ppf(1 - level / 2, n - 1)) / n**0.5,
        ),
    }


def _obrien_fleming(looks: list[int], level: float, n: int) -> float:
    """The boundary for normal differences, as a nominal level of Student's t at every look."""
    shares = np.array(looks) / looks[-1]
    steps = np.random.default_rng(0).normal(
        0, np.sqrt(np.diff(shares, prepend=0)), (400_000, LOOKS)
    )
    constant = np.quantile(np.abs(steps.cumsum(axis=1)).max(axis=1), 1 - level)
    nominal = 2 * stats.norm.sf(constant / np.sqrt(n / looks[-1]))
    return float(stats.t.ppf(1 - nominal / 2, n - 1) / n**0.5)


def simulate(
    options: Options, looks: list[int], width: Callable[[int], float], effect: float
) -> dict[str, Any]:
    """Shares of wrong and right verdicts, and the seeds at which right ones came."""
    rng = np.random.default_rng(1)
    draws = rng.normal(effect, 1, (options.studies, options.seeds))
    if options.collapses:
        draws += 10 * (options.collapses - (rng.random(draws.shape) < options.collapses))
    undecided = np.ones(options.studies, bool)
    right, wrong = [], 0
    for n in looks:
        part = draws[:, :n]
        mean, reach = part.mean(axis=1), width(n) * part.std(axis=1, ddof=1)
        same = (mean - reach > -options.smallest) & (mean + reach < options.smallest)
        up, down = (~same & (sign * mean > reach) for sign in (1, -1))
        # The true verdicts: more than zero is better; less than the smallest effect is equivalent.
        good = (same if effect < options.smallest else False) | (up if effect > 0 else False)
        ended = undecided & (same | up | down)
        right += [n] * int((ended & good).sum())
        wrong += int((ended & ~good).sum())
        undecided &= ~ended
    right.sort()
    at = round(0.8 * options.studies) - 1
    return {
        "wrong %": round(100 * wrong / options.studies, 2),
        "right %": round(100 * len(right) / options.studies, 2),
        "seeds, mean": round(
            statistics.fmean([*right, *[options.seeds] * (options.studies - len(right))]), 1
        ),
        "seeds for 80%": right[at] if at < len(right) else None,
    }


def measure(options: Options) -> Result:
    found: Result = {
        "studies": options.studies,
        "most seeds": options.seeds,
        "claims": options.claims,
        "alpha": options.alpha,
        "smallest effect": options.smallest,
        "collapses": options.collapses,
    }
    for name, (looks, width) in harness.track(designs(options).items(), "designs"):
        widths = {n: width(n) for n in looks}
        found[name] = {
            f"effect {effect:g}": simulate(options, looks, widths.__getitem__, effect)
            for effect in EFFECTS
        }
    return found


main = command(Options, measure)
