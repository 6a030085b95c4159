"""What a reader of the tables should know and they do not show by themselves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from .runs import Loaded, Run, domain_pool
from .selection import candidates
from .tables import Place, Selected, target_sets


def pending(loaded: Loaded) -> list[str]:
    """Runs that have nothing to report yet."""
    n, total = len(loaded.pending), len(loaded.pending) + len(loaded.runs)
    if not n:
        return []
    return [
        f"{n:,} of {total:,} runs {'has' if n == 1 else 'have'} no result yet "
        f"({_first([path.name for path in loaded.pending])}): the tables are of the others"
    ]


def not_left_out(selected: Selected) -> list[str]:
    """Datasets whose runs are there, without those that leave-one-out validation needs."""
    found = []
    for dataset in selected.datasets:
        own = [run for run in selected.runs if run.dataset == dataset]
        columns = {targets: column for column, targets in target_sets(own).items()}
        places = {
            Place(dataset, run.row, columns[run.target_set], run.trial)
            for run in own
            if run.target_set in columns
        }
        missing = len(places.difference(selected.chosen))
        if missing:
            found.append(
                f"{dataset}: {missing:,} of {len(places):,} numbers are missing, because "
                "leave-one-out validation needs every run with one more domain held out: plan them "
                "with 'steppe sweep plan ... --targets pairs'"
            )
    return found


def remarks(runs: Sequence[Run], selection: str = "train-val") -> list[str]:
    """What the tables do not show by themselves: unfinished, repeated and auxiliary runs."""
    found = []
    unfinished = [run for run in runs if run.state != "done"]
    if unfinished:
        found.append(
            f"{_runs(len(unfinished))} not finished ({_first([r.path for r in unfinished])}): "
            "records so far count, as in DomainBed"
        )
    without = [run for run in runs if run.averaging != "none" and not candidates(run)]
    if without:
        n = len(without)
        found.append(
            f"{n:,} run{'s have' if n > 1 else ' has'} no averaged record yet and "
            f"{'are' if n > 1 else 'is'} left out ({_first([r.path for r in without])})"
        )
    alike = Counter((r.dataset, r.row, r.trial, r.target_set, r.space, r.choice) for r in runs)
    repeated = sum(n - 1 for n in alike.values())
    if repeated:
        found.append(
            f"{_runs(repeated)} a repetition: same method, targets, trial and hyper-parameters as "
            "another one"
        )
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for run in runs:
        sizes[run.dataset][len(run.target_set)] += 1
    for dataset, counts in sizes.items():
        smallest = min(counts)
        more = sum(n for size, n in counts.items() if size > smallest)
        if more and selection != "leave-one-out":
            found.append(
                f"{dataset}: {_runs(more)} for leave-one-out validation only, because others hold "
                f"out fewer domains ({smallest})"
            )
        found += _mixed(dataset, [run for run in runs if run.dataset == dataset])
    return found


def _mixed(dataset: str, runs: Sequence[Run]) -> list[str]:
    """What differs between runs of a dataset, and may not be meant to."""
    found = []
    pools = {domain_pool(run.config, run.targets) for run in runs}
    if len(pools) > 1:
        named = sorted("all" if pool is None else "+".join(pool) for pool in pools)
        found.append(f"runs with different sources (of the domains {'; '.join(named)})")
    splits = {run.split for run in runs}
    if len(splits) > 1:
        found.append(f"runs with different splits ({', '.join(sorted(splits))})")
    steps = {run.steps for run in runs}
    if len(steps) > 1:
        lengths = ", ".join(f"{n:,}" for n in sorted(steps))
        found.append(f"runs of different lengths compete ({lengths} updates)")
    places: dict[str, set[object]] = defaultdict(set)
    for run in runs:
        places[run.row.name].add((run.target_set, run.trial))
    by_number: dict[int, list[str]] = defaultdict(list)
    for name, own in sorted(places.items()):
        by_number[len(own)].append(name)
    if len(by_number) > 1:
        listed = "; ".join(f"{n}: {', '.join(names)}" for n, names in sorted(by_number.items()))
        found.append(f"methods have different numbers of targets times trials ({listed})")
    backbones = {str(run.config.get("backbone")) for run in runs}
    if len(backbones) > 1:
        found.append(f"runs with different backbones ({', '.join(sorted(backbones))})")
    return [f"{dataset}: {text}" for text in found]


def _first(names: Sequence[object]) -> str:
    return f"{names[0]}, ..." if len(names) > 1 else str(names[0])


def _runs(n: int) -> str:
    return f"{n} run is" if n == 1 else f"{n} runs are"
