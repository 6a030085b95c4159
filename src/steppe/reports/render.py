"""Tables as text: for the terminal, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

from steppe import console
from steppe.strangers import printable

from .cells import Cell
from .columns import COSTS, PAIRED, Column, in_files, table_columns
from .differences import Paired
from .runs import Row
from .tables import ALL, Matrix, StepCost, Table

T = TypeVar("T")
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


class TextCell(NamedTuple):
    text: str
    best: bool = False


@dataclass(frozen=True)
class TextTable:
    """Any table as texts: what the formats below take."""

    title: str
    headings: tuple[str, ...]
    lines: tuple[tuple[TextCell, ...], ...]
    names: int
    """Columns at the left that name the row; the others hold numbers."""
    note: str = ""


def text_table(
    title: str,
    columns: Sequence[Column[T]],
    rows: Sequence[T],
    *,
    note: str | None = None,
    contest: Literal["column", "line", "none"] = "column",
) -> TextTable:
    """Columns of some rows as texts.

    Args:
        title: above it.
        columns: those that have a heading are shown.
        rows: one line for each.
        note: below it; None: what a star means, where there is one.
        contest: what the best is marked of.
    """
    shown = [column for column in columns if column.heading]
    ranks = [[column.rank(row) for column in shown] for row in rows]
    if contest == "line":
        tops = [[_top(line)] * len(shown) for line in ranks]
    else:
        tops = [[_top(column) for column in zip(*ranks, strict=True)]] * len(ranks)
    lines = tuple(
        tuple(
            TextCell(
                column.text(row),
                column.marked(row)
                if column.marked is not None
                else contest != "none" and rank is not None and rank == top,
            )
            for column, rank, top in zip(shown, of_line, of_tops, strict=True)
        )
        for row, of_line, of_tops in zip(rows, ranks, tops, strict=True)
    )
    names = next((n for n, column in enumerate(shown) if not column.word), len(shown))
    note = _stars(shown, rows) if note is None else note
    return TextTable(title, tuple(column.heading for column in shown), lines, names, note)


def _top(ranks: Sequence[float | None]) -> float | None:
    return max((rank for rank in ranks if rank is not None), default=None)


def _stars(columns: Sequence[Column[T]], rows: Sequence[T]) -> str:
    values = (column.value(row) for column in columns for row in rows)
    partial = any(isinstance(value, Cell) and value.partial for value in values)
    return "* some targets are missing" if partial else ""


def accuracy_text(table: Table) -> TextTable:
    """A table of accuracies, with what every row comes from."""
    return text_table(_title(table.dataset, table.selection), table_columns(table), table.rows)


def _title(dataset: str, selection: str) -> str:
    name = "All datasets" if dataset == ALL else dataset
    return f"{name}, selected by {_SELECTED_BY[selection]}"


def matrix_text(matrix: Matrix) -> TextTable:
    """Algorithms by optimizers; the best of each line is marked."""

    def cells(optimizer: str) -> Column[tuple[str, str]]:
        def value(method: tuple[str, str]) -> Cell | None:
            return matrix.cells.get(Row(method[0], optimizer, method[1]))

        return Column("", optimizer, value, better="high")

    columns = [
        Column("", "algorithm", lambda m: m[0] if m[1] == "none" else " + ".join(m), word=True),
        *map(cells, matrix.optimizers),
    ]
    title = f"Optimizers by algorithm: {_title(matrix.dataset, matrix.selection)}"
    return text_table(title, columns, matrix.methods, contest="line")


def cost_text(costs: Sequence[StepCost], selection: str | None = None) -> TextTable:
    """Time and memory against accuracy; the title says how that was selected, if given."""
    return text_table(f"Cost of a step{_chosen_by(selection)}", COSTS, costs, contest="none")


def paired_text(comparisons: Sequence[Paired], selection: str | None = None) -> TextTable:
    """Differences in points, with their intervals; one that excludes zero is marked."""
    level = f"{100 * comparisons[0].level:.0f} %" if comparisons else "95 %"
    columns = [
        replace(column, heading=f"{level} interval") if column.heading == "interval" else column
        for column in PAIRED
    ]
    return text_table(f"Paired differences{_chosen_by(selection)}", columns, comparisons)


def _chosen_by(selection: str | None) -> str:
    return "" if selection is None else f", selected by {_SELECTED_BY[selection]}"


def to_terminal(table: TextTable) -> console.Table:
    """For a terminal, with what is best in bold."""
    shown = console.Table(
        title=console.text(table.title), box=console.SIMPLE_HEAVY, title_justify="left"
    )
    if table.note:
        shown.caption = console.text(table.note)
    for number, heading in enumerate(table.headings):
        justify: Literal["left", "right"] = "left" if number < table.names else "right"
        shown.add_column(console.text(heading), justify=justify, no_wrap=True)
    for line in table.lines:
        shown.add_row(*(console.text(text, style="bold" * best) for text, best in line))
    return shown


def to_markdown(table: TextTable) -> str:
    """A Markdown table, with what is best in bold."""
    rules = ["---"] * table.names + ["--:"] * (len(table.headings) - table.names)
    lines = [
        [f"**{_markdown(text)}**" if best else _markdown(text) for text, best in line]
        for line in table.lines
    ]
    head = [*map(_markdown, table.headings)]
    body = [f"| {' | '.join(line)} |" for line in (head, rules, *lines)]
    note = ["", _markdown(table.note)] if table.note else []
    return "\n".join([f"**{_markdown(table.title)}**", "", *body, *note]) + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", _one_line(text))


def to_latex(table: TextTable) -> str:
    """A table for the package booktabs, with what is best in bold."""
    lines = [
        [rf"\textbf{{{_latex(text)}}}" if best else _latex(text) for text, best in line]
        for line in table.lines
    ]
    body = [" & ".join(line) + r" \\" for line in ([*map(_latex, table.headings)], *lines)]
    numbers = len(table.headings) - table.names
    return "\n".join(
        [
            f"% {_one_line(table.title)}",
            *([f"% {table.note}"] if table.note else []),
            rf"\begin{{tabular}}{{{'l' * table.names}{'r' * numbers}}}",
            r"\toprule",
            body[0],
            r"\midrule",
            *body[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in _one_line(text))


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def to_csv(tables: Sequence[Table]) -> str:
    """One line per cell, for other programs: percent, unrounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    about = in_files()
    keys = [column.key for column in about]
    writer.writerow(("dataset", "selection", *Row._fields, "target", "mean", "err", "n", *keys))
    for table in tables:
        for row in table.rows:
            after = [_field(column.value(row)) for column in about]
            before = [table.dataset, table.selection, *row.row]
            for name in table.columns:
                cell = row.cells[name]
                numbers = [None] * 3 if cell is None else [cell.mean, cell.err, cell.n]
                writer.writerow([*before, name, *numbers, *after])
            average = row.average and row.average.mean
            writer.writerow([*before, "Avg.", average, None, None, *after])
    return out.getvalue()


def _field(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
