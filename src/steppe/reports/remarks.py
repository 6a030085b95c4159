"""What a reader of the tables should know and they do not show by themselves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence, Sized

from .runs import Loaded, Run, domain_pool
from .selection import candidates
from .tables import Place, Selected


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
    for dataset, sets in selected.columns.items():
        columns = {targets: column for column, targets in sets.items()}
        places = {
            Place(dataset, run.row, columns[run.target_set], run.trial)
            for run in selected.runs
            if run.dataset == dataset and run.target_set in columns
        }
        if missing := len(places.difference(selected.chosen)):
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
    by_dataset: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_dataset[run.dataset].append(run)
    for dataset, own in by_dataset.items():
        smallest = min(len(run.target_set) for run in own)
        more = sum(len(run.target_set) > smallest for run in own)
        said = _mixed(own)
        if more and selection != "leave-one-out":
            only = f"{_runs(more)} for leave-one-out validation only, because others hold out fewer"
            said.insert(0, f"{only} domains ({smallest})")
        found += [f"{dataset}: {text}" for text in said]
    return found


def _mixed(runs: Sequence[Run]) -> list[str]:
    """What differs between runs of a dataset, and may not be meant to."""
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
        f"runs with different sources (of the domains {'; '.join(sources)})": pools,
        f"runs with different splits ({', '.join(sorted(splits))})": splits,
        f"runs of different lengths compete ({', '.join(lengths)} updates)": lengths,
        f"methods have different numbers of targets times trials ({'; '.join(numbers)})": numbers,
        f"runs with different backbones ({', '.join(sorted(backbones))})": backbones,
    }
    return [text for text, found in differing.items() if len(found) > 1]


def _first(names: Sequence[object]) -> str:
    return f"{names[0]}, ..." if len(names) > 1 else str(names[0])


def _runs(n: int) -> str:
    return f"{n} run is" if n == 1 else f"{n} runs are"
