"""Tables from runs: per dataset, across datasets, optimizer by algorithm, cost, paired differences.

Accuracies are in percent and unrounded. An error is DomainBed's: the standard deviation of the
population of trials, over the root of their number.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import numpy as np

from steppe.domains import DatasetSpec, dataset_names, dataset_spec
from steppe.errors import UserError, unknown
from steppe.optim import optimizer_names, optimizer_spec

from .runs import Row, Run
from .selection import SELECTIONS, Chosen

ALL = "all"
"""In place of a dataset's name, in tables across datasets."""


class Cell(NamedTuple):
    """Mean and error over trials, in percent."""

    mean: float
    err: float
    n: int
    """Trials."""
    partial: bool = False
    """Whether a trial lacks some of what it is the mean of."""


@dataclass(frozen=True)
class TableRow:
    """One method in a table, and what its numbers come from."""

    row: Row
    cells: Mapping[str, Cell | None]
    avg: float | None
    """The mean of the cells; None where one is missing."""
    steps: tuple[int, ...]
    """Lengths of the runs."""
    runs: int
    """Runs that the selection could choose from, and used to validate."""
    space: str | None
    """What the hyper-parameters were drawn from."""

    @property
    def partial(self) -> bool:
        """Whether a cell is partial, and so the average."""
        return any(cell is not None and cell.partial for cell in self.cells.values())


@dataclass(frozen=True)
class Table:
    """Methods by columns."""

    dataset: str
    selection: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    """The columns' short names, to be shown."""
    rows: tuple[TableRow, ...]

    def best(self, column: str | None) -> frozenset[Row]:
        """The methods with the highest mean in a column (None: of the averages), as shown.

        A mean that lacks some targets is of other things, and takes no part.
        """
        means = {r.row: mean for r in self.rows if (mean := _mean_in(r, column)) is not None}
        top = max((f"{mean:.1f}" for mean in means.values()), key=float, default="")
        return frozenset(row for row, mean in means.items() if f"{mean:.1f}" == top)


def _mean_in(row: TableRow, column: str | None) -> float | None:
    if column is None:
        return None if row.partial else row.avg
    cell = row.cells[column]
    return None if cell is None or cell.partial else cell.mean


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
        """The runs by dataset and method."""
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

    Args:
        runs: the runs, in any order.
        selection: `train-val`, `leave-one-out` or `oracle`.
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


def cell_of(values: Iterable[float], partial: bool = False) -> Cell | None:
    """Mean and error of accuracies from 0 to 1, computed as DomainBed does."""
    data = np.array(list(values))
    if not len(data):
        return None
    mean, err = 100 * np.mean(data), 100 * np.std(data / np.sqrt(len(data)))
    return Cell(float(mean), float(err), len(data), partial)


def _average(cells: Iterable[Cell | None]) -> float | None:
    total, n = 0.0, 0
    for cell in cells:
        if cell is None:
            return None
        total, n = total + cell.mean, n + 1
    return total / n if n else None


def _table_row(row: Row, cells: Mapping[str, Cell | None], runs: Sequence[Run]) -> TableRow:
    spaces = sorted({run.space for run in runs if run.space is not None})
    steps = tuple(sorted({run.steps for run in runs}))
    space = ", ".join(spaces) or None
    return TableRow(row, cells, _average(cells.values()), steps, len(runs), space)


def dataset_tables(runs: Runs, selection: str = "train-val") -> list[Table]:
    """One table per dataset: targets as columns, methods as rows.

    Args:
        runs: the runs, in any order.
        selection: `train-val`, `leave-one-out` or `oracle`.
    """
    selected = select_runs(runs, selection)
    tables = []
    for dataset in selected.datasets:
        columns, spec = selected.columns[dataset], _spec(dataset)
        rows = []
        for row in selected.rows(dataset):
            values = selected.values.get((dataset, row), {})
            cells = {c: cell_of(values[c].values()) if c in values else None for c in columns}
            rows.append(_table_row(row, cells, selected.by_method[dataset, row]))
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
        own = [run for d in selected.datasets for run in selected.by_method.get((d, row), ())]
        rows.append(_table_row(row, cells, own))
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
        selection: `train-val`, `leave-one-out` or `oracle`.
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
class Cost:
    """What a method's steps cost, beside what they bring."""

    dataset: str
    row: Row
    seconds_per_step: float
    relative: float
    """To SGD under the same algorithm and averaging; to the cheapest method where SGD is missing"""
    passes: int | None
    """Forward and backward passes in a step, where the optimizer is known."""
    memory_gb: float | None
    accuracy: Cell | None


def cost_table(runs: Runs, selection: str = "train-val") -> list[Cost]:
    """The paper's Table 3: time and memory against accuracy.

    The time is the median over all evaluations of all runs; the first of each run is left out where
    there are others, because its few steps pay for the set-up.
    """
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
            memory = [
                record.memory_gb
                for run in selected.by_method[dataset, row]
                for record in run.records
                if record.memory_gb is not None
            ]
            known = row.optimizer in optimizer_names()
            costs.append(
                Cost(
                    dataset,
                    row,
                    seconds,
                    seconds / base if base > 0 else 1.0,
                    optimizer_spec(row.optimizer).passes if known else None,
                    max(memory, default=None),
                    _dataset_cell(selected, dataset, row),
                )
            )
    return costs


Unit = Literal["targets", "trials"]


@dataclass(frozen=True)
class Paired:
    """The mean difference of two methods, in points of percent, over what both have."""

    a: str
    b: str
    difference: float
    """Positive where `a` is better."""
    err: float
    """Standard error, from the spread between units."""
    low: float
    high: float
    level: float
    pairs: int
    """Pairs of numbers: the same dataset, target, trial, and otherwise the same method."""
    units: int
    unit: Unit
    """What is taken to be independent; of ``trials``, the targets are taken as given."""
    targets: int

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    @property
    def what(self) -> str:
        """The numbers behind the interval, in words."""
        given = "one target" if self.targets == 1 else f"these {self.targets} targets"
        of_these = f" of {given}" if self.unit == "trials" else ""
        return f"{self.pairs} pairs; interval over {self.units} {self.unit}{of_these}"


def paired(
    runs: Runs,
    a: str | Row,
    b: str | Row,
    selection: str = "train-val",
    level: float = 0.95,
    over: Unit = "targets",
) -> Paired:
    """Compare two optimizers, or two methods, on the same targets and trials.

    Differences for one target resemble each other, whatever the trial. So they are first averaged
    for each target of each dataset, and the interval is Student's over these means: it speaks of
    targets like these. Over trials, and with a single target, they are averaged for each trial: the
    interval speaks of other seeds on the same targets only.

    Args:
        runs: the runs, in any order.
        a: an optimizer, compared under every algorithm and averaging that both have; or a method,
            as a `Row` or by its name.
        b: the other.
        selection: `train-val`, `leave-one-out` or `oracle`.
        level: of the confidence interval.
        over: what is taken to be independent.
    """
    from scipy.special import stdtrit

    if over not in get_args(Unit):
        raise UserError(unknown("unit of a comparison", over, get_args(Unit)))
    selected = select_runs(runs, selection)
    optimizers = {row.optimizer for row in selected.rows()}
    whole = not {a, b} <= optimizers  # methods, not an optimizer under whatever algorithm
    of_a, of_b = (_matcher(selected, given, whole) for given in (a, b))
    name_a, name_b = (given.name if isinstance(given, Row) else given for given in (a, b))
    values: dict[bool, dict[tuple[object, ...], float]] = {True: {}, False: {}}
    for place, chosen in selected.chosen.items():
        rest = () if whole else (place.row.algorithm, place.row.averaging)
        key = (place.dataset, place.column, place.trial, *rest)
        for mine, side in ((of_a, True), (of_b, False)):
            if mine(place.row):
                values[side][key] = 100 * chosen.accuracy
    shared = sorted(set(values[True]) & set(values[False]), key=repr)
    if len(shared) < 2:
        raise UserError(
            f"{name_a} and {name_b} have {len(shared)} targets and trials in common: a comparison "
            "needs at least 2. Run both on the same targets with the same trial seeds"
        )
    targets = {key[:2] for key in shared}
    unit: Unit = over if len(targets) > 1 else "trials"
    by_unit: dict[object, list[float]] = defaultdict(list)
    for key in shared:
        by_unit[key[:2] if unit == "targets" else key[2]].append(
            values[True][key] - values[False][key]
        )
    if len(by_unit) < 2:  # of one target perhaps, under several algorithms
        raise UserError(
            f"{name_a} and {name_b} have one trial in common: a comparison over trials needs at "
            "least 2. Run both on more targets, or with more trial seeds"
        )
    if unit == "trials" and len(targets) > 1 and _uneven(shared):
        raise UserError(
            f"{name_a} and {name_b} do not have the same targets in every trial: a comparison over "
            "trials would mix the two up. Finish the runs, or compare over targets"
        )
    means = np.array([np.mean(differences) for differences in by_unit.values()])
    difference = float(np.mean(means))
    err = float(np.std(means, ddof=1) / np.sqrt(len(means)))
    reach = float(stdtrit(len(means) - 1, (1 + level) / 2)) * err
    return Paired(
        name_a,
        name_b,
        difference,
        err,
        difference - reach,
        difference + reach,
        level,
        len(shared),
        len(means),
        unit,
        len(targets),
    )


def _uneven(keys: Iterable[tuple[object, ...]]) -> bool:
    """Whether trials, third in the keys, do not come with the same targets and methods."""
    by_trial: dict[object, set[tuple[object, ...]]] = defaultdict(set)
    for key in keys:
        by_trial[key[2]].add(key[:2] + key[3:])
    first, *others = by_trial.values()
    return any(other != first for other in others)


def _matcher(selected: Selected, given: str | Row, whole: bool) -> Callable[[Row], bool]:
    if not whole:
        return lambda row: row.optimizer == given
    rows = {row.name: row for row in selected.rows()}
    name = given.name if isinstance(given, Row) else given
    if name not in rows:
        known = dict.fromkeys([*(row.optimizer for row in rows.values()), *rows])
        raise UserError(unknown("optimizer or method", name, known))
    return lambda row: row == rows[name]
