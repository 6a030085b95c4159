"""Columns, each declared once: every format and the page take them from here.

`METHODS` stand beside the accuracies of a method, `COSTS` in the table of costs, `CONTRASTS` and
`PAIRED` in those of differences, `measured.CURVATURE` in those of flatness. `register_column` adds
one to the first two, from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

from steppe.errors import UserError

from .cells import MISSING, Cell, cell_text, interval_text, p_text, points_text
from .contrasts import LEVEL, Contrast
from .differences import Paired
from .runs import Row
from .spent import DIGITS, hours
from .tables import StepCost, Table, TableRow

T = TypeVar("T")


@dataclass(frozen=True)
class Column(Generic[T]):
    """What a column shows of a row.

    Attributes:
        key: its name in JSON, CSV and the page; empty: it is only shown.
        heading: what people read above it; empty: it is only data.
        value: of a row: a number, a text, a list of these, or None where it is missing; in a
            column that is only shown, a `Cell` too. Default: the attribute that the key names.
        digits: decimals of a number.
        scale: what people see is so many times the value: 1000, where seconds are shown as ms.
        show: the text of a value, where `digits` do not say it.
        meaning: the heading in words, with the unit.
        better: whether the highest or the lowest is the best, and marked.
        marked: of a row: whether it is marked, where that is not a contest.
        word: whether it holds words. Those that come first name the row.

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

    def of(self, row: T) -> Any:
        """The value of a row."""
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
        return str(value) if self.digits is None else f"{self.scale * value:.{self.digits}f}"

    def rank(self, row: T) -> float | None:
        """What counts in a contest: the number as it is shown, so that equal texts are equal.

        None takes no part: a mean that lacks some targets is of other things.
        """
        value = self.of(row)
        if value is None or not self.better or (isinstance(value, Cell) and value.partial):
            return None
        if isinstance(value, Cell):
            shown = f"{value.mean:.1f}"
        else:
            shown = format(self.scale * value, "g" if self.digits is None else f".{self.digits}f")
        return float(shown) if self.better == "high" else -float(shown)

    def about(self) -> dict[str, Any]:
        """What the page needs to know to show it."""
        told = ("key", "heading", "meaning", "digits", "scale", "better", "word")
        return {name: getattr(self, name) for name in told}


def values(columns: Iterable[Column[T]], row: T) -> dict[str, Any]:
    """A row as plain values by key."""
    return {column.key: column.of(row) for column in columns if column.key}


METHODS: list[Column[TableRow]] = [
    Column("steps", "steps", lambda row: sorted({run.steps for run in row.runs})),
    Column(
        "space",
        "space",
        lambda row: ", ".join(sorted({run.space for run in row.runs if run.space})) or None,
        meaning="what the hyperparameters were drawn from",
        word=True,
    ),
    Column("runs", "runs", lambda row: len(row.runs), meaning="runs to choose from"),
]
"""Of a method in a table of accuracies, after its average: what the numbers come from."""

_MS = "milliseconds per step"
COSTS: list[Column[StepCost]] = [
    Column("dataset", "dataset", word=True),
    Column("name", "method", attrgetter("row.name"), word=True),
    Column("seconds_per_step", "ms/step", digits=1, scale=1e3, meaning=_MS, better="low"),
    Column("relative", "relative", digits=2, meaning="relative time of a step", better="low"),
    Column("passes", "passes", digits=0, meaning="passes per step"),
    Column("memory_gb", "GiB", digits=2, meaning="memory, GiB", better="low"),
    Column("hours", "hours", digits=DIGITS, meaning="hours of all runs"),
    Column("", "accuracy", attrgetter("accuracy")),
    Column("accuracy", "", lambda cost: cost.accuracy and cost.accuracy.mean),
    Column("err", "", lambda cost: cost.accuracy and cost.accuracy.err),
    Column("trials", "", lambda cost: cost.accuracy and cost.accuracy.n),
    Column("partial", "", lambda cost: cost.accuracy is not None and cost.accuracy.partial),
]
"""Of a method and a dataset: what a step costs, beside what it brings."""

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
"""Of two methods: the mean difference in points, with its interval."""


def _interval(pair: Paired | None) -> str | None:
    return None if pair is None else f"{interval_text(pair.low, pair.high)} (n={pair.units})"


def _significant(pair: Contrast) -> bool:
    return pair.verdict == "significant"


def _of(name: str, within: str = "across") -> Callable[[Contrast], Any]:
    """An attribute of one of the intervals, where there is one."""
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
    Column("decided_over", "", _of("unit", "deciding")),
    Column("p", "", _of("p", "deciding")),
    Column("p_adjusted", "p (Holm)", attrgetter("adjusted"), show=p_text),
    Column("p_tied", "", attrgetter("outside")),
    Column("verdict", "result", word=True),
]
"""Of two methods: the mean difference in points, with both intervals and what they say."""

_OPEN: dict[str, list[Column[Any]]] = {"methods": METHODS, "costs": COSTS}
_RESERVED = {*Row._fields, "dataset", "selection", "target", "cells", "mean", "err", "n", "avg"}
"""What else the rows of a table have in JSON, CSV or the page."""


def register_column(table: Literal["methods", "costs"], column: Column[Any]) -> None:
    """Add a column to a table, as the last, in every format and on the page.

    Its values are of a `TableRow` in `methods`, of a `StepCost` in `costs`; both have the runs.
    """
    taken = _RESERVED | {own.key for own in _OPEN[table]}
    if not column.key or column.key in taken:
        raise UserError(
            f"the table {table} cannot take a column with the key {column.key!r}: give it one of "
            f"its own, not {', '.join(sorted(taken - {''}))}"
        )
    _OPEN[table].append(column)


def cost_columns(costs: Iterable[StepCost]) -> list[Column[StepCost]]:
    """`COSTS`, with the hours named after the device where all runs had the same."""
    kinds = {kind for cost in costs for kind in hours(cost.runs)}
    name = f"{kinds.pop()}-hours" if len(kinds) == 1 else "hours"
    meaning = f"{name} of all runs"
    return [
        replace(one, heading=name, meaning=meaning) if one.key == "hours" else one for one in COSTS
    ]


def in_files() -> list[Column[TableRow]]:
    """`METHODS` as stored tables have them: words come last."""
    return sorted(METHODS, key=lambda column: column.word)


def table_columns(table: Table) -> list[Column[TableRow]]:
    """The columns of a table of accuracies: names, targets, the average, and `METHODS`."""
    usual = {"algorithm": {"ERM"}, "averaging": {"none"}}
    seen = {axis: {getattr(row.row, axis) for row in table.rows} for axis in Row._fields}
    axes = [axis for axis in seen if seen[axis] - usual.get(axis, set())] or ["optimizer"]

    def cell(name: str, label: str) -> Column[TableRow]:
        return Column("", label, lambda row: row.cells[name], better="high")

    return [
        *(Column(axis, axis, attrgetter(f"row.{axis}"), word=True) for axis in axes),
        *map(cell, table.columns, table.labels),
        Column("", "Avg.", attrgetter("shown_average"), better="high"),
        *METHODS,
    ]
