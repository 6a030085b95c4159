"""Paired differences of methods from a reference, with intervals and verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from steppe.errors import UserError, unknown

from .differences import Accuracies, Paired, Unit, between
from .holm import holm
from .tables import Selected

LEVEL = 0.95
SEEDS = 3
"""With at least this many trial seeds, the interval over seeds decides, for these targets only.
With fewer, the interval over targets does."""
MARGIN = 1.0
"""Points. Two methods are tied if the tests show that they differ by less than this."""
BEST, CHEAPEST = "best", "cheapest"


@dataclass(frozen=True)
class Contrast:
    """Difference of two methods on their shared targets and trials: `a` minus `b`, in points."""

    a: str
    b: str
    difference: float
    pairs: int
    over_trials: Paired | None
    """Interval over trial seeds. It generalizes to other seeds on the same targets."""
    over_targets: Paired | None
    """Interval over targets. It generalizes to similar targets."""
    adjusted: float | None = None
    """Holm-corrected p value for a difference of zero, within the family of `contrasts`."""
    outside: float | None = None
    """Holm-corrected p value for a difference of `MARGIN` points or more, in the same family."""

    @property
    def deciding(self) -> Paired | None:
        """The interval that determines the verdict."""
        enough = self.over_trials is not None and self.over_trials.units >= SEEDS
        first, second = self.over_trials, self.over_targets
        return first if enough else second or first

    @property
    def across(self) -> Paired | None:
        """The interval `paired` returns: over targets, or over trials for a single target."""
        return self.over_targets or self.over_trials

    @property
    def verdict(self) -> str:
        """`significant`, `statistically tied`, `inconclusive`, or `no interval`."""
        if self.deciding is None or self.adjusted is None:
            return "no interval"
        if self.adjusted < 1 - LEVEL:
            return "significant"
        tied = self.outside is not None and self.outside < 1 - LEVEL
        return "statistically tied" if tied else "inconclusive"

    def turned(self) -> Contrast:
        """The reversed comparison, `b` minus `a`."""

        def turn(pair: Paired | None) -> Paired | None:
            return pair and replace(
                pair,
                a=pair.b,
                b=pair.a,
                difference=-pair.difference,
                low=-pair.high,
                high=-pair.low,
            )

        return replace(
            self,
            a=self.b,
            b=self.a,
            difference=-self.difference,
            over_trials=turn(self.over_trials),
            over_targets=turn(self.over_targets),
        )


@dataclass(frozen=True)
class Contrasts:
    """Comparisons with references, and the number of tests they were corrected for."""

    pairs: tuple[Contrast, ...]
    tests: int
    picked: tuple[str, ...] = ()
    """References that the results chose (`best`, `cheapest`) instead of the user."""

    @property
    def note(self) -> str:
        """The correction and the verdicts explained, for the reader of a table."""
        if self.tests < 1:
            return (
                "Nothing to test: an interval needs at least two shared targets or trial seeds, "
                "with differences that are not all equal."
            )
        many = "1 pair" if self.tests == 1 else f"{self.tests} pairs"
        because = (
            ""
            if not self.picked or self.tests == 1
            else f", because {' and '.join(f'the {kind}' for kind in self.picked)} method "
            f"{'was' if len(self.picked) == 1 else 'were'} chosen from these results; name one "
            "with --reference to test fewer"
        )
        return (
            f"p values are Holm-corrected for {many}{because}. Significant: p below "
            f"{1 - LEVEL:.2g}. Statistically tied: two one-sided tests, corrected the same way, "
            f"put the difference within {MARGIN:g} point of zero. With {SEEDS} or more seeds, p is "
            "over seeds, on these targets only. Intervals are not corrected."
        )


def contrast(a: tuple[str, Accuracies], b: tuple[str, Accuracies]) -> Contrast | None:
    """Compare two (name, accuracies) pairs; None if they share no target and trial."""
    shared = a[1].keys() & b[1].keys()
    if not shared:
        return None
    found: dict[Unit, Paired] = {}
    for over in ("targets", "trials"):
        try:
            pair = between(a, b, LEVEL, over)
        except UserError:  # one target and seed, or targets that differ from seed to seed
            continue
        if pair.spread:
            found[pair.unit] = pair
    differences = [100 * a[1][key] - 100 * b[1][key] for key in sorted(shared, key=repr)]
    known = found.get("targets") or found.get("trials")
    middle = known.difference if known else math.fsum(differences) / len(differences)
    return Contrast(a[0], b[0], middle, len(shared), found.get("trials"), found.get("targets"))


def by_method(selected: Selected) -> dict[str, dict[tuple[object, ...], float]]:
    """Each method's accuracies by dataset, target and trial."""
    found: dict[str, dict[tuple[object, ...], float]] = {row.name: {} for row in selected.rows()}
    for (dataset, row, column, trial), chosen in selected.chosen.items():
        found[row.name][dataset, column, trial] = chosen.accuracy
    return found


def corrected(pairs: Sequence[Contrast]) -> list[Contrast]:
    """The pairs with Holm-corrected p values, treated as one family."""
    decided = [pair.deciding for pair in pairs if pair.deciding is not None]
    zero = iter(holm([by.p for by in decided]))
    outside = iter(holm([by.p_outside(MARGIN) for by in decided]))
    return [
        pair if pair.deciding is None else replace(pair, adjusted=next(zero), outside=next(outside))
        for pair in pairs
    ]


def contrasts(
    selected: Selected, best: str | None, cheapest: str | None, references: Sequence[str] = ()
) -> Contrasts:
    """Compare all methods with the references (default: the best and the cheapest).

    A reference chosen from the results could have been any method, so the correction then covers
    all pairs of methods. If the user named the references, it covers only the pairs shown.
    """
    known = by_method(selected)
    meant = {BEST: best, CHEAPEST: cheapest}
    for name in references:
        if name not in known and name not in meant:
            raise UserError(unknown("reference", name, [*known, *meant]))
    wanted = references or (BEST, CHEAPEST)
    picked = tuple(name for name in meant if name in wanted and name not in known)
    chosen = dict.fromkeys(name if name in known else meant[name] for name in wanted)
    asked = [
        (name, other) if name == best else (other, name)
        for name in chosen
        for other in known
        if name is not None and name != other
    ]
    once: dict[frozenset[str], tuple[str, str]] = {}
    for pair in asked:
        once.setdefault(frozenset(pair), pair)
    asked = list(once.values())
    family = list(combinations(known, 2)) if picked else asked
    found = [contrast((a, known[a]), (b, known[b])) for a, b in family]
    tested = corrected([one for one in found if one is not None])
    by_names = {(one.a, one.b): one for one in tested}
    by_names |= {(one.b, one.a): one.turned() for one in tested}
    shown = tuple(by_names[names] for names in asked if names in by_names)
    return Contrasts(shown, sum(one.adjusted is not None for one in tested), picked)
