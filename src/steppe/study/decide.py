"""Decide claims from the outcomes so far, and what to run next. Pure functions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from .design import Claim, Design, Plan
from .outcomes import Outcome, Outcomes, Slot, hours
from .sequence import Interval, interval

Verdict = Literal["better", "worse", "equivalent", "undecided"]


@dataclass(frozen=True)
class Ruling:
    """What is known about a claim.

    Attributes:
        claim: the claim.
        verdict: of the first method against the second; "undecided" while the claim is open.
        looks: the interval at every look, the last one being where the claim was decided.
        open: whether more seeds could still decide it.
        reason: why an undecided claim is closed.
    """

    claim: Claim
    verdict: Verdict
    looks: tuple[Interval, ...]
    open: bool
    reason: str = ""

    @property
    def last(self) -> Interval | None:
        return self.looks[-1] if self.looks else None


@dataclass(frozen=True)
class State:
    """All rulings, and the runs that the next look needs."""

    rulings: tuple[Ruling, ...]
    todo: tuple[Slot, ...]

    @property
    def over(self) -> bool:
        return not self.todo


def judge(found: Interval, smallest_effect: float) -> Verdict:
    """The verdict of an interval.

    Examples:
        >>> judge(Interval(1.0, 0.2, 1.8, 1.0, 10), 1.0), judge(Interval(0.3, 0.1, 0.5, 1, 30), 1.0)
        ('better', 'equivalent')
    """
    if -smallest_effect < found.low and found.high < smallest_effect:
        return "equivalent"
    if found.low > 0:
        return "better"
    return "worse" if found.high < 0 else "undecided"


def differences(design: Design, outcomes: Outcomes, claim: Claim) -> list[float]:
    """The mean difference over targets of every seed up to the first that is not complete."""
    found = []
    for seed in range(design.max_seeds):
        pairs = [
            (
                outcomes.get(Slot("run", claim.a, seed, target)),
                outcomes.get(Slot("run", claim.b, seed, target)),
            )
            for target in design.targets
        ]
        if not all(_worked(a) and _worked(b) for a, b in pairs):
            break
        found.append(fmean(a.accuracy - b.accuracy for a, b in pairs))  # type: ignore[union-attr, operator]
    return found


def _worked(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.accuracy is not None


def rule(design: Design, outcomes: Outcomes, claim: Claim) -> Ruling:
    """Look at the first seeds, then after every further one, until the claim is decided."""
    values = differences(design, outcomes, claim)
    level = design.level if claim.confirmatory else design.alpha
    looks: list[Interval] = []
    for n in range(design.first_seeds, len(values) + 1):
        looks.append(interval(values[:n], level))
        verdict = judge(looks[-1], design.smallest_effect)
        if verdict != "undecided":
            return Ruling(claim, verdict, tuple(looks), open=False)
    if failed := sorted(_failed(outcomes, claim)):
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        reason = f"failed: {failed[0].method} on {failed[0].target}, seed {failed[0].seed}{more}"
        return Ruling(claim, "undecided", tuple(looks), False, reason)
    if len(values) >= design.max_seeds:
        reason = f"{design.max_seeds} seeds did not decide it"
        return Ruling(claim, "undecided", tuple(looks), False, reason)
    return Ruling(claim, "undecided", tuple(looks), open=True)


def _failed(outcomes: Outcomes, claim: Claim) -> Iterator[Slot]:
    for slot, outcome in outcomes.items():
        if slot.kind == "run" and slot.method in (claim.a, claim.b) and outcome.accuracy is None:
            yield slot


def state(plan: Plan, outcomes: Outcomes) -> State:
    """The rulings on all claims, and the missing runs of the next look.

    Exploratory claims never prolong a study: their methods run along while a confirmatory claim is
    open.
    """
    design = plan.design
    rulings = [rule(design, outcomes, claim) for claim in plan.claims]
    tuning = tuple(slot for slot in tuning_slots(design) if slot not in outcomes)
    if tuning:
        return State(tuple(rulings), tuning)
    look = next_look(design, outcomes, rulings)
    every = (*look, *twin_slots(design))
    if look and over_budget(design, outcomes, every):
        reason = f"another look would exceed the budget of {design.budget_hours:g} hours"
        return State(tuple(_closed(ruling, reason) for ruling in rulings), ())
    if not look:
        rulings = [_closed(ruling, "exploratory claims add no runs") for ruling in rulings]
    return State(tuple(rulings), tuple(slot for slot in every if slot not in outcomes))


def _closed(ruling: Ruling, reason: str) -> Ruling:
    return (
        Ruling(ruling.claim, ruling.verdict, ruling.looks, False, reason) if ruling.open else ruling
    )


def next_look(design: Design, outcomes: Outcomes, rulings: Sequence[Ruling]) -> tuple[Slot, ...]:
    """The runs that the next look at the open claims adds, whether they have finished or not."""
    still = [ruling for ruling in rulings if ruling.open]
    if not any(ruling.claim.confirmatory for ruling in still):
        return ()
    seen = min(len(differences(design, outcomes, ruling.claim)) for ruling in still)
    seeds = range(design.first_seeds) if seen < design.first_seeds else (seen,)
    methods = dict.fromkeys(name for r in still for name in (r.claim.a, r.claim.b))
    return tuple(
        Slot("run", method, seed, target)
        for seed in seeds
        for method in methods
        for target in design.targets
    )


def twin_slots(design: Design) -> list[Slot]:
    method = design.claims[0].b
    return [Slot("twin", method, s, t) for s in range(design.twins) for t in design.targets]


def tuning_slots(design: Design) -> list[Slot]:
    """The tuning runs: all settings tried for every method, on every target."""
    return [
        Slot("tune", method.name, seed, target, choice)
        for method in design.methods
        for choice in range(len(method.tries))
        for seed in range(design.tuning_seeds)
        for target in design.targets
    ]


def tuned(design: Design, outcomes: Outcomes, name: str, target: str) -> tuple[str, ...]:
    """The tried settings with the best source validation on tuning seeds; the first of ties.

    Only runs that hold out the same target count, because the validation images of the others
    include it. Settings with a failed run lose.
    """
    tries = design.method(name).tries
    if not tries:
        return ()

    def score(choice: int) -> float:
        slots = [Slot("tune", name, s, target, choice) for s in range(design.tuning_seeds)]
        found = [outcomes[slot].validation for slot in slots if slot in outcomes]
        known = [value for value in found if value is not None]
        return fmean(known) if len(known) == len(slots) else -math.inf

    return tries[max(range(len(tries)), key=score)]


def over_budget(design: Design, outcomes: Outcomes, look: Sequence[Slot]) -> bool:
    """Whether a look would exceed the budget, if its runs take as long as those before it.

    It does not depend on how much of the look has run: a look that has begun is finished. The first
    look's runs are expected to take as long as tuning runs, or no time if there were none.
    """
    if design.budget_hours is None:
        return False
    added = set(look)
    before = {slot: outcome for slot, outcome in outcomes.items() if slot not in added}
    took: dict[str, list[float]] = defaultdict(list)
    for slot, outcome in before.items():
        if outcome.accuracy is not None:
            took[slot.method].append(outcome.seconds)
    expected = sum(fmean(took[slot.method]) for slot in look if took[slot.method])
    return hours(before) + expected / 3600 > design.budget_hours
