"""What a way of choosing an optimizer loses, on tasks of families that it has not seen.

The regret of a choice is the best optimizer's score less the chosen one's. The highest of several
noisy means is too high, so that regrets would be positive even if all optimizers were equal. They
are cross-fitted: one half of the seeds says which optimizer is best, the other half scores it
against the choice; both ways, and averaged over many splits. The best optimizer of half the seeds
is at most as good as the truly best one, so that a cross-fitted regret is a lower bound of the
true regret in expectation.

Relatives are not independent: all intervals have the family as the unit. Fits that leave out
different families share most of their tasks, which the intervals neglect.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Literal

import numpy as np
from scipy import special

from steppe.errors import UserError

from .table import Example, check

SPLITS = 252
"""Halves of the seeds; all of them for 10 seeds."""

Choice = Mapping[str, float]
"""Optimizers and the probability of choosing them."""
Chooser = Callable[[Mapping[str, float]], Choice]
"""From a task's indicators: a chooser never sees the scores of a task that it chooses for."""
Strategy = Callable[[Sequence[Example]], Chooser]
"""Fits a chooser to tasks."""
Group = Literal["family", "base"]

_Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
_Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True)
class Estimate:
    """A mean over families, and its interval by Student's t; unbounded for a single family."""

    mean: float
    low: float
    high: float
    families: int


def folds(
    examples: Sequence[Example], by: Group = "family"
) -> list[tuple[list[Example], list[Example]]]:
    """For each group, the tasks to fit to and the tasks held out.

    Relatives of a held-out task are never fitted, even those with images of another base.
    """
    found = []
    for group in dict.fromkeys(getattr(example, by) for example in examples):
        out = [example for example in examples if getattr(example, by) == group]
        relatives = {example.family for example in out}
        kept = [e for e in examples if getattr(e, by) != group and e.family not in relatives]
        found.append((kept, out))
    return found


def held_out(
    examples: Sequence[Example], choose: Strategy, by: Group = "family"
) -> dict[str, Choice]:
    """What a strategy chooses for each task when it is fitted to all other groups."""
    check(examples, "the table of tasks")
    chosen: dict[str, Choice] = {}
    for kept, out in folds(examples, by):
        chooser = choose(kept)
        chosen |= {example.task: chooser(example.indicators) for example in out}
    return chosen


def regrets(example: Example) -> dict[str, float]:
    """The cross-fitted regret of choosing each optimizer, in points."""
    scores = np.array(list(example.scores.values())).T
    one = halves(len(scores))
    first = one @ scores / one.sum(1, keepdims=True)
    second = ~one @ scores / (~one).sum(1, keepdims=True)
    # A tie for the best is broken by averaging, not by the order of names.
    best = first >= first.max(1, keepdims=True) - 1e-9
    best_score = (second * best).sum(1) / best.sum(1)
    return dict(zip(example.scores, (best_score[:, None] - second).mean(0).tolist(), strict=True))


@cache
def halves(seeds: int) -> _Flags:
    """The halves of the seeds that say what is best, as rows; every other row is a complement.

    They are all halves, or a fixed sample of them if there are too many.
    """
    if seeds < 2:
        raise UserError("cross-fitting needs at least 2 seeds per optimizer, got 1")
    if math.comb(seeds, seeds // 2) <= SPLITS:
        every = list(itertools.combinations(range(seeds), seeds // 2))
    else:
        rng = np.random.default_rng(0)
        every = [tuple(rng.permutation(seeds)[: seeds // 2]) for _ in range(SPLITS // 2)]
    flags = np.zeros((len(every), seeds), dtype=bool)
    for row, half in zip(flags, every, strict=True):
        row[list(half)] = True
    both: _Flags = np.stack([flags, ~flags], 1).reshape(-1, seeds)
    return both


def losses(examples: Sequence[Example], choices: Mapping[str, Choice]) -> dict[str, float]:
    """The regret of each task's choice, in points; expected over a choice by chance."""
    found = {}
    for example in examples:
        regret = regrets(example)
        chosen = choices[example.task]
        found[example.task] = math.fsum(share * regret[name] for name, share in chosen.items())
    return found


def estimate(
    examples: Sequence[Example], values: Mapping[str, float], level: float = 0.95
) -> Estimate:
    """The mean over families of a value that each task has."""
    by_family: dict[str, list[float]] = defaultdict(list)
    for example in examples:
        by_family[example.family].append(values[example.task])
    means = [fmean(members) for members in by_family.values()]
    count, mean = len(means), fmean(means)
    if count < 2:
        return Estimate(mean, -math.inf, math.inf, count)
    error = float(np.std(means, ddof=1)) / math.sqrt(count)
    reach = float(special.stdtrit(count - 1, (1 + level) / 2)) * error
    return Estimate(mean, mean - reach, mean + reach, count)


@dataclass(frozen=True)
class Evaluation:
    """Regrets of all strategies on the same tasks, in points (lower is better)."""

    examples: tuple[Example, ...]
    regrets: Mapping[str, Mapping[str, float]]
    """By strategy and task."""

    def regret(self, strategy: str, level: float = 0.95) -> Estimate:
        return estimate(self.examples, self.regrets[strategy], level)

    def difference(self, a: str, b: str, level: float = 0.95) -> Estimate:
        """The regret of `a` less that of `b`: negative where `a` chooses better."""
        first, second = self.regrets[a], self.regrets[b]
        return estimate(self.examples, {t: first[t] - second[t] for t in first}, level)


def evaluate(
    examples: Sequence[Example], strategies: Mapping[str, Strategy], by: Group = "family"
) -> Evaluation:
    """The regrets of strategies on held-out groups, and of "best", which is zero by definition."""
    found = {"best": {example.task: 0.0 for example in examples}}
    for name, strategy in strategies.items():
        found[name] = losses(examples, held_out(examples, strategy, by))
    return Evaluation(tuple(examples), found)


def transferred(
    examples: Sequence[Example], others: Sequence[Example], strategies: Mapping[str, Strategy]
) -> Evaluation:
    """The regrets on other tasks of strategies that are fitted to these."""
    found = {}
    for name, strategy in strategies.items():
        choose = strategy(examples)
        found[name] = losses(others, {one.task: choose(one.indicators) for one in others})
    return Evaluation(tuple(others), found)
