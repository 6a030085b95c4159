"""A report as text, in any of the formats."""

from __future__ import annotations

import json
from collections.abc import Callable

from steppe.console import printed
from steppe.errors import UserError

from .page import render_page
from .render import (
    TextTable,
    accuracy_text,
    cost_text,
    matrix_text,
    paired_text,
    to_csv,
    to_latex,
    to_markdown,
    to_terminal,
)
from .report import Report
from .values import plain


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


def _sections(report: Report) -> list[TextTable]:
    """Everything that is a table, in the order in which it is read."""
    found = [accuracy_text(table) for table in (*report.tables, report.across) if table]
    found += [matrix_text(matrix) for matrix in report.matrices]
    if report.cost:
        found.append(cost_text(report.cost, report.selected.selection))
    if report.comparisons:
        found.append(paired_text(report.comparisons, report.selected.selection))
    return found


def _json(report: Report) -> str:
    values = {**report.to_json(), "best": report.best}
    return json.dumps(plain(values), indent=2, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Report], str]] = {
    "terminal": lambda report: printed([to_terminal(table) for table in _sections(report)]),
    "markdown": lambda report: "\n".join(map(to_markdown, _sections(report))),
    "latex": lambda report: "\n".join(map(to_latex, _sections(report))),
    "csv": lambda report: to_csv([table for table in (*report.tables, report.across) if table]),
    "json": _json,
    "html": lambda report: render_page(report.page_data()),
}
