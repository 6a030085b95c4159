"""Tables as terminal output, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from steppe import console
from steppe.strangers import printable

from .cells import Cell
from .columns import CONTRASTS, PAIRED, Column, cost_columns, in_files, table_columns
from .contrasts import Contrasts
from .differences import Paired
from .runs import Row
from .tables import ALL, Matrix, StepCost, Table

T = TypeVar("T")
_SELECTED_BY = {
    "train-val": "validation on the training domains",
    "pooled-val": "validation on the pooled images of the training domains",
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
    """A table of strings, ready for any output format."""

    title: str
    headings: tuple[str, ...]
    lines: tuple[tuple[TextCell, ...], ...]
    names: int
    """Number of leading columns that name the row; the rest hold numbers."""
    note: str = ""

    def written(
        self, escape: Callable[[str], str], bold: Callable[[str], str]
    ) -> tuple[list[str], ...]:
        """The headings, then the lines, in a markup language."""
        lines = (
            [bold(escape(text)) if best else escape(text) for text, best in line]
            for line in self.lines
        )
        return [*map(escape, self.headings)], *lines


def text_table(
    title: str,
    columns: Sequence[Column[T]],
    rows: Sequence[T],
    *,
    note: str | None = None,
    by_line: bool = False,
) -> TextTable:
    """Build a text table from the columns that have a heading.

    The best value of each column is marked, or of each line with `by_line`. By default the note
    explains the star of partial means, if the table has any.
    """
    shown = [column for column in columns if column.heading]
    ranks = [[column.rank(row) for column in shown] for row in rows]
    contests = ranks if by_line else list(zip(*ranks, strict=True))
    tops = [max((rank for rank in found if rank is not None), default=None) for found in contests]

    def cell(y: int, x: int) -> TextCell:
        best = ranks[y][x] is not None and ranks[y][x] == tops[y if by_line else x]
        marked = shown[x].marked
        return TextCell(shown[x].text(rows[y]), best if marked is None else marked(rows[y]))

    lines = tuple(tuple(cell(y, x) for x in range(len(shown))) for y in range(len(rows)))
    names = next((n for n, column in enumerate(shown) if not column.word), len(shown))
    if note is None:
        values = (column.of(row) for column in shown for row in rows)
        partial = any(isinstance(value, Cell) and value.partial for value in values)
        note = "* some targets are missing" if partial else ""
    return TextTable(title, tuple(column.heading for column in shown), lines, names, note)


def accuracy_text(table: Table) -> TextTable:
    """Accuracies per method, with the `METHODS` columns."""
    return text_table(_title(table.dataset, table.selection), table_columns(table), table.rows)


def _title(dataset: str, selection: str) -> str:
    return ("All datasets" if dataset == ALL else dataset) + _chosen_by(selection)


def _chosen_by(selection: str | None) -> str:
    return "" if selection is None else f", selected by {_SELECTED_BY[selection]}"


def matrix_text(matrix: Matrix) -> TextTable:
    """Algorithms by optimizers, with the best optimizer of each line marked."""

    def cells(optimizer: str) -> Column[tuple[str, str]]:
        def value(method: tuple[str, str]) -> Cell | None:
            return matrix.cells.get(Row(method[0], optimizer, method[1]))

        return Column("", optimizer, value, better="high")

    columns = [
        Column("", "algorithm", lambda m: m[0] if m[1] == "none" else " + ".join(m), word=True),
        *map(cells, matrix.optimizers),
    ]
    title = f"Optimizers by algorithm: {_title(matrix.dataset, matrix.selection)}"
    return text_table(title, columns, matrix.methods, by_line=True)


def cost_text(costs: Sequence[StepCost], selection: str | None = None) -> TextTable:
    """Time, memory and accuracy. The title names the selection, if given."""
    # Rows of different datasets do not compete.
    columns = [replace(column, better="") for column in cost_columns(costs)]
    return text_table(f"Cost of a step{_chosen_by(selection)}", columns, costs)


def paired_text(comparisons: Sequence[Paired], selection: str | None = None) -> TextTable:
    """Differences in points with their intervals. Those that exclude zero are marked."""
    level = f"{comparisons[0].level:.0%} CI" if comparisons else "interval"
    columns = [
        replace(column, heading=level) if column.heading == "interval" else column
        for column in PAIRED
    ]
    return text_table(f"Paired differences{_chosen_by(selection)}", columns, comparisons)


def contrasts_text(found: Contrasts, selection: str | None = None) -> TextTable:
    """Comparisons with the references. Significant differences are marked."""
    title = f"Paired differences in points{_chosen_by(selection)}"
    # An interval that no pair has, such as over targets when there is one, needs no column.
    columns = [one for one in CONTRASTS if any(one.of(pair) is not None for pair in found.pairs)]
    return text_table(title, columns, found.pairs, note=found.note)


def to_terminal(table: TextTable) -> console.Table:
    rows = [[console.text(text, "bold" * best) for text, best in line] for line in table.lines]
    shown = console.table(table.headings, rows, title=table.title, labels=table.names)
    shown.box, shown.title_justify = console.SIMPLE_HEAVY, "left"
    shown.caption = console.text(f"{table.note}\n") if table.note else None
    shown.caption_justify = "left"
    return shown


def to_markdown(table: TextTable) -> str:
    head, *lines = table.written(escape_markdown, "**{}**".format)
    rules = ["---"] * table.names + ["--:"] * (len(table.headings) - table.names)
    body = [f"| {' | '.join(line)} |" for line in (head, rules, *lines)]
    note = ["", escape_markdown(table.note)] if table.note else []
    return "\n".join([f"**{escape_markdown(table.title)}**", "", *body, *note]) + "\n"


def escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", one_line(text))


def to_latex(table: TextTable) -> str:
    """A LaTeX table that uses the booktabs package."""
    head, *lines = (
        " & ".join(line) + r" \\" for line in table.written(_latex, r"\textbf{{{}}}".format)
    )
    kinds = "l" * table.names + "r" * (len(table.headings) - table.names)
    return "\n".join(
        [
            f"% {one_line(table.title)}",
            *([f"% {one_line(table.note)}"] if table.note else []),
            rf"\begin{{tabular}}{{{kinds}}}",
            r"\toprule",
            head,
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in one_line(text))


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def to_csv(tables: Sequence[Table]) -> str:
    """CSV with one line per cell, in unrounded percent."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    about = in_files()
    keys = [column.key for column in about]
    writer.writerow(("dataset", "selection", *Row._fields, "target", "mean", "err", "n", *keys))
    for table in tables:
        for row in table.rows:
            found = [column.of(row) for column in about]
            after = [" ".join(map(str, v)) if isinstance(v, list | tuple) else v for v in found]
            before = [table.dataset, table.selection, *row.row]
            for name in table.columns:
                writer.writerow([*before, name, *(row.cells[name] or [None] * 3)[:3], *after])
            average = row.average and row.average.mean
            writer.writerow([*before, "Avg.", average, None, None, *after])
    return out.getvalue()
