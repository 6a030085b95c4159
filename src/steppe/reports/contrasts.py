"""Every method against a reference: the paired difference, its intervals, and what they say."""

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
"""With so many trial seeds they decide, on the targets at hand; with fewer, the targets do."""
MARGIN = 1.0
"""Points. Two methods are tied where the tests say that they are closer than this."""
ROUNDING = 1e-9
"""Points. A narrower interval has no spread behind it."""
BEST, CHEAPEST = "best", "cheapest"


@dataclass(frozen=True)
class Contrast:
    """Two methods on what both have; `a` minus `b`, in points."""

    a: str
    b: str
    difference: float
    pairs: int
    over_trials: Paired | None
    """Over trial seeds: about other seeds on these targets."""
    over_targets: Paired | None
    """Over targets: about targets like these."""
    adjusted: float | None = None
    """Holm's p value that the difference is zero, within the family of `contrasts`."""
    outside: float | None = None
    """Holm's p value that the difference is `MARGIN` points or more, within the same family."""

    @property
    def deciding(self) -> Paired | None:
        """The interval that the verdict goes by."""
        enough = self.over_trials is not None and self.over_trials.units >= SEEDS
        first, second = self.over_trials, self.over_targets
        return first if enough else second or first

    @property
    def across(self) -> Paired | None:
        """What `paired` gives: over targets, or over trials where there is one target."""
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
        """The same with `b` minus `a`."""

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
    """Pairs against references, and how many tests they were corrected for."""

    pairs: tuple[Contrast, ...]
    tests: int
    named: bool
    """Whether the references were named beforehand, and not found by looking at the results."""

    @property
    def note(self) -> str:
        """What the correction covers."""
        if self.tests < 1:
            return "Nothing to test: an interval needs two targets or two trial seeds in common."
        many = "1 pair" if self.tests == 1 else f"{self.tests} pairs"
        because = (
            ""
            if self.named or self.tests == 1
            else ", because the best was found by looking at them; name one with --reference to "
            "test fewer"
        )
        return (
            f"p values are Holm-corrected for {many}{because}. Significant: p below "
            f"{1 - LEVEL:.2g}. Statistically tied: two one-sided tests, corrected the same way, "
            f"put the difference within {MARGIN:g} point of zero. With {SEEDS} or more seeds, p is "
            "over seeds, on these targets only."
        )


def contrast(a: tuple[str, Accuracies], b: tuple[str, Accuracies]) -> Contrast | None:
    """Two methods, by name and accuracies; None where they share no target and trial."""
    shared = a[1].keys() & b[1].keys()
    if not shared:
        return None
    found: dict[Unit, Paired] = {}
    for over in ("targets", "trials"):
        try:
            pair = between(a, b, LEVEL, over)
        except UserError:  # one target and seed, or targets that differ from seed to seed
            continue
        # Accuracies are whole numbers of images: that two differences are equal is no evidence.
        if pair.units >= SEEDS or pair.high - pair.low > ROUNDING:
            found[pair.unit] = pair
    differences = [100 * a[1][key] - 100 * b[1][key] for key in sorted(shared, key=repr)]
    known = found.get("targets") or found.get("trials")
    middle = known.difference if known else math.fsum(differences) / len(differences)
    return Contrast(a[0], b[0], middle, len(shared), found.get("trials"), found.get("targets"))


def by_method(selected: Selected) -> dict[str, dict[tuple[object, ...], float]]:
    """Every method's accuracies, by dataset, target and trial."""
    found: dict[str, dict[tuple[object, ...], float]] = {row.name: {} for row in selected.rows()}
    for (dataset, row, column, trial), chosen in selected.chosen.items():
        found[row.name][dataset, column, trial] = chosen.accuracy
    return found


def corrected(pairs: Sequence[Contrast]) -> list[Contrast]:
    """The pairs with Holm's p values, as one family."""
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
    """All methods against references, by default the best and the cheapest.

    A reference that was found by looking at the results could have been any method: then the
    correction is for all pairs of methods, and otherwise for those that are shown.
    """
    known = by_method(selected)
    meant = {BEST: best, CHEAPEST: cheapest}
    for name in references:
        if name not in known and name not in meant:
            raise UserError(unknown("reference", name, [*known, *meant]))
    wanted = references or (BEST, CHEAPEST)
    named = not set(wanted) & (meant.keys() - known.keys())
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
    family = asked if named else list(combinations(known, 2))
    found = [contrast((a, known[a]), (b, known[b])) for a, b in family]
    tested = corrected([one for one in found if one is not None])
    by_names = {(one.a, one.b): one for one in tested}
    by_names |= {(one.b, one.a): one.turned() for one in tested}
    shown = tuple(by_names[names] for names in asked if names in by_names)
    return Contrasts(shown, sum(one.adjusted is not None for one in tested), named)
