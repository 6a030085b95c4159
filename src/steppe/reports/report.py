"""Everything a report shows, from runs to plain values for the page."""

from __future__ import annotations

import base64
import datetime
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from typing import Any

from steppe import __version__
from steppe.errors import UserError

from .best import best_configs
from .cells import Cell
from .columns import COSTS, PAIRED, in_files, page_columns, values
from .differences import Paired, paired
from .measured import MeasuredRun, find_measured, page_rows
from .remarks import not_left_out, pending, remarks
from .runs import Loaded, Row, Run
from .selection import Chosen, best_step, last_step, mean_of, validation_keys
from .tables import (
    Matrix,
    Selected,
    StepCost,
    Table,
    across_datasets,
    cost_table,
    dataset_tables,
    optimizer_by_algorithm,
    select_runs,
    target_sets,
)
from .values import finite

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
    figures: Mapping[str, str] = field(default_factory=dict)
    """More figures for the page: SVG, by what they show."""

    @cached_property
    def tables(self) -> list[Table]:
        return dataset_tables(self.selected)

    @cached_property
    def across(self) -> Table | None:
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
    def cost(self) -> list[StepCost]:
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
        return best_configs(self.selected)

    def to_json(self) -> dict[str, Any]:
        """The tables as plain values, and what they were made with."""
        now = datetime.datetime.now(datetime.UTC)
        return {
            "tables": [_table_json(table) for table in self.tables],
            "selection": self.selected.selection,
            "across": _table_json(self.across) if self.across else None,
            "matrices": [_matrix_json(matrix) for matrix in self.matrices],
            "comparisons": [values(PAIRED, pair) for pair in self.comparisons],
            "cost": [values(COSTS, cost) for cost in self.cost],
            "command": self.command,
            "versions": {
                "steppe": __version__,
                "torch": metadata.version("torch"),
                "python": platform.python_version(),
            },
            "made": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "problems": list(self.problems),
        }

    def page_data(self) -> dict[str, Any]:
        """What the page draws, as plain values."""
        return {
            "title": self.title,
            **self.to_json(),
            "columns": page_columns(),
            "curves": _curves(self.selected),
            "bars": [_bars(table) for table in self.tables],
            "sensitivity": _sensitivity(self.selected),
            "flatness": page_rows(self.measured),
            "figures": {
                title: base64.b64encode(drawn.encode()).decode()
                for title, drawn in self.figures.items()
            },
        }


def _table_json(table: Table) -> dict[str, Any]:
    """Percent, unrounded; a missing cell is null."""
    return {
        "dataset": table.dataset,
        "selection": table.selection,
        "columns": list(table.columns),
        "rows": [
            {
                **row.row._asdict(),
                "cells": {name: _cell_json(row.cells[name]) for name in table.columns},
                "avg": row.average and row.average.mean,
                **values(in_files(), row),
            }
            for row in table.rows
        ],
    }


def _matrix_json(matrix: Matrix) -> dict[str, Any]:
    return {
        "dataset": matrix.dataset,
        "selection": matrix.selection,
        "methods": [{"algorithm": a, "averaging": averaging} for a, averaging in matrix.methods],
        "optimizers": list(matrix.optimizers),
        "cells": [
            [_cell_json(matrix.cells.get(Row(a, o, averaging))) for o in matrix.optimizers]
            for a, averaging in matrix.methods
        ],
    }


def _cell_json(cell: Cell | None) -> dict[str, Any] | None:
    if cell is None:
        return None
    partial = {"partial": True} if cell.partial else {}
    return {"mean": cell.mean, "err": cell.err, "n": cell.n, **partial}


def build_report(
    loaded: Loaded, selection: str = "train-val", command: str = "", title: str = "steppe report"
) -> Report:
    """Select among the runs, and note what a reader of the tables should know.

    Args:
        loaded: from `load_runs`.
        selection: one of `SELECTIONS`.
        command: what made the report, to be shown.
        title: its heading.
    """
    selected = select_runs(loaded.runs, selection)
    found = [*loaded.problems, *pending(loaded), *remarks(loaded.runs, selection)]
    if selection == "leave-one-out":
        found += not_left_out(selected)
    measured, unreadable = find_measured(loaded.runs)
    return Report(title, command, selected, tuple(found + unreadable), tuple(measured))


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
