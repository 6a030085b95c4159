"""The paper's numbers, from a data file that cites the source line of each."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from importlib import resources
from statistics import fmean
from typing import NamedTuple

from steppe.reports import Row

LITERATURE = "literature"
"""The source of numbers that the paper copied from the methods' own papers."""


class Printed(NamedTuple):
    """One number printed in the paper."""

    table: str
    """steppe's name for the table."""
    line: int
    """Line in the paper's source."""
    dataset: str
    """steppe's name for it; empty for a mean over datasets."""
    target: str
    """The target domain; empty for the mean over all."""
    method: Row
    steps: int | None
    """Number of updates, if it is the same for everything averaged."""
    quantity: str
    """`accuracy` in percent, or `seconds` of training."""
    value: float
    stderr: float | None
    source: str
    """The source that the paper cites for it, if any."""


@cache
def printed() -> tuple[Printed, ...]:
    """Every number in the paper's results.

    Examples:
        >>> printed()[0].line, printed()[0].dataset, printed()[0].method.name, printed()[0].value
        (323, 'PACS', 'adam', 84.2)
    """
    text = resources.files("steppe.paper").joinpath("paper.csv").read_text(encoding="utf-8")
    return tuple(
        Printed(
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
        for line in csv.DictReader(text.splitlines())
    )


class Beside(NamedTuple):
    """The paper's value for a cell, and its lines in the paper's source."""

    value: float
    lines: tuple[int, ...]
    copied: bool = False
    """Whether the paper copied it from the method's own paper, which used another protocol."""


def lookup(
    tables: Iterable[str],
    method: Row,
    dataset: str = "",
    targets: str = "",
    steps: int | None = None,
    quantity: str = "accuracy",
) -> Beside | None:
    """The paper's value for a cell, or None.

    Args:
        tables: tables to search, in order of preference: the paper prints some numbers twice, with
            different values.
        method: algorithm, optimizer and averaging.
        dataset: steppe's name for it (default: the mean over datasets).
        targets: a target domain, or several joined by ``+`` to average over (default: the mean
            over all).
        steps: number of updates (default: any).
        quantity: `accuracy` or `seconds`.

    Examples:
        >>> lookup(["table1"], Row("ERM", "fad", "none"), "PACS")
        Beside(value=88.2, lines=(332,), copied=False)
        >>> lookup(["table1-pacs"], Row("ERM", "fad", "none"), "PACS", "photo+sketch").value
        90.6
        >>> lookup(["table2"], Row("DMG", "adam", "none"), "PACS").copied
        True
    """
    known = []
    for target in targets.split("+"):
        wanted = (method, dataset, target, quantity)
        found = [n for table in tables for n in _own(table).get(wanted, ())]
        found = [n for n in found if steps is None or n.steps in (None, steps)]
        if not found:
            return None
        known.append(found[0])
    copied = any(n.source == LITERATURE for n in known)
    lines = tuple(dict.fromkeys(n.line for n in known))
    return Beside(fmean(n.value for n in known), lines, copied)


@cache
def _own(table: str) -> dict[tuple[Row, str, str, str], list[Printed]]:
    """A table's numbers, without those from DomainBed, which the paper reproduces itself.

    The numbers from the literature name no optimizer. They go beside Adam's.
    """
    found = defaultdict(list)
    for n in printed():
        if n.table == table and n.source != "DomainBed":
            method = n.method._replace(optimizer="adam") if n.source == LITERATURE else n.method
            found[method, n.dataset, n.target, n.quantity].append(n)
    return found
