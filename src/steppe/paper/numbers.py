"""The paper's own numbers, from a data file that names the line of each."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
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
    known = []
    for target in targets.split("+"):
        wanted = (method, dataset, target, quantity)
        found = [n for table in tables for n in _own(table).get(wanted, ())]
        found = [n for n in found if steps is None or n.steps in (None, steps)]
        if not found:
            return None
        known.append(found[0])
    return Beside(fmean(n.value for n in known), tuple(dict.fromkeys(n.line for n in known)))


@cache
def _own(table: str) -> dict[tuple[Row, str, str, str], list[Printed]]:
    """The paper's own numbers of a table: what it took from others is beside no run of ours."""
    found = defaultdict(list)
    for n in printed():
        if n.table == table and n.source not in ("DomainBed", "literature"):
            found[n.method, n.dataset, n.target, n.quantity].append(n)
    return found
