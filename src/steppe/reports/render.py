"""Tables as text: for the terminal, Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import rich.text
from rich import box
from rich.table import Table as RichTable

from steppe.strangers import printable

from .runs import Row
from .tables import ALL, Cell, Cost, Matrix, Paired, Table

MISSING = "–"
_SELECTED_BY = {
    "train-val": "validation on the training domains",
    "leave-one-out": "leave-one-domain-out validation",
    "oracle": "validation on the test domain (oracle)",
}
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "–": "--",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def tables_json(tables: Sequence[Table]) -> dict[str, Any]:
    """Plain values: percent, unrounded, a missing cell is null."""
    return {"tables": [table_json(table) for table in tables]}


def table_json(table: Table) -> dict[str, Any]:
    """One table as plain values."""
    return {
        "dataset": table.dataset,
        "selection": table.selection,
        "columns": list(table.columns),
        "rows": [
            {
                **row.row._asdict(),
                "cells": {column: _cell_json(row.cells[column]) for column in table.columns},
                "avg": row.avg,
                "steps": list(row.steps),
                "runs": row.runs,
                "space": row.space,
            }
            for row in table.rows
        ],
    }


def _cell_json(cell: Cell | None) -> dict[str, Any] | None:
    if cell is None:
        return None
    partial = {"partial": True} if cell.partial else {}
    return {"mean": cell.mean, "err": cell.err, "n": cell.n, **partial}


def matrix_json(matrix: Matrix) -> dict[str, Any]:
    """Optimizers by algorithms as plain values."""
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


def to_json(tables: Sequence[Table]) -> str:
    """The JSON text of `tables_json`."""
    return json.dumps(tables_json(tables), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def to_csv(tables: Sequence[Table]) -> str:
    """One line per cell, for other programs: percent, unrounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    provenance = ("steps", "runs", "space")
    writer.writerow(
        ("dataset", "selection", *Row._fields, "target", "mean", "err", "n", *provenance)
    )
    for table in tables:
        for row in table.rows:
            steps = " ".join(map(str, row.steps))
            after = [steps, row.runs, row.space]
            before = [table.dataset, table.selection, *row.row]
            for column in table.columns:
                cell = row.cells[column]
                values = [None] * 3 if cell is None else [cell.mean, cell.err, cell.n]
                writer.writerow([*before, column, *values, *after])
            writer.writerow([*before, "Avg.", row.avg, None, None, *after])
    return out.getvalue()


class Text(NamedTuple):
    """A cell's text, and whether it is the best of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """Any table as texts: what the renderers below take."""

    title: str
    headings: tuple[str, ...]
    lines: tuple[tuple[Text, ...], ...]
    names: int
    """Columns at the left that hold names; the others hold numbers."""
    note: str = ""


def table_grid(table: Table) -> Grid:
    """A table of accuracies, with what every row comes from."""
    axes = [axis for axis in Row._fields if _varies(table, axis)] or ["optimizer"]
    best = {column: table.best(column) for column in (*table.columns, None)}
    lines = []
    for row in table.rows:
        cells = [Text(cell_text(row.cells[c]), row.row in best[c]) for c in table.columns]
        average = MISSING if row.avg is None else f"{row.avg:.1f}" + "*" * row.partial
        avg = Text(average, row.row in best[None])
        own = [Text(getattr(row.row, axis)) for axis in axes]
        steps = ", ".join(map(str, row.steps))
        after = [Text(steps), Text(row.space or MISSING), Text(str(row.runs))]
        lines.append((*own, *cells, avg, *after))
    headings = (*axes, *table.labels, "Avg.", "steps", "space", "runs")
    return Grid(
        _title(table.dataset, table.selection), headings, tuple(lines), len(axes), _note(table)
    )


def _title(dataset: str, selection: str) -> str:
    name = "All datasets" if dataset == ALL else dataset
    return f"{name}, selected by {_SELECTED_BY[selection]}"


def _varies(table: Table, axis: str) -> bool:
    usual = {"algorithm": "ERM", "averaging": "none"}
    return any(getattr(row.row, axis) != usual.get(axis) for row in table.rows)


def _note(table: Table) -> str:
    return _partial_note(cell for row in table.rows for cell in row.cells.values())


def _partial_note(cells: Iterable[Cell | None]) -> str:
    return "* some targets are missing" if any(c is not None and c.partial for c in cells) else ""


def cell_text(cell: Cell | None) -> str:
    """Mean and error with one decimal, as DomainBed prints them.

    Examples:
        >>> cell_text(Cell(83.25, 0.5, 3)), cell_text(Cell(83.25, 0.0, 1)), cell_text(None)
        ('83.2 ± 0.5', '83.2', '–')
    """
    if cell is None:
        return MISSING
    text = f"{cell.mean:.1f}" if cell.n == 1 else f"{cell.mean:.1f} ± {cell.err:.1f}"
    return text + "*" * cell.partial


def matrix_grid(matrix: Matrix) -> Grid:
    """Algorithms by optimizers; the best of each line is marked."""
    lines = []
    for algorithm, averaging in matrix.methods:
        cells = [matrix.cells.get(Row(algorithm, o, averaging)) for o in matrix.optimizers]
        shown = [None if c is None or c.partial else f"{c.mean:.1f}" for c in cells]
        top = max((text for text in shown if text), key=float, default="")
        texts = [Text(cell_text(c), s == top) for c, s in zip(cells, shown, strict=True)]
        name = algorithm if averaging == "none" else f"{algorithm} + {averaging}"
        lines.append((Text(name), *texts))
    title = f"Optimizers by algorithm: {_title(matrix.dataset, matrix.selection)}"
    note = _partial_note(matrix.cells.values())
    return Grid(title, ("algorithm", *matrix.optimizers), tuple(lines), 1, note)


def cost_grid(costs: Sequence[Cost], selection: str | None = None) -> Grid:
    """Time and memory against accuracy; the title says how that was selected, if given."""
    lines = []
    for cost in costs:
        memory = MISSING if cost.memory_gb is None else f"{cost.memory_gb:.2f}"
        texts = [
            cost.dataset,
            cost.row.name,
            f"{1e3 * cost.seconds_per_step:.1f}",
            f"{cost.relative:.2f}",
            MISSING if cost.passes is None else str(cost.passes),
            memory,
            cell_text(cost.accuracy),
        ]
        lines.append(tuple(map(Text, texts)))
    headings = ("dataset", "method", "ms/step", "relative", "passes", "GiB", "accuracy")
    note = _partial_note(cost.accuracy for cost in costs)
    return Grid(f"Cost of a step{_chosen_by(selection)}", headings, tuple(lines), 2, note)


def _chosen_by(selection: str | None) -> str:
    return "" if selection is None else f", selected by {_SELECTED_BY[selection]}"


def paired_grid(comparisons: Sequence[Paired], selection: str | None = None) -> Grid:
    """Differences in points, with their intervals; one that excludes zero is marked."""
    lines = []
    for c in comparisons:
        interval = f"{c.low:+.1f} to {c.high:+.1f}"
        difference = Text(f"{c.difference:+.1f}", c.clear)
        lines.append((Text(f"{c.a} - {c.b}"), difference, Text(interval), Text(c.what)))
    level = f"{100 * comparisons[0].level:.0f} %" if comparisons else "95 %"
    headings = ("methods", "points", f"{level} interval", "over")
    return Grid(f"Paired differences{_chosen_by(selection)}", headings, tuple(lines), 1)


def to_terminal(given: Table | Grid) -> RichTable:
    """For a console of rich."""
    grid = _grid(given)
    shown = RichTable(title=_text(grid.title), box=box.SIMPLE_HEAVY, title_justify="left")
    if grid.note:
        shown.caption = _text(grid.note)
    for number, heading in enumerate(grid.headings):
        justify: Literal["left", "right"] = "left" if number < grid.names else "right"
        shown.add_column(_text(heading), justify=justify, no_wrap=True)
    for line in grid.lines:
        shown.add_row(*(_text(text, style="bold" * best) for text, best in line))
    return shown


def _text(text: str, style: str = "") -> rich.text.Text:
    # Not as str: names may hold what rich would take for markup, or a terminal for orders.
    return rich.text.Text(printable(text), style=style)


def to_markdown(given: Table | Grid) -> str:
    """A Markdown table, with the best of each column in bold."""
    grid = _grid(given)
    rules = ["---"] * grid.names + ["--:"] * (len(grid.headings) - grid.names)
    texts = [[f"**{_markdown(t)}**" if best else _markdown(t) for t, best in n] for n in grid.lines]
    body = [f"| {' | '.join(line)} |" for line in ([*map(_markdown, grid.headings)], rules, *texts)]
    note = ["", _markdown(grid.note)] if grid.note else []
    return "\n".join([f"**{_markdown(grid.title)}**", "", *body, *note]) + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", _one_line(text))


def to_latex(given: Table | Grid) -> str:
    """A table for the package booktabs, with the best of each column in bold."""
    grid = _grid(given)
    lines = [
        [rf"\textbf{{{_latex(text)}}}" if best else _latex(text) for text, best in line]
        for line in grid.lines
    ]
    body = [" & ".join(line) + r" \\" for line in ([*map(_latex, grid.headings)], *lines)]
    numbers = len(grid.headings) - grid.names
    return "\n".join(
        [
            f"% {_one_line(grid.title)}",
            *([f"% {grid.note}"] if grid.note else []),
            rf"\begin{{tabular}}{{{'l' * grid.names}{'r' * numbers}}}",
            r"\toprule",
            body[0],
            r"\midrule",
            *body[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _grid(given: Table | Grid) -> Grid:
    return table_grid(given) if isinstance(given, Table) else given


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in _one_line(text))
