"""An experiment's tables: our numbers, with the paper's in parentheses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from steppe.errors import UserError, unknown
from steppe.reports import Column
from steppe.reports.cells import Cell
from steppe.reports.columns import COSTS
from steppe.reports.curvature import comparison_text
from steppe.reports.render import TextTable, paired_text, text_table
from steppe.reports.tables import ALL

from .order import Case, Rate
from .results import AVERAGE, Line, Results, TrainingCost, comparisons, lines, short

COPIED = "*"
"""Marks numbers that the paper copied from the methods' own papers."""


class BesideColumn(Column[Line]):
    """Our accuracy, with the paper's in parentheses. The key names the cell."""

    def text(self, row: Line) -> str:
        paper = row.cells[self.key].paper if self.key in row.cells else None
        if paper is None:
            return super().text(row)
        return super().text(row) + f" ({paper.value:.1f}{COPIED * paper.copied})"


def _seconds(spent: TrainingCost) -> str:
    paper = "" if spent.paper is None else f" ({spent.paper.value:,.0f})"
    ours = f"{spent.seconds:,.0f}" if spent.seconds >= 10 else f"{spent.seconds:.2g}"
    return ours + paper


TIMES: list[Column[Line]] = [
    Column("seconds", "seconds", lambda row: row.spent, show=_seconds),
    Column("over SGD", "over SGD", lambda row: row.spent and row.spent.relative, digits=2),
]
"""Columns that an experiment may show, in addition to `reports.columns.COSTS`."""


def _column(key: str) -> Column[Line]:
    times = {column.key: column for column in TIMES}
    known: dict[str, Column[Any]] = {column.key: column for column in COSTS if column.key}
    if key in times:
        return times[key]
    if key not in known:
        raise UserError(unknown("column", key, [*times, *known]))
    cost = known[key]
    return replace(cost, value=lambda row: row.spent and cost.of(row.spent.step), better="")


def tables(results: Results) -> list[TextTable]:
    by_dataset: dict[str, list[Line]] = {}
    for line in lines(results):
        by_dataset.setdefault(line.dataset, []).append(line)
    ordered = sorted(by_dataset, key=lambda name: name != ALL)
    found = [_table(results, name, by_dataset[name]) for name in ordered]
    if found and (compared := comparisons(results)):
        found.append(paired_text(compared, "train-val"))
    if results.curvature is not None:
        found.append(comparison_text(results.curvature))
    if results.order.tunes and results.rates:
        found.append(rates_table(results))
    return found


def _table(results: Results, dataset: str, rows: Sequence[Line]) -> TextTable:
    order = results.order
    names = dict.fromkeys(name for row in rows for name in row.cells)
    columns: list[Column[Line]] = [
        Column("method", "method", lambda row: row.method.name, word=True)
    ]
    if any(order.setting(row.arm) for row in rows):
        columns.append(Column("setting", "setting", lambda r: order.setting(r.arm), word=True))
    ordered = sorted(names, key=lambda name: name == AVERAGE)
    columns += [BesideColumn(name, short(name), _cell(name), better="high") for name in ordered]
    columns += [_column(key) for key in order.experiment.columns]
    title = "All datasets" if dataset == ALL else short(dataset)
    said = ["target accuracy in %, selected by training-domain validation"]
    beside = [row for row in rows if any(cell.paper for cell in row.cells.values())]
    if beside:
        said.append("in parentheses: the paper's (ResNet-50, its own updates and search)")
    if any(cell.paper and cell.paper.copied for row in beside for cell in row.cells.values()):
        said.append(
            f"{COPIED} copied by the paper from the method's own, which used another protocol: not "
            "comparable"
        )
    if any(row.method.averaging == "sma" for row in beside):
        said.append("without the ensemble of averages that EoA adds ('steppe sweep ensemble')")
    said += filter(None, [order.experiment.note])
    return text_table(f"{title}: {order.experiment.about}", columns, rows, note="; ".join(said))


def _cell(name: str) -> Callable[[Line], Cell | None]:
    return lambda row: row.cells[name].ours if name in row.cells else None


def rates_table(results: Results) -> TextTable:
    """The learning rates tried for each case, and the selected one."""

    def tried(found: tuple[Case, Rate]) -> str:
        return ", ".join(
            f"{lr:g}: {'diverged' if value is None else f'{value:.1f}'}"
            for lr, value in found[1].validation.items()
        )

    columns: list[Column[tuple[Case, Rate]]] = [
        Column("", "dataset", lambda found: short(found[0].dataset), word=True),
        Column("", "target", lambda found: found[0].targets, word=True),
        Column("", "method", lambda found: found[0].method.name, word=True),
        Column("", "learning rate", lambda found: f"{found[1].lr:g}"),
        Column("", "tried: validation accuracy", tried),
    ]
    note = "selected by training-domain validation, in short runs of the first trial"
    rows = list(results.rates.items())
    return text_table("Learning rates", columns, rows, note=note + _at_the_edge(results.rates))


def _at_the_edge(rates: Mapping[Case, Rate]) -> str:
    """How many rates are at the edge of the range, so that one beyond it may be better."""
    tried = [rate for rate in rates.values() if len(rate.validation) > 1]
    edges = {
        "lowest": sum(rate.lr == min(rate.validation) for rate in tried),
        "highest": sum(rate.lr == max(rate.validation) for rate in tried),
    }
    said = [f"{n} of {len(tried)} are the {edge} tried" for edge, n in edges.items() if n]
    hint = " (use --factors to try others)" if said else ""
    return "".join(f"; {text}" for text in said) + hint
