"""What a recipe's runs gave, in tables with the paper's numbers beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    across_datasets,
    cost_table,
    dataset_tables,
    load_runs,
    paired,
    paired_grid,
    select_runs,
)
from steppe.reports.render import MISSING, Text, cell_text
from steppe.sweeps import Job, Sweep

from .orders import TUNING, Order, Place, Rate
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
        seconds: of the updates of a run, in the mean over datasets.
        relative: to SGD's in the same part, or else in the first part that has it.
        paper: the paper's seconds.
    """

    seconds: float
    relative: float | None
    paper: Beside | None


def tagged(sweep: Sweep, tag: str) -> list[Path]:
    """The finished runs of a sweep that have a tag."""
    names = [name for name, axes in sweep.axes.items() if axes.get("tag", "") == tag]
    results = (Job(sweep.folder(name)).result for name in names)
    return [result for result in results if result.exists()]


def tuning_runs(sweep: Sweep) -> list[Path]:
    """The finished runs of a sweep that tune learning rates."""
    tags = {str(axes.get("tag", "")) for axes in sweep.axes.values()}
    return [path for tag in sorted(tags) if tag.startswith(TUNING) for path in tagged(sweep, tag)]


def gather(order: Order, sweep: Sweep, rates: Mapping[Place, Rate]) -> Results:
    """Reads what the runs of a recipe gave.

    Args:
        order: what was run.
        sweep: where.
        rates: the learning rates that were tuned.
    """
    found: list[Variant] = []
    problems: list[str] = []
    columns = {Path(name).name: tuple(order.held_out(name)) for name in order.datasets}
    for tag in dict.fromkeys(part.tag for part in order.parts):
        if not (folders := tagged(sweep, tag)):
            continue
        loaded = load_runs(folders)
        problems += loaded.problems
        for part in order.parts:
            own = [run for run in loaded.runs if part.tag == tag and _of(part, run.row)]
            if own:
                found.append(Variant(part, replace(select_runs(own, "train-val"), columns=columns)))
    planned = sum(not str(a.get("tag", "")).startswith(TUNING) for a in sweep.axes.values())
    done = sum(len(variant.selected.runs) for variant in found)
    if done < planned:
        problems.append(f"{planned - done:,} of {planned:,} runs have no result yet")
    tuned = {} if order.scale.draws else dict(rates)
    return Results(order, tuned, tuple(found), tuple(problems))


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
        return lookup(tables, method, dataset, target, steps)
    if column != AVERAGE:
        return lookup(tables, method, column, "", steps)
    # The paper's mean is over all its datasets: beside any other it would mislead.
    ours = {Path(name).name for name in results.order.datasets}
    whole = ours == set(results.order.recipe.datasets)
    return lookup(tables, method, "", "", steps) if whole else None


def lines(results: Results) -> Iterator[Line]:
    """All numbers, table by table."""
    for part, selected in results.variants:
        across = across_datasets(selected)
        means = {row.row: row for row in across.rows}
        tables = [*([across] if len(selected.datasets) > 1 else []), *dataset_tables(selected)]
        for table in tables:
            for row in sorted(table.rows, key=lambda r: _place(part, r.row)):
                cells = {**row.cells, AVERAGE: _mean(table, row, means[row.row])}
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


def _mean(table: Table, row: TableRow, across: TableRow) -> Cell | None:
    """The mean of a row: of a dataset's targets with its error over trials."""
    if row.avg is None:
        return None
    return across.cells.get(table.dataset) or Cell(row.avg, 0.0, 1, row.partial)


def costs(results: Results) -> dict[tuple[Part, Row], Cost]:
    """What training took, by part and method."""
    found: dict[tuple[Part, Row], list[float]] = {}
    for part, selected in results.variants:
        for cost in cost_table(selected):
            steps = max(run.steps for run in selected.by_method[cost.dataset, cost.row])
            found.setdefault((part, cost.row), []).append(cost.seconds_per_step * (steps - 1))
    seconds = {key: statistics.fmean(values) for key, values in found.items()}
    base = {part: s for (part, row), s in seconds.items() if row == Row("ERM", "sgd", "none")}
    of_any = next(iter(base.values()), None)
    recipe = results.order.recipe
    own = any(Path(name).name in recipe.datasets for name in results.order.datasets)
    tables = recipe.tables if own else ()
    return {
        (part, row): Cost(
            value,
            value / sgd if (sgd := base.get(part, of_any)) else None,
            lookup(tables, row, steps=part.steps, quantity="seconds"),
        )
        for (part, row), value in seconds.items()
    }


def comparisons(results: Results) -> list[Paired]:
    """FAD against every other optimizer, on the same targets and trials."""
    found = []
    for _, selected in results.variants:
        names = sorted({row.optimizer for row in selected.rows()})
        for name in names if "fad" in names else ():
            pairs = [place for place in selected.chosen if place.row.optimizer in ("fad", name)]
            if name != "fad" and len({place[2:] for place in pairs}) > 1:
                found.append(paired(selected, "fad", name))
    return found


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
    if results.order.tunes and results.rates:
        found.append(rates_grid(results))
    return found


def _grid(
    results: Results,
    dataset: str,
    given: Sequence[Line],
    spent: Mapping[tuple[Part, Row], Cost],
) -> Grid:
    columns = list(dict.fromkeys(line.column for line in given))
    columns.sort(key=lambda column: column == AVERAGE)
    rows: dict[tuple[Row, Part], dict[str, Line]] = {}
    for line in given:
        rows.setdefault((line.method, line.part), {})[line.column] = line
    labelled = any(part.label for _, part in rows)
    best = {
        column: max((text for own in rows.values() if (text := _shown(own, column))), key=float)
        for column in columns
        if any(_shown(own, column) for own in rows.values())
    }
    shown = []
    for (method, part), own in rows.items():
        texts = [Text(method.name), *([Text(part.label)] if labelled else [])]
        for column in columns:
            top = bool(text := _shown(own, column)) and text == best[column]
            texts.append(Text(_beside(own.get(column)), top))
        if spent:
            texts += _cost_texts(spent.get((part, method)))
        shown.append(tuple(texts))
    names = ("method", *(["setting"] if labelled else []))
    after = ("seconds", "over SGD") if spent else ()
    title = "All datasets" if dataset == ALL else dataset
    return Grid(
        f"{title}: {results.order.recipe.about}",
        (*names, *columns, *after),
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
        tried = ", ".join(f"{lr:g}: {value:.1f}" for lr, value in rate.validation.items())
        name = Path(place.dataset).name
        cells = (name, place.targets, place.method.name, f"{rate.lr:g}", tried)
        shown.append(tuple(map(Text, cells)))
    headings = ("dataset", "held out", "method", "learning rate", "tried: validation accuracy")
    note = "chosen by validation images of the training domains, in short runs of the first trial"
    return Grid("Learning rates", headings, tuple(shown), 3, note)


def to_json(results: Results) -> dict[str, Any]:
    """Everything as plain values."""
    order = results.order
    return {
        "recipe": order.recipe.name,
        "about": order.recipe.about,
        "in the paper": order.recipe.label or None,
        "scale": order.scale.name,
        "trials": order.scale.trials,
        "draws": order.scale.draws,
        "problems": list(results.problems),
        "results": [
            {
                "dataset": line.dataset,
                "column": line.column,
                **line.method._asdict(),
                "setting": line.part.label or None,
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
                **row._asdict(),
                "setting": part.label or None,
                "seconds": cost.seconds,
                "over SGD": cost.relative,
                "paper": None if cost.paper is None else cost.paper.value,
            }
            for (part, row), cost in costs(results).items()
        ],
        "paired": [
            {
                "a": c.a,
                "b": c.b,
                "points": c.difference,
                "interval": [c.low, c.high],
                "over": c.what,
            }
            for c in comparisons(results)
        ],
        "learning rates": [
            {
                "dataset": Path(place.dataset).name,
                "targets": place.targets,
                **place.method._asdict(),
                "lr": rate.lr,
                "validation": {f"{lr:g}": value for lr, value in rate.validation.items()},
            }
            for place, rate in results.rates.items()
        ],
        "curvature": None if results.curvature is None else results.curvature.to_json(),
    }
