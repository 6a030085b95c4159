"""A report on a set of runs, in any output format."""

from __future__ import annotations

import base64
import datetime
import platform
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from typing import Any

from steppe import __version__
from steppe.console import printed
from steppe.errors import UserError
from steppe.strangers import printable

from . import render
from .answer import Ranked, answer, cheapest, ranking
from .cells import Cell
from .chosen import chosen_values
from .columns import CONTRASTS, COSTS, METHODS, cost_columns, in_files, values
from .contrasts import Contrast, Contrasts, contrasts
from .followed import Followed, shared_protocol
from .measured import FLATNESS, MeasuredRun, find_measured
from .page import render_page
from .page.figures import curves, sensitivity
from .remarks import remarks
from .runs import Loaded, Row, Run
from .spent import hours
from .tables import (
    Matrix,
    Runs,
    Selected,
    StepCost,
    Table,
    across_datasets,
    cost_table,
    dataset_tables,
    optimizer_by_algorithm,
    select_runs,
    set_tables,
    target_names,
)
from .values import dumps, plain


@dataclass(frozen=True)
class Report:
    """The selected runs of a folder. Tables are computed on first use."""

    title: str
    command: str
    selected: Selected
    problems: tuple[str, ...]
    measured: tuple[MeasuredRun, ...] = ()
    """Curvature measurements of the runs that have them."""
    figures: Mapping[str, str] = field(default_factory=dict)
    """Additional figures for the page: SVG text by caption."""
    references: tuple[str, ...] = ()
    """Methods to compare all others with (default: the best and the cheapest)."""

    @cached_property
    def tables(self) -> list[Table]:
        return dataset_tables(self.selected)

    @cached_property
    def target_tables(self) -> list[Table]:
        """A table per set of several targets."""
        return set_tables(self.selected)

    @cached_property
    def protocol(self) -> Followed | None:
        return shared_protocol(self.selected.runs)

    @cached_property
    def across(self) -> Table | None:
        return across_datasets(self.selected) if len(self.selected.datasets) > 1 else None

    @cached_property
    def matrices(self) -> list[Matrix]:
        """Optimizer-by-algorithm tables, for datasets with several of both."""
        datasets: list[str | None] = [*self.selected.datasets]
        if len(datasets) > 1:
            datasets.append(None)
        found = [optimizer_by_algorithm(self.selected, dataset=name) for name in datasets]
        return [matrix for matrix in found if len(matrix.methods) > 1 < len(matrix.optimizers)]

    @cached_property
    def cost(self) -> list[StepCost]:
        return cost_table(self.selected)

    @cached_property
    def ranking(self) -> list[Ranked]:
        """Methods that have every target of every dataset, best first."""
        return ranking(self.across or next(iter(self.tables), None))

    @cached_property
    def contrasts(self) -> Contrasts:
        best = self.ranking[0].name if self.ranking else None
        return contrasts(self.selected, best, cheapest(self.cost), self.references)

    @property
    def comparisons(self) -> Sequence[Contrast]:
        return self.contrasts.pairs

    @cached_property
    def answer(self) -> list[str]:
        """Sentences: who leads, by how much, how certainly, at what cost and with what values."""
        said = answer(self.selected, self.ranking, self.contrasts, self.cost)
        if said and self.protocol:
            said.append(f"All runs follow the protocol {self.protocol.name}.")
        return said + chosen_values(self.selected, self.ranking[0].name) if self.ranking else said

    @cached_property
    def best(self) -> list[dict[str, Any]]:
        return best_configs(self.selected)

    @property
    def sections(self) -> list[render.TextTable]:
        """All tables, in reading order."""
        chosen_by = self.selected.selection
        found = [render.contrasts_text(self.contrasts, chosen_by)] if self.comparisons else []
        found += [render.accuracy_text(table) for table in (*self.tables, self.across) if table]
        found += map(render.accuracy_text, self.target_tables)
        found += map(render.matrix_text, self.matrices)
        if self.cost:
            found.append(render.cost_text(self.cost, chosen_by))
        return found

    def to_json(self) -> dict[str, Any]:
        """The tables and their provenance as plain values."""
        now = datetime.datetime.now(datetime.UTC)
        return {
            "answer": self.answer,
            "tables": [_table_json(table) for table in self.tables],
            "selection": self.selected.selection,
            "protocol": self.protocol and self.protocol.facts,
            "target_sets": [_table_json(table) for table in self.target_tables],
            "across": _table_json(self.across) if self.across else None,
            "matrices": [_matrix_json(matrix) for matrix in self.matrices],
            "comparisons": [values(CONTRASTS, pair) for pair in self.comparisons],
            "multiplicity": {"tests": self.contrasts.tests, "note": self.contrasts.note},
            "hours": hours(self.selected.runs),
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
        """Everything the HTML page draws, as plain values."""
        return {
            "title": self.title,
            **self.to_json(),
            "columns": page_columns(self.cost),
            "curves": curves(self.selected),
            "sensitivity": sensitivity(self.selected),
            "flatness": [values(FLATNESS, one) for one in self.measured],
            "figures": {
                title: base64.b64encode(drawn.encode()).decode()
                for title, drawn in self.figures.items()
            },
        }


def page_columns(costs: Sequence[StepCost] = ()) -> dict[str, list[dict[str, Any]]]:
    """Column descriptions for the page, by table."""
    known: dict[str, list[Any]] = {
        "methods": METHODS,
        "costs": cost_columns(costs),
        "flatness": FLATNESS,
    }
    return {
        name: [column.about() for column in columns if column.key and column.heading]
        for name, columns in known.items()
    }


def _table_json(table: Table) -> dict[str, Any]:
    """Unrounded percentages; a missing cell is null."""
    return {
        "dataset": table.dataset,
        "selection": table.selection,
        "columns": list(table.columns),
        "labels": list(target_names(table.dataset, table.columns)),
        "rows": [
            {
                **row.row._asdict(),
                "cells": {name: _cell_json(row.cells[name]) for name in table.columns},
                "avg": row.average and row.average.mean,
                "avg_partial": row.overall.mean if row.overall and not row.average else None,
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
    return {key: value for key, value in cell._asdict().items() if key != "partial" or value}


def best_configs(runs: Runs, selection: str | None = None) -> list[dict[str, Any]]:
    """The selected run and step for every dataset, method, target and trial.

    All values are plain, and non-finite numbers are None. Save ``config`` to a file to pass it to
    ``steppe train --config``.
    """
    selected = select_runs(runs, selection)
    places = sorted(selected.chosen, key=lambda p: (p.dataset, p.row.order, p.column, p.trial))
    return [
        {
            "dataset": place.dataset,
            **place.row._asdict(),
            "target": place.column,
            "trial": place.trial,
            "selection": selected.selection,
            "choice": chosen.run.choice,
            "step": chosen.step,
            "validation": None if chosen.validation is None else 100 * chosen.validation,
            "accuracy": 100 * chosen.accuracy,
            "hparams": plain(chosen.run.hparams),
            "config": plain(rerunnable(chosen.run)),
        }
        for place in places
        for chosen in (selected.chosen[place],)
    ]


def rerunnable(run: Run) -> dict[str, Any]:
    """A run's config without machine-specific and import-related keys."""
    from steppe.training.config import MACHINE, keys  # slow to import

    left_out = keys(MACHINE) | {"imported"}
    return {k: v for k, v in run.config.items() if k not in left_out and v is not None}


def build_report(
    loaded: Loaded,
    selection: str | None = None,
    command: str = "",
    title: str = "steppe report",
    references: Sequence[str] = (),
) -> Report:
    """Apply model selection to loaded runs and collect warnings for the reader.

    Args:
        loaded: from `load_runs`.
        selection: one of `SELECTIONS` (default: that of the runs' protocol, or `train-val`).
        command: the command line to show in the report.
        title: the report's title.
        references: methods to compare all others with: method names, `best` or `cheapest`
            (default: `best` and `cheapest`).
    """
    selected = select_runs(loaded.runs, selection)
    measured, unreadable = find_measured(loaded.runs)
    problems = (*loaded.problems, *remarks(loaded, selected), *unreadable)
    return Report(title, command, selected, problems, tuple(measured), references=tuple(references))


def write(report: Report, form: str) -> str:
    """Format a report as `terminal`, `markdown`, `latex`, `csv`, `json` or `html`."""
    if not report.selected.runs and form != "html":
        why = f" ({report.problems[0]})" if report.problems else ""
        raise UserError(f"{report.title}: none of the runs has a record yet{why}")
    return FORMATS[form](report)


def _markdown(report: Report) -> str:
    said = [f"{' '.join(map(render.escape_markdown, report.answer))}\n"] if report.answer else []
    return "\n".join([*said, *map(render.to_markdown, report.sections)])


def _latex(report: Report) -> str:
    said = [f"% {render.one_line(line)}\n" for line in report.answer]
    return "".join(said) + "\n".join(map(render.to_latex, report.sections))


def _terminal(report: Report) -> str:
    width = min(100, shutil.get_terminal_size().columns)
    said = f"{textwrap.fill(printable(' '.join(report.answer)), width)}\n\n"
    return said * bool(report.answer) + printed([*map(render.to_terminal, report.sections)])


FORMATS: dict[str, Callable[[Report], str]] = {
    "terminal": _terminal,
    "markdown": _markdown,
    "latex": _latex,
    "csv": lambda report: render.to_csv([t for t in (*report.tables, report.across) if t]),
    "json": lambda report: dumps({**report.to_json(), "best": report.best}),
    "html": lambda report: render_page(report.page_data()),
}
