"""Caveats that the tables do not show."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Sized

from .runs import Loaded, Run, domain_pool
from .selection import candidates
from .tables import Place, Selected


def remarks(loaded: Loaded, selected: Selected) -> list[str]:
    """Report missing, unfinished, repeated and auxiliary runs, and settings that differ."""
    runs, found = loaded.runs, []
    if n := len(loaded.pending):
        found.append(
            f"{n:,} of {n + len(runs):,} runs {'has' if n == 1 else 'have'} no result yet "
            f"({_first([path.name for path in loaded.pending])}); the tables cover the others"
        )
    unfinished = [run.path for run in runs if run.state != "done"]
    if unfinished:
        found.append(
            f"{_runs(len(unfinished))} not finished ({_first(unfinished)}); the tables use the "
            "records so far, as in DomainBed"
        )
    without = [run.path for run in runs if run.row.averaging != "none" and not candidates(run)]
    if n := len(without):
        found.append(
            f"{n:,} run{'s have' if n > 1 else ' has'} no averaged record yet and "
            f"{'are' if n > 1 else 'is'} left out ({_first(without)})"
        )
    alike = Counter((r.dataset, r.row, r.trial, r.target_set, r.space, r.choice) for r in runs)
    if repeated := len(runs) - len(alike):
        found.append(
            f"{_runs(repeated)} repeated: same method, targets, trial and hyperparameters as "
            "another run"
        )
    for dataset, sets in selected.columns.items():
        own = [run for run in runs if run.dataset == dataset]
        said = [
            *_left_out(selected, dataset, sets, own),
            *_uncounted(selected, own),
            *_not_rerun(selected, dataset, own),
            *_mixed(own),
        ]
        found += [f"{dataset}: {text}" for text in said]
    return found


def _left_out(
    selected: Selected, dataset: str, sets: Mapping[str, frozenset[str]], runs: Sequence[Run]
) -> list[str]:
    """Report runs used only by leave-one-out validation, or runs that it lacks."""
    columns = {targets: column for column, targets in sets.items()}
    held_out = [run for run in runs if run.target_set in columns]
    if selected.selection != "leave-one-out":
        more, smallest = len(runs) - len(held_out), len(min(columns, key=len))
        only = "used only for leave-one-out validation, because other runs hold out fewer domains"
        return [f"{_runs(more)} {only} ({smallest})"] if more else []
    places = {Place(dataset, r.row, columns[r.target_set], r.trial) for r in held_out}
    missing = len(places.difference(selected.chosen))
    because = (
        "because leave-one-out validation needs every run with one more domain held out; plan them "
        "with 'steppe sweep plan ... --targets pairs'"
    )
    return [f"{missing:,} of {len(places):,} results are missing, {because}"] if missing else []


def _uncounted(selected: Selected, runs: Sequence[Run]) -> list[str]:
    without = [run.path for run in runs if not run.images]
    if selected.selection != "pooled-val" or not without:
        return []
    return [
        f"{_runs(len(without))} left out, because the records lack the number of images "
        f"({_first(without)}), which pooled-val needs; use --selection train-val"
    ]


def _not_rerun(selected: Selected, dataset: str, runs: Sequence[Run]) -> list[str]:
    """Report searches of a protocol whose winner has not been run on the other splits."""
    protocol = runs[0].protocol
    if protocol is None or not protocol.reruns:
        return []
    trials: dict[tuple[object, str], set[int]] = defaultdict(set)
    for place in selected.chosen:
        if place.dataset == dataset:
            trials[place.row, place.column].add(place.trial)
    missing = sum(len(found) <= protocol.reruns for found in trials.values())
    if not missing:
        return []
    return [
        f"{missing:,} of {len(trials):,} searches lack results of their winner on other splits "
        f"(the protocol {protocol.name} has {protocol.reruns} more); 'steppe sweep run' plans and "
        "runs them when the search is done"
    ]


def _mixed(runs: Sequence[Run]) -> list[str]:
    """Report differences between a dataset's runs that may be unintended."""
    pools = {domain_pool(run.config, run.targets) for run in runs}
    splits = {run.split for run in runs}
    backbones = {str(run.config.get("backbone")) for run in runs}
    places: dict[str, set[object]] = defaultdict(set)
    for run in runs:
        places[run.row.name].add((run.target_set, run.trial))
    by_number: dict[int, list[str]] = defaultdict(list)
    for name, own in sorted(places.items()):
        by_number[len(own)].append(name)
    sources = sorted("all" if pool is None else "+".join(pool) for pool in pools)
    lengths = [f"{n:,}" for n in sorted({run.steps for run in runs})]
    numbers = [f"{n}: {', '.join(names)}" for n, names in sorted(by_number.items())]
    differing: dict[str, Sized] = {
        f"runs use different source domains ({'; '.join(sources)})": pools,
        f"runs use different splits ({', '.join(sorted(splits))})": splits,
        f"runs differ in length ({', '.join(lengths)} updates)": lengths,
        f"methods differ in the number of targets times trials ({'; '.join(numbers)})": numbers,
        f"runs use different backbones ({', '.join(sorted(backbones))})": backbones,
    }
    return [text for text, found in differing.items() if len(found) > 1]


def _first(names: Sequence[object]) -> str:
    return f"{names[0]}, ..." if len(names) > 1 else str(names[0])


def _runs(n: int) -> str:
    return f"{n} run is" if n == 1 else f"{n} runs are"
