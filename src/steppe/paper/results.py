"""Results of an experiment: our numbers with the paper's next to them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from steppe.reports import (
    Row,
    across_datasets,
    cost_table,
    dataset_tables,
    load_runs,
    optimizer_by_algorithm,
    paired,
    select_runs,
)
from steppe.reports.cells import Cell
from steppe.reports.columns import PAIRED, values
from steppe.reports.curvature import Comparison
from steppe.reports.differences import Paired, Unit
from steppe.reports.tables import ALL, Selected, StepCost
from steppe.strangers import command
from steppe.sweeps import Grid, Job, Sweep, jobs, look

from .experiment import Arm
from .numbers import Beside, lookup
from .order import Case, Order, Rate, grids as planned_grids, methods

AVERAGE = "Avg."


class Variant(NamedTuple):
    """An arm of an experiment and its selected runs."""

    arm: Arm
    selected: Selected


@dataclass(frozen=True)
class Results:
    """Results of an experiment.

    Attributes:
        order: the experiment as it was run.
        rates: learning rates; empty if hyperparameters were sampled.
        variants: the arms that have results.
        problems: caveats for the reader.
        curvature: curvature of the final models, if it was measured.
    """

    order: Order
    rates: Mapping[Case, Rate]
    variants: tuple[Variant, ...]
    problems: tuple[str, ...] = ()
    curvature: Comparison | None = None


class TrainingCost(NamedTuple):
    """Training time of a method."""

    seconds: float
    """Time of a run's updates."""
    relative: float | None
    """Relative to SGD in the same arm, or in the first arm that has SGD."""
    paper: Beside | None
    """The paper's seconds."""
    step: StepCost
    """Cost of one update, on the first dataset if there are several."""


class Number(NamedTuple):
    """An accuracy in percent: ours and the paper's."""

    ours: Cell | None
    paper: Beside | None


class Line(NamedTuple):
    """A method of an arm, on one dataset or `all`."""

    dataset: str
    method: Row
    arm: Arm
    cells: Mapping[str, Number]
    """By target, or by dataset for `all`; `Avg.` is the mean."""
    spent: TrainingCost | None


def result_folders(sweep: Sweep, grids: Iterable[Grid]) -> list[tuple[str, Path]]:
    """The tag and result folder of every run of the grids, including runs without a result."""
    return [(grid.tag, Job(sweep.folder(name)).result) for grid in grids for name, _ in jobs(grid)]


def gather(order: Order, sweep: Sweep, rates: Mapping[Case, Rate]) -> Results:
    """Read the results of an experiment's runs."""
    found: list[Variant] = []
    problems: list[str] = []
    columns = {
        name: {targets: frozenset(targets.split("+")) for targets in order.held_out(name)}
        for name in order.datasets
    }
    planned = result_folders(sweep, planned_grids(order, rates))
    done = [(tag, path) for tag, path in planned if path.exists()]
    for tag in dict.fromkeys(tag for tag, _ in done):
        loaded = load_runs([path for own, path in done if own == tag])
        problems += loaded.problems
        for arm in order.arms:
            own = [run for run in loaded.runs if arm.tag == tag and run.row in methods(arm)]
            if own:
                selected = select_runs(own, "train-val")
                shown = {name: columns[name] for name in selected.datasets}
                found.append(Variant(arm, replace(selected, columns=shown)))
    if missing := len(planned) - len(done):
        problems.append(f"{missing:,} of {len(planned):,} runs have no result: {look_at(sweep)}")
    return Results(order, {} if order.scale.draws else rates, tuple(found), tuple(problems))


def look_at(sweep: Sweep) -> str:
    """How many runs failed, and the command that shows why."""
    failed = look(sweep).counts["failed"]
    said = f"{failed:,} failed, " if failed else ""
    return f"{said}see: {command('steppe', 'sweep', 'status', sweep.path)}"


def _paper(results: Results, arm: Arm, dataset: str, column: str, method: Row) -> Beside | None:
    if (dataset, column) == (ALL, AVERAGE) and not _has_all(results.order):
        return None
    target = "" if column == AVERAGE else column
    where = (short(target), "") if dataset == ALL else (short(dataset), target)
    return lookup(results.order.experiment.tables, method, *where, arm.steps)


def _has_all(order: Order) -> bool:
    """Whether all of the paper's datasets are run, so that its means are comparable with ours."""
    return {short(name) for name in order.datasets} == set(order.experiment.datasets)


def short(dataset: str) -> str:
    """The name of a dataset, without the path of a folder."""
    return Path(dataset).name


def lines(results: Results) -> Iterator[Line]:
    """All results, table by table."""
    spent = costs(results)
    for arm, selected in results.variants:
        across = across_datasets(selected)
        means = {row.row: row.cells for row in across.rows}
        whole = optimizer_by_algorithm(selected).cells
        tables = [*([across] if len(selected.datasets) > 1 else []), *dataset_tables(selected)]
        for table in tables:
            for row in sorted(table.rows, key=lambda r: methods(arm).index(r.row)):
                mean = row.average  # has no error over trials
                if mean is not None:
                    over_all = whole[row.row] or mean._replace(partial=True)
                    mean = means[row.row].get(table.dataset, over_all)
                cells = {
                    column: Number(cell, _paper(results, arm, table.dataset, column, row.row))
                    for column, cell in {**row.cells, AVERAGE: mean}.items()
                }
                cost = spent.get((table.dataset, arm, row.row))
                yield Line(table.dataset, row.row, arm, cells, cost)


def costs(results: Results) -> dict[tuple[str, Arm, Row], TrainingCost]:
    """Training cost by dataset (`all` for the mean), arm and method."""
    seconds: dict[tuple[str, Arm, Row], list[float]] = {}
    steps: dict[tuple[str, Arm, Row], StepCost] = {}
    for arm, selected in results.variants:
        for cost in cost_table(selected):
            spent = cost.seconds_per_step * (max(run.steps for run in cost.runs) - 1)
            for dataset in (cost.dataset, ALL):
                seconds.setdefault((dataset, arm, cost.row), []).append(spent)
                steps.setdefault((dataset, arm, cost.row), cost)
    means = {key: statistics.fmean(found) for key, found in seconds.items()}
    sgd = Row("ERM", "sgd", "none")
    order = results.order
    same = _has_all(order) and order.scale.share == 1
    found = {}
    for (dataset, arm, row), value in means.items():
        bases = [means.get((dataset, some, sgd)) for some in (arm, *order.arms)]
        base = next((b for b in bases if b), None)
        paper = lookup(order.experiment.tables, row, steps=arm.steps, quantity="seconds")
        beside = paper if same and dataset == ALL else None
        relative = value / base if base else None
        found[dataset, arm, row] = TrainingCost(value, relative, beside, steps[dataset, arm, row])
    return found


def comparisons(results: Results) -> list[Paired]:
    """Compare FAD with every other optimizer on the same targets and trials.

    Each comparison has an interval over targets and, if all runs are done, another over trials. An
    arm with only FAD is compared with the optimizers of the arm without a tag.
    """
    found = []
    for arm, selected in results.variants:
        alone = {row.optimizer for row in selected.rows()} == {"fad"}
        others = [v.selected.runs for v in results.variants if not v.arm.tag and v.arm != arm]
        runs = [*selected.runs, *(run for some in others for run in some if alone)]
        joint = select_runs(runs, "train-val")
        setting = results.order.setting(arm)
        for a, b in product(selected.rows(), joint.rows()):
            rivals = a.optimizer == "fad" != b.optimizer and a == b._replace(optimizer="fad")
            if rivals:
                ours = ", ".join(filter(None, (a.name, setting)))
                other = b.name if alone else ", ".join(filter(None, (b.name, setting)))
                found += [
                    replace(paired(joint, a, b, over=over), a=ours, b=other)
                    for over in _units(joint, a, b)
                ]
    return found


def _units(selected: Selected, a: Row, b: Row) -> Iterator[Unit]:
    """The units that two methods' shared results allow intervals over."""
    seen = [{p._replace(row=a) for p in selected.chosen if p.row == row} for row in (a, b)]
    shared = seen[0] & seen[1]
    targets, trials = {p[:3] for p in shared}, {p.trial for p in shared}
    if len(shared) > 1:
        yield "targets"
    if len(targets) > 1 < len(trials) and len(shared) == len(targets) * len(trials):
        yield "trials"


def made(results: Results) -> dict[str, Any]:
    """Settings of the runs that a reader needs to know."""
    configs = [run.config for variant in results.variants for run in variant.selected.runs]

    def all_of(key: str) -> list[Any]:
        found = {str(c[key]) if key == "weights" else c[key] for c in configs if key in c}
        return sorted(map(short, found) if key == "weights" else found)

    return {
        "trials": results.order.scale.trials,
        "draws": results.order.scale.draws,
        **{key: all_of(key) for key in ("steps", "batch_size", "backbone", "weights")},
        "overrides": list(results.order.overrides),
    }


def to_json(results: Results) -> dict[str, Any]:
    order = results.order
    return {
        "experiment": order.experiment.name,
        "about": order.experiment.about,
        "in the paper": order.experiment.label or None,
        "scale": order.scale.name,
        **made(results),
        "problems": list(results.problems),
        "results": [
            {
                "dataset": short(line.dataset),
                "column": short(column),
                **line.method._asdict(),
                "setting": order.setting(line.arm) or None,
                "mean": ours and ours.mean,
                "err": ours.err if ours and ours.n > 1 else None,
                "trials": ours and ours.n,
                "paper": paper and paper.value,
                "paper's lines": paper and list(paper.lines),
                **({"copied by the paper": True} if paper and paper.copied else {}),
            }
            for line in lines(results)
            for column, (ours, paper) in line.cells.items()
        ],
        "costs": [
            {
                "dataset": short(dataset),
                **row._asdict(),
                "setting": order.setting(arm) or None,
                "seconds": cost.seconds,
                "over SGD": cost.relative,
                "paper": cost.paper and cost.paper.value,
            }
            for (dataset, arm, row), cost in costs(results).items()
        ],
        "paired": [values(PAIRED, compared) for compared in comparisons(results)],
        "learning rates": [
            {
                "dataset": short(case.dataset),
                "targets": case.targets,
                **case.method._asdict(),
                "lr": rate.lr,
                "validation": {f"{lr:g}": value for lr, value in rate.validation.items()},
            }
            for case, rate in results.rates.items()
        ],
        "curvature": results.curvature and results.curvature.to_json(),
    }
