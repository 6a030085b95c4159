"""A report as text, in any of the formats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable

from steppe.errors import UserError

from .page import render_page
from .render import (
    Grid,
    cost_grid,
    matrix_grid,
    paired_grid,
    to_csv,
    to_latex,
    to_markdown,
    to_terminal,
)
from .report import Report
from .runs import plain
from .tables import Table


def write(report: Report, form: str) -> str:
    """The text of a report.

    Args:
        report: from `build_report`.
        form: `terminal`, `markdown`, `latex`, `csv`, `json` or `html`.
    """
    if not report.selected.runs and form != "html":
        why = f" ({report.problems[0]})" if report.problems else ""
        raise UserError(f"{report.title}: no run there has a record yet{why}")
    return FORMATS[form](report)


def _sections(report: Report) -> list[Table | Grid]:
    """Everything that is a table, in the order in which it is read."""
    found: list[Table | Grid] = [*report.tables]
    if report.across:
        found.append(report.across)
    found += [matrix_grid(matrix) for matrix in report.matrices]
    if report.cost:
        found.append(cost_grid(report.cost, report.selected.selection))
    if report.comparisons:
        found.append(paired_grid(report.comparisons, report.selected.selection))
    return found


def _terminal(report: Report) -> str:
    return printed([to_terminal(section) for section in _sections(report)])


def printed(tables: Sequence[RichTable]) -> str:
    """Tables as they look on a terminal that is wide enough for them."""
    # A line that a narrow terminal folds can be read; a number that was cut off cannot.
    roomy = Console(width=100_000)
    natural = [Measurement.get(roomy, roomy.options, table).maximum for table in tables]
    console = Console(width=max(80, shutil.get_terminal_size((120, 40)).columns, *natural))
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get()


def _json(report: Report) -> str:
    data = report.page_data()
    kept = ("selection", "across", "matrices", "comparisons", "cost")
    about = ("command", "versions", "made", "problems")
    values = {**report.to_json(), **{key: data[key] for key in (*kept, *about)}}
    return json.dumps(plain({**values, "best": report.best}), indent=2, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Report], str]] = {
    "terminal": _terminal,
    "markdown": lambda report: "\n".join(to_markdown(section) for section in _sections(report)),
    "latex": lambda report: "\n".join(to_latex(section) for section in _sections(report)),
    "csv": lambda report: to_csv([*report.tables, *([report.across] if report.across else [])]),
    "json": _json,
    "html": lambda report: render_page(report.page_data()),
}
