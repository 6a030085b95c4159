"""Tables from runs: per dataset, across datasets, optimizer by algorithm, cost.

Accuracies are unrounded percentages; errors come from `cells.standard_error`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from steppe.domains import DatasetSpec, dataset_names, dataset_spec
from steppe.errors import UserError, unknown
from steppe.optim import optimizer_names, optimizer_spec
from steppe.validation import mean

from .cells import Cell, cell_of
from .followed import selection_of, shared_protocol
from .runs import Row, Run
from .selection import SELECTIONS, Chosen, by_target
from .spent import hours, step_time

ALL = "all"
"""Stands for the dataset name in tables across datasets."""


@dataclass(frozen=True)
class TableRow:
    """One method in a table."""

    row: Row
    cells: Mapping[str, Cell | None]
    runs: tuple[Run, ...]
    """Runs available to the selection, including those used only for validation."""
    overall: Cell | None = None
    """The mean over the targets that each trial has, as in the cost table."""
    raw: float | None = None
    """The mean accuracy of the raw weights where `cells` are of averages."""

    @property
    def shown_average(self) -> Cell | None:
        """The average; if a target is missing, the mean of the others, marked as partial."""
        return self.average or (self.overall and self.overall._replace(err=0.0, n=1, partial=True))

    @property
    def average(self) -> Cell | None:
        """The mean of the cells; None if one is missing."""
        cells = [cell for cell in self.cells.values() if cell is not None]
        if not cells or len(cells) < len(self.cells):
            return None
        partial = any(cell.partial for cell in cells)
        return Cell(mean([cell.mean for cell in cells]), 0.0, 1, partial)


@dataclass(frozen=True)
class Table:
    """Methods as rows, targets or datasets as columns."""

    dataset: str
    selection: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    """Short column names for display."""
    rows: tuple[TableRow, ...]


class Place(NamedTuple):
    """Where a selection picks one run and step."""

    dataset: str
    row: Row
    column: str
    trial: int


@dataclass(frozen=True)
class Selected:
    """Runs, and the ones that a selection picked."""

    runs: tuple[Run, ...]
    selection: str
    columns: Mapping[str, Mapping[str, frozenset[str]]]
    """For each dataset, its target sets by name (domains joined by ``+``), in order."""
    chosen: Mapping[Place, Chosen]

    @property
    def datasets(self) -> tuple[str, ...]:
        return tuple(self.columns)

    @cached_property
    def by_method(self) -> Mapping[tuple[str, Row], tuple[Run, ...]]:
        grouped = defaultdict(list)
        for run in self.runs:
            grouped[run.dataset, run.row].append(run)
        return {key: tuple(runs) for key, runs in grouped.items()}

    def rows(self, dataset: str | None = None) -> list[Row]:
        """Methods that have runs (on a dataset), in table order."""
        found = {row for name, row in self.by_method if dataset in (None, name)}
        return sorted(found, key=lambda row: row.order)

    @cached_property
    def values(self) -> Mapping[tuple[str, Row], Mapping[int, Mapping[str, float]]]:
        """For each dataset and method, accuracies in [0, 1] by trial (sorted) and column."""
        found: dict[tuple[str, Row], dict[int, dict[str, float]]] = defaultdict(dict)
        for place in sorted(self.chosen, key=lambda place: place.trial):
            trials = found[place.dataset, place.row]
            trials.setdefault(place.trial, {})[place.column] = self.chosen[place].accuracy
        return found

    @cached_property
    def raw(self) -> Mapping[tuple[str, Row], float]:
        """The mean accuracy of each method's raw weights, where all of them were evaluated."""
        found: dict[tuple[str, Row], list[float | None]] = defaultdict(list)
        for place, one in self.chosen.items():
            found[place.dataset, place.row].append(one.raw)
        known = {key: [value for value in own if value is not None] for key, own in found.items()}
        return {key: 100 * mean(own) for key, own in known.items() if len(own) == len(found[key])}


Runs = Sequence[Run] | Selected
"""Runs to select from, or the result of an earlier selection."""


def select_runs(runs: Runs, selection: str | None = None) -> Selected:
    """Apply a selection rule to every method, target set and trial.

    A dataset's target sets are those of the smallest size among its runs. Runs with more targets
    are used only for leave-one-out validation.

    Args:
        runs: in any order. They must follow the same protocol, or none.
        selection: one of `SELECTIONS` (default: the protocol's, or `train-val`).
    """
    if isinstance(runs, Selected):
        return runs
    selection = selection_of(shared_protocol(runs), selection, SELECTIONS)
    rule = SELECTIONS[selection]
    by_dataset: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: str(run.path)):
        by_dataset[run.dataset].append(run)
    datasets = _ordered(by_dataset, dataset_names())
    columns = {dataset: target_sets(by_dataset[dataset]) for dataset in datasets}
    chosen: dict[Place, Chosen] = {}
    for dataset in datasets:
        groups: dict[tuple[Row, int], list[Run]] = defaultdict(list)
        for run in by_dataset[dataset]:
            groups[run.row, run.trial].append(run)
        for (row, trial), group in groups.items():
            held_out = {run.target_set for run in group}
            for column, targets in columns[dataset].items():
                if targets in held_out and (found := rule(group, targets)) is not None:
                    chosen[Place(dataset, row, column, trial)] = found
    ordered = tuple(run for dataset in datasets for run in by_dataset[dataset])
    return Selected(ordered, selection, columns, chosen)


def _ordered(names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Sort names that steppe knows in its order, and the rest after them by name."""
    place = {name: number for number, name in enumerate(known)}
    return tuple(sorted(names, key=lambda name: (place.get(name, len(place)), name)))


def _spec(dataset: str) -> DatasetSpec | None:
    # Folder datasets are excluded: on this machine the path may hold other data.
    return dataset_spec(dataset) if dataset in dataset_names() else None


def target_sets(runs: Sequence[Run]) -> dict[str, frozenset[str]]:
    """The target sets that a dataset's runs hold out, by name, in the dataset's order."""
    spec = _spec(runs[0].dataset)
    fullest = max(runs, key=lambda run: (len(run.domains), run.order))
    domains = dict.fromkeys(spec.domains if spec else fullest.domains)
    for run in runs:
        domains |= dict.fromkeys(run.domains) | dict.fromkeys(run.targets)
    place = {name: number for number, name in enumerate(domains)}
    size = min(len(run.target_set) for run in runs)
    sets = {run.target_set for run in runs if len(run.target_set) == size}
    in_order = [sorted(targets, key=place.__getitem__) for targets in sets]
    in_order.sort(key=lambda names: [place[name] for name in names])
    return {"+".join(names): frozenset(names) for names in in_order}


def target_labels(dataset: str, columns: Iterable[str]) -> tuple[str, ...]:
    """Targets as narrow tables show them, such as 75° and A."""
    spec = _spec(dataset)
    return tuple(_label(spec, column, short=True) for column in columns)


def target_names(dataset: str, columns: Iterable[str]) -> tuple[str, ...]:
    """Targets where there is room: with their unit, such as 75°, but art_painting instead of A."""
    spec = _spec(dataset)
    return tuple(_label(spec, column, short=False) for column in columns)


def _label(spec: DatasetSpec | None, column: str, short: bool) -> str:
    names = column.split("+")
    if spec is None or not set(names) <= set(spec.domains):
        return column
    labels = zip(names, map(spec.label, names), strict=True)
    return "+".join(label if short or name in label else name for name, label in labels)


def dataset_tables(runs: Runs, selection: str | None = None) -> list[Table]:
    """One table per dataset: targets as columns, methods as rows."""
    selected = select_runs(runs, selection)
    tables = []
    for dataset, sets in selected.columns.items():
        rows = []
        for row in selected.rows(dataset):
            trials = selected.values.get((dataset, row), {}).values()
            cells = {c: cell_of(found[c] for found in trials if c in found) for c in sets}
            overall = _dataset_cell(selected, dataset, row)
            raw = selected.raw.get((dataset, row))
            rows.append(TableRow(row, cells, selected.by_method[dataset, row], overall, raw))
        labels = target_labels(dataset, sets)
        tables.append(Table(dataset, selected.selection, tuple(sets), labels, tuple(rows)))
    return tables


def set_tables(runs: Runs, selection: str | None = None) -> list[Table]:
    """One table for every set of several targets: each of them as a column."""
    selected = select_runs(runs, selection)
    tables = []
    for dataset, sets in selected.columns.items():
        for column, targets in sets.items():
            if len(targets) == 1:
                continue
            names = tuple(column.split("+"))
            rows = []
            for row in selected.rows(dataset):
                scores = [
                    by_target(chosen, selected.selection)
                    for place, chosen in selected.chosen.items()
                    if place[:3] == (dataset, row, column)
                ]
                cells = {n: cell_of(one[n] for one in scores if n in one) for n in names}
                own = selected.by_method[dataset, row]
                rows.append(
                    TableRow(row, cells, tuple(run for run in own if run.target_set == targets))
                )
            title, labels = f"{dataset}, {column} held out", target_labels(dataset, names)
            tables.append(Table(title, selected.selection, names, labels, tuple(rows)))
    return tables


def across_datasets(runs: Runs, selection: str | None = None) -> Table:
    """Average each trial over its targets, then report mean and error over trials per dataset.

    As in DomainBed's "Averages", a trial that lacks a target is averaged over the targets it has;
    the cell is then marked as partial.
    """
    selected = select_runs(runs, selection)
    datasets = selected.datasets
    rows = []
    for row in selected.rows():
        cells = {dataset: _dataset_cell(selected, dataset, row) for dataset in datasets}
        own = (run for d in datasets for run in selected.by_method.get((d, row), ()))
        rows.append(TableRow(row, cells, tuple(own)))
    return Table(ALL, selected.selection, datasets, datasets, tuple(rows))


def _by_trial(selected: Selected, dataset: str, row: Row) -> dict[int, list[float]]:
    """A method's accuracies on a dataset's targets, for each trial that has any."""
    return {
        trial: values
        for trial, found in selected.values.get((dataset, row), {}).items()
        if (values := [found[c] for c in selected.columns[dataset] if c in found])
    }


def _dataset_cell(selected: Selected, dataset: str, row: Row) -> Cell | None:
    trials = _by_trial(selected, dataset, row).values()
    partial = any(len(values) < len(selected.columns[dataset]) for values in trials)
    return cell_of(map(mean, trials), partial)


@dataclass(frozen=True)
class Matrix:
    """Algorithms (with averaging) by optimizers, for one dataset or all of them."""

    dataset: str
    selection: str
    methods: tuple[tuple[str, str], ...]
    """Algorithm and averaging."""
    optimizers: tuple[str, ...]
    cells: Mapping[Row, Cell | None]


def optimizer_by_algorithm(
    runs: Runs, selection: str | None = None, dataset: str | None = None
) -> Matrix:
    """Accuracy of every optimizer under every algorithm and averaging, as in the paper's Table 2.

    Args:
        runs: in any order.
        selection: one of `SELECTIONS` (default: the protocol's, or `train-val`).
        dataset: average over the targets of this dataset (default: over all datasets, using only
            trials that have every target).
    """
    selected = select_runs(runs, selection)
    if dataset is not None and dataset not in selected.datasets:
        raise UserError(unknown("dataset", dataset, selected.datasets))
    rows = selected.rows(dataset)
    cells = {
        row: cell_of(_over_datasets(selected, row))
        if dataset is None
        else _dataset_cell(selected, dataset, row)
        for row in rows
    }
    methods = dict.fromkeys((row.algorithm, row.averaging) for row in rows)
    optimizers = _ordered({row.optimizer for row in rows}, optimizer_names())
    name = ALL if dataset is None else dataset
    return Matrix(name, selected.selection, tuple(methods), optimizers, cells)


def _over_datasets(selected: Selected, row: Row) -> list[float]:
    """A method's mean over all datasets, for every trial that has all targets."""
    complete = [
        {trial: mean(values) for trial, values in trials.items() if len(values) == len(columns)}
        for dataset, columns in selected.columns.items()
        for trials in (_by_trial(selected, dataset, row),)
    ]
    shared = set.intersection(*map(set, complete))
    return [mean([of_trial[trial] for of_trial in complete]) for trial in sorted(shared)]


@dataclass(frozen=True)
class StepCost:
    """A method's cost per step on a dataset, with its accuracy."""

    dataset: str
    row: Row
    runs: tuple[Run, ...]
    seconds_per_step: float
    """From `spent.step_time`."""
    relative: float
    """Step time relative to SGD under the same algorithm and averaging, or to the fastest method
    if SGD is missing."""
    accuracy: Cell | None

    @property
    def hours(self) -> float | None:
        """Total hours of all its runs, on any device."""
        return sum(hours(self.runs).values()) or None

    @property
    def passes(self) -> float | None:
        """Forward and backward passes per step; None if the optimizer is unknown."""
        known = self.row.optimizer in optimizer_names()
        return optimizer_spec(self.row.optimizer).passes if known else None

    @property
    def memory_gb(self) -> float | None:
        """Peak memory over all runs, in GiB."""
        found = (record.memory_gb for run in self.runs for record in run.records)
        return max((memory for memory in found if memory is not None), default=None)


def cost_table(runs: Runs, selection: str | None = None) -> list[StepCost]:
    """Time, memory and accuracy of every method, as in the paper's Table 3."""
    selected = select_runs(runs, selection)
    costs = []
    for dataset in selected.datasets:
        times = {row: step_time(selected.by_method[dataset, row]) for row in selected.rows(dataset)}
        known = {row: seconds for row, seconds in times.items() if seconds is not None}
        for row, seconds in known.items():
            base = known.get(row._replace(optimizer="sgd"), min(known.values()))
            relative = seconds / base if base > 0 else 1.0
            own, accuracy = selected.by_method[dataset, row], _dataset_cell(selected, dataset, row)
            costs.append(StepCost(dataset, row, own, seconds, relative, accuracy))
    return costs
