"""Table columns, each declared once for every output format and the HTML page.

`METHODS` follow the accuracies of a method, `COSTS` make up the cost table, `CONTRASTS` and
`PAIRED` the tables of differences, and `measured.CURVATURE` those of flatness. Plugins add columns
to the first two with `register_column`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

from steppe.errors import UserError

from .cells import MISSING, Cell, cell_text, interval_text, number_text, p_text, points_text
from .contrasts import LEVEL, Contrast
from .differences import Paired
from .runs import Row
from .spent import DIGITS, hours
from .tables import StepCost, Table, TableRow

T = TypeVar("T")


@dataclass(frozen=True)
class Column(Generic[T]):
    """How a column gets its value from a row, and how it displays it.

    Attributes:
        key: name in JSON, CSV and the page; empty for a column that is only displayed.
        heading: displayed name; empty for a column that is only data.
        value: function of a row that returns a number, a string, a list of these, or None if the
            value is missing; display-only columns may return a `Cell` (default: read the attribute
            named `key`).
        digits: decimals of a number.
        scale: factor between the value and what is displayed, such as 1000 for seconds in ms.
        show: function that formats a value, if `digits` is not enough.
        meaning: the heading spelled out, with the unit.
        better: mark the highest (`high`) or lowest (`low`) value as the best.
        marked: function of a row that decides whether to mark it, instead of `better`.
        word: whether the column holds text. Leading text columns name the row.
        optional: leave the column out of displayed tables in which no row has a value.

    Examples:
        >>> loss = Column("loss", "final loss", lambda row: row["loss"], digits=2, better="low")
        >>> loss.text({"loss": 0.125}), loss.text({"loss": None})
        ('0.12', '–')
    """

    key: str
    heading: str = ""
    value: Callable[[T], Any] | None = None
    digits: int | None = None
    scale: float = 1.0
    show: Callable[[Any], str] | None = None
    meaning: str = ""
    better: Literal["high", "low", ""] = ""
    marked: Callable[[T], bool] | None = None
    word: bool = False
    optional: bool = False

    def of(self, row: T) -> Any:
        return getattr(row, self.key) if self.value is None else self.value(row)

    def text(self, row: T) -> str:
        value = self.of(row)
        if value is None:
            return MISSING
        if self.show is not None:
            return self.show(value)
        if isinstance(value, Cell):
            return cell_text(value)
        if isinstance(value, list | tuple):
            return ", ".join(map(str, value))
        return str(value) if self.digits is None else number_text(self.scale * value, self.digits)

    def rank(self, row: T) -> float | None:
        """The displayed number, negated if lower is better, so that equal texts tie for the best.

        None does not compete: missing values, and partial means, which cover other targets.
        """
        value = self.of(row)
        if value is None or not self.better or (isinstance(value, Cell) and value.partial):
            return None
        if isinstance(value, Cell):
            shown = f"{value.mean:.1f}"
        else:
            number = self.scale * value
            shown = f"{number:g}" if self.digits is None else number_text(number, self.digits)
            shown = "0" if shown.startswith("<") else shown
        return float(shown) if self.better == "high" else -float(shown)

    def about(self) -> dict[str, Any]:
        """The fields that the page needs."""
        told = ("key", "heading", "meaning", "digits", "scale", "better", "word")
        return {name: getattr(self, name) for name in told}


def values(columns: Iterable[Column[T]], row: T) -> dict[str, Any]:
    """A row as plain values by key."""
    return {column.key: column.of(row) for column in columns if column.key}


METHODS: list[Column[TableRow]] = [
    Column(
        "raw",
        "raw weights",
        digits=1,
        meaning="mean accuracy of the raw weights, where an average is reported",
        optional=True,
    ),
    Column("steps", "steps", lambda row: sorted({run.steps for run in row.runs})),
    Column(
        "space",
        "space",
        lambda row: ", ".join(sorted({run.space for run in row.runs if run.space})) or None,
        meaning="search space of the hyperparameters",
        word=True,
    ),
    Column("runs", "runs", lambda row: len(row.runs), meaning="runs to choose from"),
]
"""Columns after the average in tables of accuracies, one row per method."""

_MS = "milliseconds per step"
COSTS: list[Column[StepCost]] = [
    Column("dataset", "dataset", word=True),
    Column("name", "method", attrgetter("row.name"), word=True),
    Column("seconds_per_step", "ms/step", digits=1, scale=1e3, meaning=_MS, better="low"),
    Column("relative", "relative", digits=2, meaning="relative time of a step", better="low"),
    Column("passes", "passes", digits=1, meaning="passes per step"),
    Column("memory_gb", "GiB", digits=2, meaning="memory, GiB", better="low"),
    Column("hours", "hours", digits=DIGITS, meaning="hours of all runs"),
    Column("", "accuracy", attrgetter("accuracy")),
    Column("accuracy", "", lambda cost: cost.accuracy and cost.accuracy.mean),
    Column("err", "", lambda cost: cost.accuracy and cost.accuracy.err),
    Column("trials", "", lambda cost: cost.accuracy and cost.accuracy.n),
    Column("partial", "", lambda cost: cost.accuracy is not None and cost.accuracy.partial),
]
"""Columns of the cost table, one row per method and dataset."""

_NAMES: list[Column[Any]] = [
    Column("", "methods", lambda pair: f"{pair.a} - {pair.b}", word=True),
    Column("a"),
    Column("b"),
]
PAIRED: list[Column[Paired]] = [
    *_NAMES,
    Column("difference", "points", show=points_text, marked=attrgetter("clear")),
    Column("", "interval", lambda pair: interval_text(pair.low, pair.high)),
    Column("low"),
    Column("high"),
    Column("level"),
    Column("n", "", attrgetter("pairs")),
    Column("what", "over"),
]
"""Mean difference of two methods in points, with one interval."""


def _interval(pair: Paired | None) -> str | None:
    return None if pair is None else f"{interval_text(pair.low, pair.high)} (n={pair.units})"


def _significant(pair: Contrast) -> bool:
    return pair.verdict == "significant"


def _of(name: str, within: str = "across") -> Callable[[Contrast], Any]:
    """An attribute of one of the intervals; None if there is no such interval."""
    return lambda pair: getattr(getattr(pair, within), name, None)


_CI = f"{LEVEL:.0%} CI"
CONTRASTS: list[Column[Contrast]] = [
    *_NAMES,
    Column("difference", "points", show=points_text, marked=_significant),
    Column("", f"{_CI}, seeds", lambda pair: _interval(pair.over_trials)),
    Column("", f"{_CI}, targets", lambda pair: _interval(pair.over_targets)),
    Column("low", "", _of("low")),
    Column("high", "", _of("high")),
    Column("level", "", _of("level")),
    Column("n", "", attrgetter("pairs")),
    Column("what", "", _of("what")),
    Column("seeds_low", "", _of("low", "over_trials")),
    Column("seeds_high", "", _of("high", "over_trials")),
    Column("seeds", "", _of("units", "over_trials")),
    Column("targets_low", "", _of("low", "over_targets")),
    Column("targets_high", "", _of("high", "over_targets")),
    Column("decided_over", "", _of("unit", "deciding")),
    Column("p", "", _of("p", "deciding")),
    Column("p_adjusted", "p (Holm)", attrgetter("adjusted"), show=p_text),
    Column("p_tied", "", attrgetter("outside")),
    Column("verdict", "result", word=True),
]
"""Mean difference of two methods in points, with both intervals and the verdict."""

_OPEN: dict[str, list[Column[Any]]] = {"methods": METHODS, "costs": COSTS}
_RESERVED = {*Row._fields, "dataset", "selection", "target", "cells", "mean", "err", "n", "avg"}
"""Other keys of table rows in JSON, CSV and the page."""


def register_column(table: Literal["methods", "costs"], column: Column[Any]) -> None:
    """Append a column to a table in every output format and on the page.

    Its `value` receives a `TableRow` for `methods` and a `StepCost` for `costs`; both have `runs`.
    """
    taken = _RESERVED | {own.key for own in _OPEN[table]}
    if not column.key or column.key in taken:
        raise UserError(
            f"cannot add a column with key {column.key!r} to the table {table!r}: the key must be "
            f"non-empty and none of {', '.join(sorted(taken - {''}))}"
        )
    _OPEN[table].append(column)


def cost_columns(costs: Iterable[StepCost]) -> list[Column[StepCost]]:
    """`COSTS`, with hours named after the device if all runs used the same kind."""
    kinds = {kind for cost in costs for kind in hours(cost.runs)}
    name = f"{kinds.pop()}-hours" if len(kinds) == 1 else "hours"
    meaning = f"{name} of all runs"
    return [
        replace(one, heading=name, meaning=meaning) if one.key == "hours" else one for one in COSTS
    ]


def in_files() -> list[Column[TableRow]]:
    """`METHODS` in the order of stored tables: text columns last."""
    return sorted(METHODS, key=lambda column: column.word)


def table_columns(table: Table) -> list[Column[TableRow]]:
    """Columns of a table of accuracies: names, targets, the average, and `METHODS`."""
    usual = {"algorithm": {"ERM"}, "averaging": {"none"}}
    seen = {axis: {getattr(row.row, axis) for row in table.rows} for axis in Row._fields}
    axes = [axis for axis in seen if seen[axis] - usual.get(axis, set())] or ["optimizer"]

    def cell(name: str, label: str) -> Column[TableRow]:
        return Column("", label, lambda row: row.cells[name], better="high")

    return [
        *(Column(axis, axis, attrgetter(f"row.{axis}"), word=True) for axis in axes),
        *map(cell, table.columns, table.labels),
        Column("", "Avg.", attrgetter("shown_average"), better="high"),
        *(own for own in METHODS if not own.optional or any(map(_has(own), table.rows))),
    ]


def _has(column: Column[T]) -> Callable[[T], bool]:
    return lambda row: column.of(row) is not None
