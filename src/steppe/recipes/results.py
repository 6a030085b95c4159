"""What a recipe's runs gave, in tables with the paper's numbers beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from steppe.reports import (
    Cell,
    Comparison,
    Grid,
    Paired,
    Row,
    Selected,
    Table,
    TableRow,
    Unit,
    across_datasets,
    cost_table,
    dataset_tables,
    load_runs,
    optimizer_by_algorithm,
    paired,
    paired_grid,
    select_runs,
)
from steppe.reports.curvature import comparison_table
from steppe.reports.render import MISSING, Text, cell_text
from steppe.strangers import command
from steppe.sweeps import Grid as PlannedGrid, Job, Sweep, jobs, look

from .orders import Order, Place, Rate, grids as plan_grids
from .paper import Beside, lookup
from .recipe import Part

ALL = "all"
"""In place of a dataset's name: the mean over datasets."""


class Variant(NamedTuple):
    """A part of a recipe, and what was chosen among its runs."""

    part: Part
    selected: Selected


@dataclass(frozen=True)
class Results:
    """Everything that a recipe gave.

    Attributes:
        order: what was run.
        rates: the learning rates; empty where hyper-parameters were drawn.
        variants: its parts, those that have results.
        problems: what a reader should know.
        curvature: of the final models, where it was measured.
    """

    order: Order
    rates: Mapping[Place, Rate]
    variants: tuple[Variant, ...]
    problems: tuple[str, ...] = ()
    curvature: Comparison | None = None


@dataclass(frozen=True)
class Line:
    """One number of a recipe.

    Attributes:
        dataset: its name, or `all`.
        column: the target, or a dataset's name where `dataset` is `all`; `Avg.` for the mean.
        method: algorithm, optimizer and averaging.
        part: whose runs they are.
        cell: ours, in per cent.
        paper: the paper's, if it has one.
    """

    dataset: str
    column: str
    method: Row
    part: Part
    cell: Cell | None
    paper: Beside | None


AVERAGE = "Avg."


@dataclass(frozen=True)
class Cost:
    """What a method's training took.

    Attributes:
        seconds: of the updates of a run.
        relative: to SGD's in the same part, or else in the first part that has it.
        paper: the paper's seconds.
    """

    seconds: float
    relative: float | None
    paper: Beside | None


class Finished(NamedTuple):
    """The runs of some grids that have a result, by tag, and how many there are in all."""

    by_tag: Mapping[str, Sequence[Path]]
    total: int

    @property
    def paths(self) -> list[Path]:
        """The runs of all tags."""
        return [path for paths in self.by_tag.values() for path in paths]


def finished(sweep: Sweep, grids: Iterable[PlannedGrid]) -> Finished:
    """Looks for the runs of some grids; others in the sweep are left out."""
    found: dict[str, list[Path]] = {}
    total = 0
    for grid in grids:
        results = [Job(sweep.folder(name)).result for name, _ in jobs(grid)]
        total += len(results)
        found.setdefault(grid.tag, []).extend(path for path in results if path.exists())
    return Finished(found, total)


def gather(order: Order, sweep: Sweep, rates: Mapping[Place, Rate]) -> Results:
    """Reads what the runs of a recipe gave.

    Args:
        order: what was run.
        sweep: where; it may have other runs too.
        rates: the learning rates that were tuned.
    """
    found: list[Variant] = []
    problems: list[str] = []
    columns = {name: tuple(order.held_out(name)) for name in order.datasets}
    done = finished(sweep, plan_grids(order, rates))
    for tag, folders in done.by_tag.items():
        if not folders:
            continue
        loaded = load_runs(folders)
        problems += loaded.problems
        for part in order.parts:
            own = [run for run in loaded.runs if part.tag == tag and _of(part, run.row)]
            if own:
                found.append(Variant(part, replace(select_runs(own, "train-val"), columns=columns)))
    if missing := done.total - len(done.paths):
        problems.append(f"{missing:,} of {done.total:,} runs have no result: {look_at(sweep)}")
    tuned = {} if order.scale.draws else dict(rates)
    return Results(order, tuned, tuple(found), tuple(problems))


def look_at(sweep: Sweep) -> str:
    """How many runs failed, and where to read why."""
    failed = look(sweep).counts["failed"]
    said = f"{failed:,} failed, " if failed else ""
    return f"{said}see: {command('steppe', 'sweep', 'status', sweep.path)}"


def _of(part: Part, row: Row) -> bool:
    return (
        row.optimizer in part.optimizers
        and row.algorithm in part.algorithms
        and row.averaging in part.averaging
    )


def _paper(results: Results, part: Part, dataset: str, column: str, method: Row) -> Beside | None:
    tables, steps = results.order.recipe.tables, part.steps
    if dataset != ALL:
        target = "" if column == AVERAGE else column
        return lookup(tables, method, _short(dataset), target, steps)
    if column != AVERAGE:
        return lookup(tables, method, _short(column), "", steps)
    return lookup(tables, method, "", "", steps) if _has_all(results.order) else None


def _has_all(order: Order) -> bool:
    """Whether it has the paper's datasets: its means are over those, and mislead beside others."""
    return {_short(name) for name in order.datasets} == set(order.recipe.datasets)


def _short(dataset: str) -> str:
    """The name of a dataset; of a folder, without where it lies."""
    return Path(dataset).name


def lines(results: Results) -> Iterator[Line]:
    """All numbers, table by table."""
    for part, selected in results.variants:
        across = across_datasets(selected)
        means = {row.row: row for row in across.rows}
        whole = optimizer_by_algorithm(selected).cells
        tables = [*([across] if len(selected.datasets) > 1 else []), *dataset_tables(selected)]
        for table in tables:
            for row in sorted(table.rows, key=lambda r: _place(part, r.row)):
                cells = {**row.cells, AVERAGE: _mean(table, row, means[row.row], whole[row.row])}
                for column, cell in cells.items():
                    beside = _paper(results, part, table.dataset, column, row.row)
                    yield Line(table.dataset, column, row.row, part, cell, beside)


def _place(part: Part, row: Row) -> tuple[int, ...]:
    """Where the recipe, and so the paper, has a method."""
    return (
        part.algorithms.index(row.algorithm),
        part.averaging.index(row.averaging),
        part.optimizers.index(row.optimizer),
    )


def _mean(table: Table, row: TableRow, across: TableRow, whole: Cell | None) -> Cell | None:
    """The mean of a row, with its error over trials."""
    if row.avg is None:
        return None
    if table.dataset != ALL:
        return across.cells[table.dataset]
    return whole or Cell(row.avg, 0.0, 1, partial=True)


def costs(results: Results) -> dict[tuple[str, Part, Row], Cost]:
    """What training took, by dataset (or `all`, the mean), part and method."""
    seconds: dict[tuple[str, Part, Row], list[float]] = {}
    for part, selected in results.variants:
        for cost in cost_table(selected):
            steps = max(run.steps for run in selected.by_method[cost.dataset, cost.row])
            spent = cost.seconds_per_step * (steps - 1)
            for dataset in (cost.dataset, ALL):
                seconds.setdefault((dataset, part, cost.row), []).append(spent)
    means = {key: statistics.fmean(values) for key, values in seconds.items()}
    sgd = Row("ERM", "sgd", "none")
    order = results.order
    same = _has_all(order) and order.scale.share == 1
    found = {}
    for (dataset, part, row), value in means.items():
        bases = [means.get((dataset, p, sgd)) for p in (part, *order.parts)]
        base = next((b for b in bases if b), None)
        paper = lookup(order.recipe.tables, row, steps=part.steps, quantity="seconds")
        beside = paper if same and dataset == ALL else None
        found[dataset, part, row] = Cost(value, value / base if base else None, beside)
    return found


def comparisons(results: Results) -> list[Paired]:
    """FAD against every other optimizer, on the same targets and trials.

    The interval is over the targets, and once more over the trials of all targets if they are done.
    Where a part has FAD alone, it is compared with the optimizers of the part without a tag.
    """
    plain = [v.selected.runs for v in results.variants if not v.part.tag]
    found = []
    for part, selected in results.variants:
        alone = {row.optimizer for row in selected.rows()} == {"fad"}
        runs = [*selected.runs, *(run for some in plain for run in some if alone)]
        joint = select_runs(runs, "train-val")
        setting = results.order.setting(part)
        for a, b in product(selected.rows(), joint.rows()):
            rivals = a.optimizer == "fad" != b.optimizer and a == b._replace(optimizer="fad")
            if rivals:
                named = ", ".join(filter(None, (a.name, setting)))
                other = b.name if alone else ", ".join(filter(None, (b.name, setting)))
                found += [
                    replace(paired(joint, a, b, over=over), a=named, b=other)
                    for over in _units(joint, a, b)
                ]
    return found


def _units(selected: Selected, a: Row, b: Row) -> Iterator[Unit]:
    """What intervals can be taken over, of what two methods have in common."""
    seen = [{p._replace(row=a) for p in selected.chosen if p.row == row} for row in (a, b)]
    shared = seen[0] & seen[1]
    targets, trials = {p[:3] for p in shared}, {p.trial for p in shared}
    if len(shared) > 1:
        yield "targets"
    if len(targets) > 1 < len(trials) and len(shared) == len(targets) * len(trials):
        yield "trials"


def grids(results: Results) -> list[Grid]:
    """The tables to be shown."""
    by_dataset: dict[str, list[Line]] = {}
    for line in lines(results):
        by_dataset.setdefault(line.dataset, []).append(line)
    spent = costs(results) if results.order.recipe.timed else {}
    ordered = sorted(by_dataset, key=lambda name: name != ALL)
    found = [_grid(results, name, by_dataset[name], spent) for name in ordered]
    if found and (compared := comparisons(results)):
        found.append(paired_grid(compared, "train-val"))
    if results.curvature is not None:
        found.append(curvature_grid(results.curvature))
    if results.order.tunes and results.rates:
        found.append(rates_grid(results))
    return found


def curvature_grid(compared: Comparison) -> Grid:
    """The largest eigenvalues and traces of the methods' Hessians."""
    table = comparison_table(compared)
    cells = zip(*(column.cells for column in table.columns), strict=True)
    return Grid(
        f"Hessian of the {compared.about}",
        tuple(str(column.header) for column in table.columns),
        tuple(tuple(Text(str(cell)) for cell in line) for line in cells),
        1,
        compared.legend,
    )


def _grid(
    results: Results,
    dataset: str,
    given: Sequence[Line],
    spent: Mapping[tuple[str, Part, Row], Cost],
) -> Grid:
    columns = list(dict.fromkeys(line.column for line in given))
    columns.sort(key=lambda column: column == AVERAGE)
    rows: dict[tuple[Row, Part], dict[str, Line]] = {}
    for line in given:
        rows.setdefault((line.method, line.part), {})[line.column] = line
    labelled = any(results.order.setting(part) for _, part in rows)
    best = {
        column: max((text for own in rows.values() if (text := _shown(own, column))), key=float)
        for column in columns
        if any(_shown(own, column) for own in rows.values())
    }
    shown = []
    for (method, part), own in rows.items():
        texts = [Text(method.name), *([Text(results.order.setting(part))] if labelled else [])]
        for column in columns:
            top = bool(text := _shown(own, column)) and text == best[column]
            texts.append(Text(_beside(own.get(column)), top))
        if spent:
            texts += _cost_texts(spent.get((dataset, part, method)))
        shown.append(tuple(texts))
    names = ("method", *(["setting"] if labelled else []))
    after = ("seconds", "over SGD") if spent else ()
    title = "All datasets" if dataset == ALL else _short(dataset)
    return Grid(
        f"{title}: {results.order.recipe.about}",
        (*names, *map(_short, columns), *after),
        tuple(shown),
        len(names),
        _note(results, given),
    )


def _shown(own: Mapping[str, Line], column: str) -> str:
    """The mean as it is shown; empty where it is missing, or of a part of the targets."""
    cell = own[column].cell if column in own else None
    return "" if cell is None or cell.partial else f"{cell.mean:.1f}"


def _beside(line: Line | None) -> str:
    if line is None:
        return MISSING
    ours = cell_text(line.cell)
    return ours if line.paper is None else f"{ours} ({line.paper.value:.1f})"


def _cost_texts(cost: Cost | None) -> list[Text]:
    if cost is None:
        return [Text(MISSING)] * 2
    paper = "" if cost.paper is None else f" ({cost.paper.value:,.0f})"
    relative = MISSING if cost.relative is None else f"{cost.relative:.2f}"
    ours = f"{cost.seconds:,.0f}" if cost.seconds >= 10 else f"{cost.seconds:.2g}"
    return [Text(ours + paper), Text(relative)]


def _note(results: Results, given: Sequence[Line]) -> str:
    said = ["accuracy on the held-out domain in per cent, selected by training-domain validation"]
    if any(line.paper for line in given):
        said.append("in brackets the paper's (ResNet-50, its own updates and search)")
    if any(line.method.averaging == "sma" and line.paper for line in given):
        said.append("EoA also ensembles the averages ('steppe sweep ensemble'): not done here")
    return "; ".join(said)


def rates_grid(results: Results) -> Grid:
    """The learning rates that were tried, and which was chosen."""
    shown = []
    for place, rate in results.rates.items():
        tried = ", ".join(
            f"{lr:g}: {'diverged' if value is None else f'{value:.1f}'}"
            for lr, value in rate.validation.items()
        )
        cells = (_short(place.dataset), place.targets, place.method.name, f"{rate.lr:g}", tried)
        shown.append(tuple(map(Text, cells)))
    headings = ("dataset", "held out", "method", "learning rate", "tried: validation accuracy")
    note = "chosen by validation images of the training domains, in short runs of the first trial"
    return Grid("Learning rates", headings, tuple(shown), 3, note + _at_the_edge(results.rates))


def _at_the_edge(rates: Mapping[Place, Rate]) -> str:
    """How many rates are the last that was tried, so that one beyond may be better."""
    tried = [rate for rate in rates.values() if len(rate.validation) > 1]
    edges = {
        "lowest": sum(rate.lr == min(rate.validation) for rate in tried),
        "highest": sum(rate.lr == max(rate.validation) for rate in tried),
    }
    said = [f"{n} of {len(tried)} are the {edge} tried" for edge, n in edges.items() if n]
    return "".join(f"; {text}" for text in said) + (" (--factors tries others)" if said else "")


def made(results: Results) -> dict[str, Any]:
    """What the runs had in common: what a reader needs to know beside the numbers."""
    configs = [run.config for variant in results.variants for run in variant.selected.runs]

    def all_of(key: str) -> list[Any]:
        found = {str(c[key]) if key == "weights" else c[key] for c in configs if key in c}
        return sorted(map(_short, found) if key == "weights" else found)

    return {
        "trials": results.order.scale.trials,
        "draws": results.order.scale.draws,
        **{key: all_of(key) for key in ("steps", "batch_size", "backbone", "weights")},
        "overrides": list(results.order.overrides),
    }


def paired_json(compared: Paired) -> dict[str, Any]:
    """A difference as plain values."""
    return {
        "a": compared.a,
        "b": compared.b,
        "points": compared.difference,
        "interval": [compared.low, compared.high],
        "over": compared.what,
    }


def to_json(results: Results) -> dict[str, Any]:
    """Everything as plain values."""
    order = results.order
    return {
        "recipe": order.recipe.name,
        "about": order.recipe.about,
        "in the paper": order.recipe.label or None,
        "scale": order.scale.name,
        **made(results),
        "problems": list(results.problems),
        "results": [
            {
                "dataset": _short(line.dataset),
                "column": _short(line.column),
                **line.method._asdict(),
                "setting": order.setting(line.part) or None,
                "mean": None if line.cell is None else line.cell.mean,
                "err": None if line.cell is None or line.cell.n < 2 else line.cell.err,
                "trials": None if line.cell is None else line.cell.n,
                "paper": None if line.paper is None else line.paper.value,
                "paper's lines": None if line.paper is None else list(line.paper.lines),
            }
            for line in lines(results)
        ],
        "costs": [
            {
                "dataset": _short(dataset),
                **row._asdict(),
                "setting": order.setting(part) or None,
                "seconds": cost.seconds,
                "over SGD": cost.relative,
                "paper": None if cost.paper is None else cost.paper.value,
            }
            for (dataset, part, row), cost in costs(results).items()
        ],
        "paired": [paired_json(compared) for compared in comparisons(results)],
        "learning rates": [
            {
                "dataset": _short(place.dataset),
                "targets": place.targets,
                **place.method._asdict(),
                "lr": rate.lr,
                "validation": {f"{lr:g}": value for lr, value in rate.validation.items()},
            }
            for place, rate in results.rates.items()
        ],
        "curvature": None if results.curvature is None else results.curvature.to_json(),
    }
