"""A report's opening sentences: which method leads, by how much, how certainly, at what cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from .cells import interval_text, p_text, points_text
from .contrasts import Contrast, Contrasts, by_method
from .spent import hours, hours_text
from .tables import Selected, StepCost, Table, target_names


class Ranked(NamedTuple):
    """A method with a result for every target."""

    name: str
    average: float
    """Percent."""


def ranking(table: Table | None) -> list[Ranked]:
    """Methods that have every target, best first."""
    rows = table.rows if table else ()
    found = [
        Ranked(row.row.name, row.average.mean)
        for row in rows
        if row.average is not None and not row.average.partial
    ]
    return sorted(found, key=lambda one: -one.average)


def step_seconds(costs: Sequence[StepCost]) -> dict[str, float]:
    """Mean seconds per step over datasets, for methods that were timed on all of them."""
    datasets = {cost.dataset for cost in costs}
    times: dict[str, dict[str, float]] = {}
    for cost in costs:
        times.setdefault(cost.row.name, {})[cost.dataset] = cost.seconds_per_step
    return {
        name: statistics.fmean(own.values())
        for name, own in times.items()
        if own.keys() == datasets
    }


def cheapest(costs: Sequence[StepCost]) -> str | None:
    """The method with the fastest step."""
    times = step_seconds(costs)
    return min(times, key=times.__getitem__, default=None)


def answer(
    selected: Selected, ranked: Sequence[Ranked], pairs: Contrasts, costs: Sequence[StepCost]
) -> list[str]:
    methods = [row.name for row in selected.rows()]
    if not methods:
        return []
    said = [*_lead(selected, ranked, pairs), *_cost(selected, ranked, costs)]
    return [*said, *_not_run(selected)]


def _lead(selected: Selected, ranked: Sequence[Ranked], pairs: Contrasts) -> list[str]:
    known = by_method(selected)
    methods = [*known]
    if not ranked:
        return ["No method has a result for every target yet, so none leads."]
    best, *others = ranked
    if not others:
        alone = (
            "it is the only method" if len(methods) == 1 else "no other method has every target yet"
        )
        return [f"{best.name} reaches {best.average:.1f}%; {alone}, so nothing is compared."]
    second = others[0]
    own = {pair.b: pair for pair in pairs.pairs if pair.a == best.name}
    own |= {pair.a: pair.turned() for pair in pairs.pairs if pair.b == best.name}
    shared = bool(known[best.name].keys() & known[second.name].keys())
    said = [_against(best, second, own.get(second.name), shared)]
    rest = [pair for name, pair in own.items() if name != second.name and name in methods]
    if rest:
        said.append(_others(best.name, rest))
    if left := len(methods) - len(ranked):
        said.append(
            f"{left} method{'s lack' if left > 1 else ' lacks'} a target and "
            f"{'are' if left > 1 else 'is'} not ranked."
        )
    return said


def _against(best: Ranked, second: Ranked, pair: Contrast | None, shared: bool) -> str:
    scores = (
        f"{best.name} and {second.name} lead with {best.average:.1f}% each"
        if best.average == second.average
        else f"{best.name} leads with {best.average:.1f}%; {second.name} is next with "
        f"{second.average:.1f}%"
    )
    if pair is None and shared:
        return f"{scores}. They were not compared with each other, because neither is a reference."
    if pair is None:
        return f"{scores}. They share no target and trial seed, so there is no paired difference."
    gap = f"{points_text(pair.difference)} points"
    if pair.deciding is None or pair.adjusted is None:
        return f"{scores}. The paired difference is {gap}; {no_interval(pair)}."
    return f"{scores}. The paired difference is {gap} ({evidence(pair)}): {verdict(pair)}."


def no_interval(pair: Contrast) -> str:
    """Why a pair has no interval, in words."""
    if pair.pairs == 1:
        return "one target and one seed give no interval, so it may be chance"
    return "the differences do not vary, so there is no interval, and it may be chance"


def evidence(pair: Contrast) -> str:
    """The deciding interval and its Holm-corrected p value, in words."""
    by = pair.deciding
    assert by is not None
    assert pair.adjusted is not None
    unit = "seeds" if by.unit == "trials" else "targets"
    p = p_text(pair.adjusted)
    equal = p if p.startswith("<") else f"= {p}"
    reach = interval_text(by.low, by.high)
    return f"{by.level:.0%} CI {reach} over {by.units} {unit}, Holm-corrected p {equal}"


def verdict(pair: Contrast) -> str:
    """The verdict in words, with its scope: these targets, or targets in general."""
    by = pair.deciding
    if by is None or pair.verdict != "significant":
        return pair.verdict
    given = "this target" if by.targets == 1 else f"these {by.targets} targets"
    return f"significant on {given}" if by.unit == "trials" else "significant across targets"


def _others(best: str, pairs: Sequence[Contrast]) -> str:
    groups: dict[str, dict[str, list[str]]] = {}
    for pair in pairs:
        sign = " better" if pair.difference > 0 else " worse"
        kind = pair.verdict + sign * (pair.verdict == "significant")
        where = verdict(pair).removeprefix(pair.verdict)
        groups.setdefault(kind, {}).setdefault(where, []).append(pair.b)
    parts = []
    for kind, clause in _CLAUSES.items():
        for where, names in groups.get(kind, {}).items():
            s, be = ("s", "are") if len(names) > 1 else ("", "is")
            parts.append(clause.format(best=best, names=_listed(names), s=s, be=be) + where)
    said = "; ".join(parts)
    return (said if said.startswith(best) else said[0].upper() + said[1:]) + "."


_CLAUSES = {
    "significant better": "{best} is significantly better than {names}",
    "significant worse": "{best} is significantly worse than {names}",
    "statistically tied": "{best} is statistically tied with {names}",
    "inconclusive": "the difference{s} from {names} {be} inconclusive",
    "no interval": "there is no interval for the difference{s} from {names}",
}
"""Clause for each verdict, in reading order."""


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _cost(selected: Selected, ranked: Sequence[Ranked], costs: Sequence[StepCost]) -> list[str]:
    said, times, low = [], step_seconds(costs), cheapest(costs)
    best = ranked[0].name if ranked else None
    if best in times and low is not None and len(times) > 1:
        each = f"A step of {best} takes {1e3 * times[best]:.1f} ms"
        more = f"{times[best] / times[low]:.2f} times that of {low}, the cheapest"
        said.append(f"{each}, {'the shortest of all' if best == low else more}.")
    if spent := hours(selected.runs):
        n = len(selected.runs)
        said.append(f"{'The run' if n == 1 else f'All {n:,} runs'} took {hours_text(spent)}.")
    return said


def _not_run(selected: Selected) -> list[str]:
    """Report missing targets of datasets whose runs hold out one domain each."""
    said = []
    for dataset, sets in selected.columns.items():
        own = (run for run in selected.runs if run.dataset == dataset)
        domains = dict.fromkeys(domain for run in own for domain in run.domains)
        held_out = frozenset().union(*sets.values())
        if len(held_out) == len(sets) < len(domains):
            verb = "was" if len(sets) == 1 else "were"
            names = _listed(target_names(dataset, sets))
            said.append(f"Of {dataset}'s {len(domains)} targets, {len(sets)} {verb} run ({names}).")
    return said
