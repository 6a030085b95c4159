"""The paper's own numbers, from a data file that names the line of each."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import resources
from statistics import fmean
from typing import NamedTuple

from steppe.reports import Row


class Printed(NamedTuple):
    """One number of the paper."""

    table: str
    """Where it stands, by our name."""
    line: int
    """In the source of the paper."""
    dataset: str
    """By steppe's name; empty for a mean over datasets."""
    target: str
    """The domain held out; empty for the mean over all."""
    method: Row
    steps: int | None
    """Updates, where they are the same for what it is the mean of."""
    quantity: str
    """`accuracy`, in percent, or `seconds` of training."""
    value: float
    stderr: float | None
    source: str
    """Where the paper has it from, if it says so."""


@cache
def printed() -> tuple[Printed, ...]:
    """Every number of the paper's results.

    Examples:
        >>> printed()[0].line, printed()[0].dataset, printed()[0].method.name, printed()[0].value
        (323, 'PACS', 'adam', 84.2)
    """
    text = resources.files("steppe.paper").joinpath("paper.csv").read_text(encoding="utf-8")
    return tuple(_read(csv.DictReader(text.splitlines())))


def _read(lines: Iterable[dict[str, str]]) -> Iterator[Printed]:
    for line in lines:
        yield Printed(
            line["table"],
            int(line["line"]),
            line["dataset"],
            line["target"],
            Row(line["algorithm"], line["optimizer"], line["averaging"]),
            int(line["steps"]) if line["steps"] else None,
            line["quantity"],
            float(line["value"]),
            float(line["stderr"]) if line["stderr"] else None,
            line["source"],
        )


class Beside(NamedTuple):
    """What the paper has for a cell, and the lines of its source that say so."""

    value: float
    lines: tuple[int, ...]


def lookup(
    tables: Iterable[str],
    method: Row,
    dataset: str = "",
    targets: str = "",
    steps: int | None = None,
    quantity: str = "accuracy",
) -> Beside | None:
    """What the paper has for a cell, or None.

    Args:
        tables: where to look, the first first: the paper prints some numbers twice, not always
            the same.
        method: algorithm, optimizer and averaging.
        dataset: by steppe's name; empty: the mean over datasets.
        targets: the domain held out, or several joined by ``+``, whose mean it is; empty: the mean
            over all.
        steps: updates; None: whatever the table has.
        quantity: `accuracy` or `seconds`.

    Examples:
        >>> lookup(["table1"], Row("ERM", "fad", "none"), "PACS")
        Beside(value=88.2, lines=(332,))
        >>> lookup(["table1-pacs"], Row("ERM", "fad", "none"), "PACS", "photo+sketch").value
        90.6
    """
    found = [
        _one(tables, method, dataset, target, steps, quantity) for target in targets.split("+")
    ]
    known = [number for number in found if number is not None]
    if len(known) < len(found):
        return None
    lines = tuple(dict.fromkeys(number.line for number in known))
    return Beside(fmean(number.value for number in known), lines)


def _one(
    tables: Iterable[str], method: Row, dataset: str, target: str, steps: int | None, quantity: str
) -> Printed | None:
    wanted = (method, dataset, target, quantity)
    for table in tables:  # what the paper took from others is beside no run of ours
        for number in (n for n in _of(table) if n.source not in ("DomainBed", "literature")):
            same = wanted == (number.method, number.dataset, number.target, number.quantity)
            if same and (steps is None or number.steps in (None, steps)):
                return number
    return None


@cache
def _of(table: str) -> tuple[Printed, ...]:
    return tuple(number for number in printed() if number.table == table)
