"""Tables from runs: per dataset, across datasets, optimizer by algorithm, cost.

Accuracies are in percent and unrounded; errors are those of `cells.standard_error`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from steppe.domains import DatasetSpec, dataset_names, dataset_spec
from steppe.errors import UserError, unknown
from steppe.optim import optimizer_names, optimizer_spec
from steppe.validation import mean

from .cells import Cell, cell_of
from .runs import Row, Run
from .selection import SELECTIONS, Chosen

ALL = "all"
"""In place of a dataset's name, in tables across datasets."""


@dataclass(frozen=True)
class TableRow:
    """One method in a table."""

    row: Row
    cells: Mapping[str, Cell | None]
    runs: tuple[Run, ...]
    """Those that the selection could choose from, and used to validate."""

    @property
    def average(self) -> Cell | None:
        """The mean of the cells; None where one is missing."""
        cells = [cell for cell in self.cells.values() if cell is not None]
        if not cells or len(cells) < len(self.cells):
            return None
        partial = any(cell.partial for cell in cells)
        return Cell(mean([cell.mean for cell in cells]), 0.0, 1, partial)


@dataclass(frozen=True)
class Table:
    """Methods by columns."""

    dataset: str
    selection: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    """The columns' short names, to be shown."""
    rows: tuple[TableRow, ...]


class Place(NamedTuple):
    """What is chosen once: a method's number for a target and a trial."""

    dataset: str
    row: Row
    column: str
    trial: int


@dataclass(frozen=True)
class Selected:
    """Runs, and what a selection chose among them."""

    runs: tuple[Run, ...]
    selection: str
    datasets: tuple[str, ...]
    columns: Mapping[str, tuple[str, ...]]
    """By dataset: the target sets, as domain names joined by ``+``."""
    chosen: Mapping[Place, Chosen]

    @cached_property
    def by_method(self) -> Mapping[tuple[str, Row], tuple[Run, ...]]:
        grouped = defaultdict(list)
        for run in self.runs:
            grouped[run.dataset, run.row].append(run)
        return {key: tuple(runs) for key, runs in grouped.items()}

    def rows(self, dataset: str | None = None) -> list[Row]:
        """The methods that have runs (of a dataset), in the order of tables."""
        found = {row for name, row in self.by_method if dataset in (None, name)}
        return sorted(found, key=lambda row: row.order)

    @cached_property
    def values(self) -> Mapping[tuple[str, Row], Mapping[str, Mapping[int, float]]]:
        """By dataset and method: accuracies from 0 to 1 by column and trial, in order."""
        found: dict[tuple[str, Row], dict[str, dict[int, float]]] = defaultdict(dict)
        for place in sorted(self.chosen, key=lambda place: place.trial):
            columns = found[place.dataset, place.row]
            columns.setdefault(place.column, {})[place.trial] = self.chosen[place].accuracy
        return found


Runs = Sequence[Run] | Selected
"""Runs to select from, or what was selected before."""


def select_runs(runs: Runs, selection: str) -> Selected:
    """Apply a selection to every method, target set and trial.

    The target sets of a dataset are those of the smallest size that any of its runs holds out. Runs
    that hold out more are for leave-one-out validation, and never get a column of their own while
    there are others.
    """
    if isinstance(runs, Selected):
        return runs
    if selection not in SELECTIONS:
        raise UserError(unknown("selection", selection, SELECTIONS))
    rule = SELECTIONS[selection]
    by_dataset: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: str(run.path)):
        by_dataset[run.dataset].append(run)
    known = list(dataset_names())
    order = {name: number for number, name in enumerate(known)}
    datasets = tuple(sorted(by_dataset, key=lambda name: (order.get(name, len(order)), name)))
    chosen: dict[Place, Chosen] = {}
    columns: dict[str, tuple[str, ...]] = {}
    for dataset in datasets:
        sets = target_sets(by_dataset[dataset])
        columns[dataset] = tuple(sets)
        groups: dict[tuple[Row, int], list[Run]] = defaultdict(list)
        for run in by_dataset[dataset]:
            groups[run.row, run.trial].append(run)
        for (row, trial), group in groups.items():
            held_out = {run.target_set for run in group}
            for column, targets in sets.items():
                if targets not in held_out:
                    continue
                found = rule(group, targets)
                if found is not None:
                    chosen[Place(dataset, row, column, trial)] = found
    ordered = tuple(run for dataset in datasets for run in by_dataset[dataset])
    return Selected(ordered, selection, datasets, columns, chosen)


def _spec(dataset: str) -> DatasetSpec | None:
    # Not of a folder: its path may be another one's here.
    return dataset_spec(dataset) if dataset in dataset_names() else None


def target_sets(runs: Sequence[Run]) -> dict[str, frozenset[str]]:
    """The target sets of a dataset's runs by name, in the dataset's order.

    Where one domain is held out at a time, every domain has its place, run or not: a table shows
    what is missing. Of sets of several, those that the dataset defines and those that were run.
    """
    spec = _spec(runs[0].dataset)
    fullest = max(runs, key=lambda run: (len(run.domains), run.order))
    domains = dict.fromkeys(spec.domains if spec else fullest.domains)
    for run in runs:
        domains |= dict.fromkeys(run.domains) | dict.fromkeys(run.targets)
    place = {name: number for number, name in enumerate(domains)}
    size = min(len(run.target_set) for run in runs)
    sets = {run.target_set for run in runs if len(run.target_set) == size}
    if size == 1:
        sets |= {frozenset([name]) for name in domains}
    elif spec:
        sets |= {frozenset(targets) for targets in spec.targets if len(targets) == size}
    in_order = [sorted(targets, key=place.__getitem__) for targets in sets]
    in_order.sort(key=lambda names: [place[name] for name in names])
    return {"+".join(names): frozenset(names) for names in in_order}


def _label(spec: DatasetSpec | None, column: str) -> str:
    names = column.split("+")
    if spec is None or not set(names) <= set(spec.domains):
        return column
    return "+".join(map(spec.label, names))


def dataset_tables(runs: Runs, selection: str = "train-val") -> list[Table]:
    """One table per dataset: targets as columns, methods as rows."""
    selected = select_runs(runs, selection)
    tables = []
    for dataset in selected.datasets:
        columns, spec = selected.columns[dataset], _spec(dataset)
        rows = []
        for row in selected.rows(dataset):
            values = selected.values.get((dataset, row), {})
            cells = {c: cell_of(values[c].values()) if c in values else None for c in columns}
            rows.append(TableRow(row, cells, selected.by_method[dataset, row]))
        labels = tuple(_label(spec, column) for column in columns)
        tables.append(Table(dataset, selected.selection, columns, labels, tuple(rows)))
    return tables


def across_datasets(runs: Runs, selection: str = "train-val") -> Table:
    """Datasets as columns: the mean over a trial's targets first, then mean and error over trials.

    As in DomainBed's "Averages", a trial that lacks a target is the mean of those it has; such a
    cell is marked as partial.
    """
    selected = select_runs(runs, selection)
    rows = []
    for row in selected.rows():
        cells = {dataset: _dataset_cell(selected, dataset, row) for dataset in selected.datasets}
        own = (run for d in selected.datasets for run in selected.by_method.get((d, row), ()))
        rows.append(TableRow(row, cells, tuple(own)))
    return Table(ALL, selected.selection, selected.datasets, selected.datasets, tuple(rows))


def _dataset_cell(selected: Selected, dataset: str, row: Row) -> Cell | None:
    by_trial: dict[int, list[float]] = defaultdict(list)
    columns = selected.columns[dataset]
    values = selected.values.get((dataset, row), {})
    for column in columns:
        for trial, value in values.get(column, {}).items():
            by_trial[trial].append(value)
    partial = any(len(values) < len(columns) for values in by_trial.values())
    return cell_of([float(np.mean(by_trial[trial])) for trial in sorted(by_trial)], partial)


@dataclass(frozen=True)
class Matrix:
    """Algorithms (with averaging) by optimizers, for a dataset or all of them."""

    dataset: str
    selection: str
    methods: tuple[tuple[str, str], ...]
    """Algorithm and averaging."""
    optimizers: tuple[str, ...]
    cells: Mapping[Row, Cell | None]


def optimizer_by_algorithm(
    runs: Runs, selection: str = "train-val", dataset: str | None = None
) -> Matrix:
    """The paper's Table 2: how every optimizer does under every algorithm and averaging.

    Args:
        runs: the runs, in any order.
        selection: one of `SELECTIONS`.
        dataset: one, whose cells are means over targets; or None, for the mean over all datasets
            of a trial, of the trials that have them all.
    """
    selected = select_runs(runs, selection)
    if dataset is not None and dataset not in selected.datasets:
        raise UserError(unknown("dataset", dataset, selected.datasets))
    rows = selected.rows(dataset)
    if dataset is not None:
        cells = {row: _dataset_cell(selected, dataset, row) for row in rows}
    else:
        cells = {row: cell_of(_over_datasets(selected, row)) for row in rows}
    methods = dict.fromkeys((row.algorithm, row.averaging) for row in rows)
    found = {row.optimizer for row in rows}
    optimizers = [name for name in optimizer_names() if name in found]
    optimizers += sorted(found.difference(optimizers))
    name = ALL if dataset is None else dataset
    return Matrix(name, selected.selection, tuple(methods), tuple(optimizers), cells)


def _over_datasets(selected: Selected, row: Row) -> list[float]:
    """A method's mean over all targets of all datasets, of every trial that has them all."""
    by_trial: dict[int, list[float]] = defaultdict(list)
    for dataset in selected.datasets:
        columns = selected.columns[dataset]
        values = selected.values.get((dataset, row), {})
        full = [set(values.get(column, ())) for column in columns]
        for trial in sorted(set.intersection(*full)):
            mean = float(np.mean([values[column][trial] for column in columns]))
            by_trial[trial].append(mean)
    complete = [trial for trial in by_trial if len(by_trial[trial]) == len(selected.datasets)]
    return [float(np.mean(by_trial[trial])) for trial in sorted(complete)]


@dataclass(frozen=True)
class StepCost:
    """What a method's steps cost on a dataset, beside what they bring."""

    dataset: str
    row: Row
    runs: tuple[Run, ...]
    seconds_per_step: float
    """The median over all evaluations of all runs. The first of each run is left out where there
    are others, because its few steps pay for the set-up."""
    relative: float
    """To SGD under the same algorithm and averaging; to the cheapest method where SGD is missing"""
    accuracy: Cell | None

    @property
    def passes(self) -> int | None:
        """Forward and backward passes in a step, where the optimizer is known."""
        known = self.row.optimizer in optimizer_names()
        return optimizer_spec(self.row.optimizer).passes if known else None

    @property
    def memory_gb(self) -> float | None:
        """The peak of any run."""
        found = (record.memory_gb for run in self.runs for record in run.records)
        return max((memory for memory in found if memory is not None), default=None)


def cost_table(runs: Runs, selection: str = "train-val") -> list[StepCost]:
    """The paper's Table 3: time and memory against accuracy."""
    selected = select_runs(runs, selection)
    costs = []
    for dataset in selected.datasets:
        times: dict[Row, float] = {}
        for row in selected.rows(dataset):
            found = [
                record.seconds_per_step
                for run in selected.by_method[dataset, row]
                for record in run.records[1:] or run.records
                if record.seconds_per_step is not None
            ]
            if found:
                times[row] = statistics.median(found)
        for row, seconds in times.items():
            base = times.get(row._replace(optimizer="sgd"), min(times.values()))
            costs.append(
                StepCost(
                    dataset,
                    row,
                    selected.by_method[dataset, row],
                    seconds,
                    seconds / base if base > 0 else 1.0,
                    _dataset_cell(selected, dataset, row),
                )
            )
    return costs
