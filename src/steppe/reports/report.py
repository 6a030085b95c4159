"""Everything a report shows, from runs to plain values for the page."""

from __future__ import annotations

import datetime
import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from typing import Any

from steppe import __version__
from steppe.errors import UserError

from . import render
from .best import best_configs
from .curvature import MeasuredRun, find_measured, page_rows
from .runs import Loaded, Row, Run, domain_pool, finite
from .selection import Chosen, best_step, candidates, last_step, mean_of, validation_keys
from .tables import (
    Cost,
    Matrix,
    Paired,
    Place,
    Selected,
    Table,
    across_datasets,
    cost_table,
    dataset_tables,
    optimizer_by_algorithm,
    paired,
    select_runs,
    target_sets,
)

POINTS = 2000
"""Runs of one method that the page shows in a figure; of more, every second, third, ..."""


@dataclass(frozen=True)
class Report:
    """The runs below a folder, selected; its tables are made when they are asked for."""

    title: str
    command: str
    selected: Selected
    problems: tuple[str, ...]
    measured: tuple[MeasuredRun, ...] = ()
    """Of the runs' curvature, where it was measured."""

    @cached_property
    def tables(self) -> list[Table]:
        """A table per dataset."""
        return dataset_tables(self.selected)

    @cached_property
    def across(self) -> Table | None:
        """All datasets, where there are several."""
        return across_datasets(self.selected) if len(self.selected.datasets) > 1 else None

    @cached_property
    def matrices(self) -> list[Matrix]:
        """Optimizers by algorithms, where there are several of both."""
        datasets: list[str | None] = [*self.selected.datasets]
        if len(datasets) > 1:
            datasets.append(None)
        found = [optimizer_by_algorithm(self.selected, dataset=name) for name in datasets]
        return [matrix for matrix in found if len(matrix.methods) > 1 < len(matrix.optimizers)]

    @cached_property
    def cost(self) -> list[Cost]:
        """Time and memory of every method."""
        return cost_table(self.selected)

    @cached_property
    def comparisons(self) -> list[Paired]:
        """FAD against every other optimizer, or else all against the first."""
        names = sorted({row.optimizer for row in self.selected.rows()})
        if len(names) < 2:
            return []
        first = next((name for name in ("fad", "adam", "sgd") if name in names), names[0])
        found = []
        for name in names:
            a, b = (first, name) if first == "fad" else (name, first)
            if name != first and (comparison := self._paired(a, b)) is not None:
                found.append(comparison)
        return found

    def _paired(self, a: str, b: str) -> Paired | None:
        try:
            return paired(self.selected, a, b)
        except UserError:  # too little in common: nothing to show
            return None

    @cached_property
    def best(self) -> list[dict[str, Any]]:
        """The chosen hyper-parameters."""
        return best_configs(self.selected)

    def to_json(self) -> dict[str, Any]:
        """The tables as plain values."""
        return render.tables_json(self.tables)

    def page_data(self) -> dict[str, Any]:
        """What the page draws, as plain values."""
        now = datetime.datetime.now(datetime.UTC)
        return {
            "title": self.title,
            "command": self.command,
            "made": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "versions": {
                "steppe": __version__,
                "torch": metadata.version("torch"),
                "python": platform.python_version(),
            },
            "selection": self.selected.selection,
            "problems": list(self.problems),
            "tables": [render.table_json(table) for table in self.tables],
            "across": render.table_json(self.across) if self.across else None,
            "matrices": [render.matrix_json(matrix) for matrix in self.matrices],
            "comparisons": [_comparison(c) for c in self.comparisons],
            "cost": [_cost(cost) for cost in self.cost],
            "curves": _curves(self.selected),
            "bars": [_bars(table) for table in self.tables],
            "sensitivity": _sensitivity(self.selected),
            "flatness": page_rows(self.measured),
        }


def build_report(
    loaded: Loaded, selection: str = "train-val", command: str = "", title: str = "steppe report"
) -> Report:
    """Select among the runs, and note what a reader of the tables should know.

    Args:
        loaded: from `load_runs`.
        selection: `train-val`, `leave-one-out` or `oracle`.
        command: what made the report, to be shown.
        title: its heading.
    """
    selected = select_runs(loaded.runs, selection)
    found = [*loaded.problems]
    if loaded.pending:
        n, total = loaded.without_records, loaded.without_records + len(loaded.runs)
        found.append(
            f"{n:,} of {total:,} runs {'has' if n == 1 else 'have'} no result yet "
            f"({_first([path.name for path in loaded.pending])}): the tables are of the others"
        )
    found += remarks(loaded.runs, selection)
    if selection == "leave-one-out":
        found += _not_left_out(selected)
    measured, unreadable = find_measured(loaded.runs)
    return Report(title, command, selected, tuple(found + unreadable), tuple(measured))


def _not_left_out(selected: Selected) -> list[str]:
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


def _comparison(c: Paired) -> dict[str, Any]:
    return {
        "a": c.a,
        "b": c.b,
        "difference": c.difference,
        "low": c.low,
        "high": c.high,
        "level": c.level,
        "n": c.pairs,
        "what": c.what,
    }


def _cost(cost: Cost) -> dict[str, Any]:
    return {
        "dataset": cost.dataset,
        "name": cost.row.name,
        "seconds_per_step": cost.seconds_per_step,
        "relative": cost.relative,
        "passes": cost.passes,
        "memory_gb": cost.memory_gb,
        "accuracy": None if cost.accuracy is None else cost.accuracy.mean,
        "err": None if cost.accuracy is None else cost.accuracy.err,
        "partial": cost.accuracy is not None and cost.accuracy.partial,
    }


def _bars(table: Table) -> dict[str, Any]:
    groups = []
    for column in table.columns:
        values = [
            {"name": row.row.name, "mean": cell.mean, "err": cell.err}
            for row in table.rows
            if (cell := row.cells[column]) is not None
        ]
        groups.append({"target": column, "values": values})
    return {"dataset": table.dataset, "groups": groups}


def _curves(selected: Selected) -> list[dict[str, Any]]:
    """Learning curves of the chosen runs: means over trials, in percent."""
    chosen: dict[tuple[str, str], dict[Row, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for place, found in selected.chosen.items():
        chosen[place.dataset, place.column][place.row].append(found.run)
    curves = []
    for dataset in selected.datasets:
        for column in selected.columns[dataset]:
            rows = chosen.get((dataset, column), {})
            series = [_series(row, rows[row]) for row in sorted(rows, key=lambda r: r.order)]
            if series:
                curves.append({"dataset": dataset, "target": column, "series": series})
    return curves


def _series(row: Row, runs: Sequence[Run]) -> dict[str, Any]:
    sums: dict[str, dict[int, list[float]]] = {key: defaultdict(list) for key in _CURVES}
    steps = sorted({record.step for run in runs for record in run.records})
    for run in runs:
        val, tests = validation_keys(run), [(target, "test") for target in run.targets]
        for record in run.records:
            loss = record.loss.get("total", record.loss.get("loss"))
            values = (mean_of(record, val), mean_of(record, tests), loss)
            for (key, scale), value in zip(_CURVES.items(), values, strict=True):
                if value is not None:
                    sums[key][record.step].append(scale * value)
    lines = {
        key: [sum(v) / len(v) if (v := by_step.get(step)) else None for step in steps]
        for key, by_step in sums.items()
    }
    return {"name": row.name, "steps": steps, **lines, "runs": len(runs)}


_CURVES = {"val": 100.0, "test": 100.0, "loss": 1.0}
"""The curves of a series, and what turns them into what is shown."""


def _sensitivity(selected: Selected) -> list[dict[str, Any]]:
    """The accuracy of every run that could have been chosen, by its hyper-parameters."""
    # Leave-one-out has no number for a run by itself; its training domains do.
    rule = last_step if selected.selection == "oracle" else best_step
    found = []
    for dataset in selected.datasets:
        own = [run for run in selected.runs if run.dataset == dataset]
        columns = {targets: column for column, targets in target_sets(own).items()}
        for row in selected.rows(dataset):
            runs = [r for r in selected.by_method[dataset, row] if r.target_set in columns]
            if len({(run.space, run.choice) for run in runs}) < 2:
                continue
            kept = runs[:: -(-len(runs) // POINTS)]
            points = [
                _point(chosen, columns[run.target_set])
                for run in kept
                if (chosen := rule(run)) is not None
            ]
            found.append({"dataset": dataset, "name": row.name, "points": points})
    return found


def _point(chosen: Chosen, column: str) -> dict[str, Any]:
    return {
        "choice": chosen.choice,
        "trial": chosen.run.trial,
        "target": column,
        "accuracy": 100 * chosen.accuracy,
        "validation": None if chosen.validation is None else 100 * chosen.validation,
        "hparams": _numbers(chosen.hparams),
    }


def _numbers(hparams: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in hparams.items() if finite(v)}
