"""Mean difference of two methods on the same targets and trials, with a confidence interval."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from steppe.errors import UserError, unknown

from .runs import Row
from .tables import Runs, Selected, select_runs

Unit = Literal["targets", "trials"]
ROUNDING = 1e-9
"""Points. A narrower interval means that the differences have no spread."""
Accuracies = Mapping[tuple[object, ...], float]
"""Accuracies in [0, 1] by dataset, target, trial and any other key that a pair must share."""


@dataclass(frozen=True)
class Paired:
    """Mean difference of two methods over their shared results, in percentage points."""

    a: str
    b: str
    difference: float
    """Positive if `a` is better."""
    err: float
    """Standard error from the spread between units."""
    low: float
    high: float
    level: float
    pairs: int
    """Number of results that both have: same dataset, target and trial."""
    units: int
    unit: Unit
    """The independent units. With ``trials``, the targets are treated as fixed."""
    targets: int

    @property
    def spread(self) -> bool:
        """Whether the differences vary.

        Accuracies are counts of images, so differences on a few images can all be equal by chance.
        """
        return self.high - self.low > ROUNDING

    @property
    def clear(self) -> bool:
        """Whether the interval has a length and excludes zero."""
        return self.spread and (self.low > 0 or self.high < 0)

    @property
    def p(self) -> float:
        """Two-sided p value of Student's t-test for a difference of zero; 1 without a spread."""
        from scipy.special import stdtr

        if not self.spread:
            return 1.0
        return float(2 * stdtr(self.units - 1, -abs(self.difference) / self.err))

    def p_outside(self, margin: float) -> float:
        """Of two one-sided tests that the difference is at least `margin` points, either way.

        Doubled, so that it is below 1 - `level` where the whole interval is within the margin
        (Schuirmann 1987). 1 without a spread.
        """
        from scipy.special import stdtr

        room = margin - abs(self.difference)
        if not self.spread:
            return 1.0
        return min(1.0, float(2 * stdtr(self.units - 1, -room / self.err)))

    @property
    def what(self) -> str:
        """The sample behind the interval, in words."""
        given = "one target" if self.targets == 1 else f"these {self.targets} targets"
        of_these = f" of {given}" if self.unit == "trials" else ""
        return f"{self.pairs} pairs; interval over {self.units} {self.unit}{of_these}"


def paired(
    runs: Runs,
    a: str | Row,
    b: str | Row,
    selection: str | None = None,
    level: float = 0.95,
    over: Unit = "targets",
) -> Paired:
    """Compare two optimizers, or two methods, on the same targets and trials.

    Differences on one target are correlated across trials. They are therefore averaged per target
    of each dataset first, and Student's interval over these means generalizes to similar targets.
    With `over="trials"`, or a single target, they are averaged per trial, and the interval
    generalizes only to other seeds on the same targets.

    Args:
        runs: in any order.
        a: an optimizer, compared under every algorithm and averaging that both have; or a method,
            as a `Row` or by name.
        b: the optimizer or method to compare with.
        selection: one of `SELECTIONS` (default: the protocol's, or `train-val`).
        level: confidence level of the interval.
        over: the independent units.
    """
    selected = select_runs(runs, selection)
    optimizers = {row.optimizer for row in selected.rows()}
    whole = not {a, b} <= optimizers  # methods, not optimizers under any algorithm
    ours, theirs = (_accuracies(selected, given, whole) for given in (a, b))
    name_a, name_b = (given.name if isinstance(given, Row) else given for given in (a, b))
    return between((name_a, ours), (name_b, theirs), level, over)


def between(
    a: tuple[str, Accuracies],
    b: tuple[str, Accuracies],
    level: float = 0.95,
    over: Unit = "targets",
) -> Paired:
    """Compare two (name, accuracies) pairs as `paired` does."""
    from scipy.special import stdtrit

    if over not in get_args(Unit):
        raise UserError(unknown("unit of a comparison", over, get_args(Unit)))
    (name_a, ours), (name_b, theirs) = a, b
    names = f"{name_a} and {name_b}"
    shared = sorted(ours.keys() & theirs.keys(), key=repr)
    if len(shared) < 2:
        raise UserError(
            f"{names} share {len(shared)} combinations of target and trial; a comparison needs at "
            "least 2. Run both on the same targets with the same trial seeds."
        )
    targets = {(dataset, target) for dataset, target, *_ in shared}
    unit: Unit = over if len(targets) > 1 else "trials"
    by_unit: dict[object, list[float]] = defaultdict(list)
    seen: dict[object, set[object]] = defaultdict(set)
    for key in shared:
        dataset, target, trial, *rest = key
        of = (dataset, target) if unit == "targets" else trial
        by_unit[of].append(100 * ours[key] - 100 * theirs[key])
        seen[trial].add((dataset, target, *rest))
    if len(by_unit) < 2:  # for example one target under several algorithms
        raise UserError(
            f"{names} share one trial; a comparison over trials needs at least 2. Run both on more "
            "targets or with more trial seeds."
        )
    uneven = any(places != seen[shared[0][2]] for places in seen.values())
    if unit == "trials" and len(targets) > 1 and uneven:
        raise UserError(
            f"{names} do not have the same targets in every trial, so a comparison over trials "
            "would confound targets with seeds. Finish the runs, or compare over targets."
        )
    means = np.array([np.mean(differences) for differences in by_unit.values()])
    difference = float(np.mean(means))
    err = float(np.std(means, ddof=1) / np.sqrt(len(means)))
    reach = float(stdtrit(len(means) - 1, (1 + level) / 2)) * err
    return Paired(
        a=name_a,
        b=name_b,
        difference=difference,
        err=err,
        low=difference - reach,
        high=difference + reach,
        level=level,
        pairs=len(shared),
        units=len(means),
        unit=unit,
        targets=len(targets),
    )


def _accuracies(selected: Selected, given: str | Row, whole: bool) -> Accuracies:
    """By dataset, target and trial; for an optimizer, also by algorithm and averaging."""
    rows = {row.name: row for row in selected.rows()}
    name = given.name if isinstance(given, Row) else given
    if whole and name not in rows:
        known = dict.fromkeys([*(row.optimizer for row in rows.values()), *rows])
        raise UserError(unknown("optimizer or method", name, known))
    return {
        (dataset, column, trial, *(() if whole else (row.algorithm, row.averaging))): one.accuracy
        for (dataset, row, column, trial), one in selected.chosen.items()
        if (row == rows[name] if whole else row.optimizer == name)
    }
