"""Compare runs or sweeps: accuracies, paired differences, and settings that differ."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from steppe.console import printed
from steppe.errors import UserError

from .answer import evidence, no_interval, verdict
from .cells import MISSING, points_text
from .columns import CONTRASTS, Column, table_columns, values
from .contrasts import Contrast, Contrasts, by_method, contrast, corrected
from .differences import ROUNDING
from .followed import shared_protocol
from .remarks import remarks
from .render import TextTable, contrasts_text, text_table, to_terminal
from .report import rerunnable
from .runs import Loaded, Row, Run, load_runs
from .spent import DIGITS, hours, step_time
from .tables import Place, Selected, Table, TableRow, dataset_tables, select_runs, target_sets
from .values import finite

_RUN = ("targets", "trial_seed", "seed", "resolved", "draw")
"""Config keys that identify a run within a sweep or describe its execution."""
_BESIDE = 4
"""Maximum number of rows whose settings fit side by side in a terminal."""


@dataclass(frozen=True)
class Beside:
    """Several runs or sweeps. Each method of each of them is a separate row."""

    selected: Selected
    pairs: Contrasts
    settings: dict[str, list[tuple[str, ...]]]
    """Config keys whose values differ, with the values of each row."""
    unpaired: tuple[str, ...]
    problems: tuple[str, ...]

    @cached_property
    def answer(self) -> list[str]:
        """One sentence per pair."""
        return [_sentence(pair) for pair in self.pairs.pairs] + list(self.unpaired)

    @cached_property
    def order(self) -> list[Row]:
        """Rows in the order in which their folders were given."""
        return list(dict.fromkeys(run.row for run in self.selected.runs))

    @cached_property
    def tables(self) -> list[Table]:
        place = {row: at for at, row in enumerate(self.order)}
        return [
            replace(table, rows=tuple(sorted(table.rows, key=lambda row: place[row.row])))
            for table in dataset_tables(self.selected)
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "answer": self.answer,
            "selection": self.selected.selection,
            "rows": [
                {
                    "dataset": table.dataset,
                    "name": row.row.name,
                    "cells": {name: cell and cell._asdict() for name, cell in row.cells.items()},
                    "avg": row.average and row.average.mean,
                    **values(_COST, row),
                }
                for table in self.tables
                for row in table.rows
            ],
            "comparisons": [values(CONTRASTS, pair) for pair in self.pairs.pairs],
            "multiplicity": {"tests": self.pairs.tests, "note": self.pairs.note},
            "settings": {
                key: dict(zip((row.name for row in self.order), map(", ".join, found), strict=True))
                for key, found in self.settings.items()
            },
            "problems": list(self.problems),
        }

    def to_terminal(self) -> str:
        """The tables and the settings that differ."""
        sections = [contrasts_text(self.pairs)] if len(self.pairs.pairs) > 1 else []
        for table in self.tables:
            columns = [
                replace(one, heading="run") if one.key == "optimizer" else one
                for one in table_columns(table)
                if one.key not in ("space", "runs")
            ]
            sections.append(text_table(table.dataset, [*columns, *_COST], table.rows))
        names = [row.name for row in self.order]
        if self.settings and len(names) <= _BESIDE:
            sections.append(_settings_text(names, self.settings))
        return printed([*map(to_terminal, sections)])


_COST: list[Column[TableRow]] = [
    Column("runs", "runs", lambda row: len(row.runs)),
    Column("seconds_per_step", "ms/step", lambda row: step_time(row.runs), digits=1, scale=1e3),
    Column("hours", "hours", lambda row: sum(hours(row.runs).values()) or None, digits=DIGITS),
]
"""Cost of a row's runs."""


def compare_runs(paths: Sequence[Path | str], selection: str | None = None) -> Beside:
    """Compare each run or sweep with the first one.

    Model selection is applied to each separately, and must be the same (default: that of their
    protocols, or `train-val`). Methods are paired by name; a folder with a
    single method is paired with every method of the others.
    """
    if len(paths) < 2:
        raise UserError("nothing to compare with: name two or more runs or sweeps")
    sides = _names(paths)
    loaded = [load_runs(path) for path in paths]
    for path, one in zip(paths, loaded, strict=True):
        if not one.runs:
            raise UserError(f"{path}: none of the runs has a record yet")
    protocols = [shared_protocol(one.runs) for one in loaded]
    several = len(set(protocols)) > 1
    if several and selection is not None:  # which then holds for all, whatever they fix
        loaded = [
            replace(one, runs=tuple(replace(run, protocol=None) for run in one.runs))
            for one in loaded
        ]
    chosen = [select_runs(one.runs, selection) for one in loaded]
    by = {one.selection: side for side, one in zip(sides, chosen, strict=True)}
    if len(by) > 1:
        told = ", ".join(f"{side} by {name}" for name, side in by.items())
        raise UserError(
            f"the protocols of these runs select models differently ({told}): pass --selection to "
            "compare them by the same"
        )
    rows = [
        {row: _label(side, row, len(one.rows()) == 1) for row in one.rows()}
        for side, one in zip(sides, chosen, strict=True)
    ]
    merged = _merged(chosen, rows)
    pairs, unpaired = _pairs(merged, rows)
    everything = Loaded(
        merged.runs,
        tuple(problem for one in loaded for problem in one.problems),
        tuple(path for one in loaded for path in one.pending),
    )
    differing = [
        f"{side}: {one.name if one else 'none'}" for side, one in zip(sides, protocols, strict=True)
    ]
    mixed = [f"the protocols differ ({', '.join(differing)})"] if several else []
    said = (*everything.problems, *mixed, *remarks(everything, merged))
    return Beside(merged, pairs, _settings(merged), tuple(unpaired), said)


def _names(paths: Sequence[Path | str]) -> list[str]:
    """The shortest path suffixes that are unique."""
    whole = [Path(os.path.abspath(path)).parts for path in paths]
    if len(set(whole)) < len(whole):
        again = next(path for at, path in enumerate(paths) if whole[at] in whole[:at])
        raise UserError(f"{again} is named twice: name two or more different runs or sweeps")
    for length in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(names):
            break
    return names


def _label(side: str, row: Row, alone: bool) -> Row:
    """A row whose name combines the folder and the method."""
    return Row("ERM", f"{side} ({row.name})" if alone else f"{side}: {row.name}", "none")


def _merged(chosen: Sequence[Selected], rows: Sequence[dict[Row, Row]]) -> Selected:
    runs = [
        replace(run, row=names[run.row])
        for one, names in zip(chosen, rows, strict=True)
        for run in one.runs
    ]
    found = {
        Place(place.dataset, names[place.row], place.column, place.trial): what
        for one, names in zip(chosen, rows, strict=True)
        for place, what in one.chosen.items()
    }
    columns: dict[str, dict[str, frozenset[str]]] = {}
    for dataset in dict.fromkeys(dataset for one in chosen for dataset in one.columns):
        own = [run for run in runs if run.dataset == dataset]
        columns[dataset] = target_sets(own)
        for one in chosen:
            columns[dataset] |= one.columns.get(dataset, {})
    return Selected(tuple(runs), chosen[0].selection, columns, found)


def _pairs(merged: Selected, rows: Sequence[dict[Row, Row]]) -> tuple[Contrasts, list[str]]:
    known = by_method(merged)
    first, *others = rows
    found: list[Contrast] = []
    unpaired, met = [], set()
    for side in others:
        loose = len(first) == 1 or len(side) == 1
        for ours, theirs in ((a, b) for a in first for b in side if loose or a == b):
            a, b = side[theirs].name, first[ours].name
            met |= {a, b}
            pair = contrast((a, known[a]), (b, known[b]))
            if pair is None:
                unpaired.append(
                    f"{a} and {b} share no target and trial seed, so there is no paired difference."
                )
            else:
                found.append(pair)
    alone = [row.name for side in rows for row in side.values() if row.name not in met]
    unpaired += [f"{name} has no counterpart, so it is not compared." for name in alone]
    tested = corrected(found)
    tests = sum(pair.adjusted is not None for pair in tested)
    return Contrasts(tuple(tested), tests), unpaired


def _sentence(pair: Contrast) -> str:
    gap = points_text(pair.difference)
    place = "below" if pair.difference < 0 else "above"
    start = f"{pair.a} is {gap.lstrip('+-')} points {place} {pair.b}"
    if abs(pair.difference) < ROUNDING:
        start = f"{pair.a} and {pair.b} are equally accurate"
    elif gap == "0.0":
        start = f"{pair.a} is less than 0.1 points {place} {pair.b}"
    if pair.deciding is None:
        return f"{start}; {no_interval(pair)}."
    return f"{start} ({evidence(pair)}): {verdict(pair)}."


def _settings(merged: Selected) -> dict[str, list[tuple[str, ...]]]:
    """Config keys whose values differ between rows, with each row's values."""
    rows = list(dict.fromkeys(run.row for run in merged.runs))
    seen: dict[str, dict[Row, set[str]]] = {}
    for run in merged.runs:
        for key, value in _flat(run).items():
            seen.setdefault(key, {}).setdefault(run.row, set()).add(value)
    return {
        key: [tuple(sorted(found.get(row, {MISSING}))) for row in rows]
        for key, found in seen.items()
        if len({frozenset(found.get(row, ())) for row in rows}) > 1
    }


def _flat(run: Run) -> dict[str, str]:
    found = {}
    for key, value in rerunnable(run).items():
        inner = value if isinstance(value, dict) else {"": value}
        for name, one in inner.items():
            if key not in _RUN:
                found[f"{key}.{name}".rstrip(".")] = (
                    one if isinstance(one, str) else json.dumps(one)
                )
    return found


def _settings_text(names: Sequence[str], settings: dict[str, list[tuple[str, ...]]]) -> TextTable:
    def of(at: int) -> Column[tuple[str, list[str]]]:
        return Column("", names[at], lambda one: one[1][at])

    columns = [Column("", "setting", lambda one: one[0], word=True), *map(of, range(len(names)))]
    lines = [(key, _brief(found)) for key, found in settings.items()]
    return text_table("Settings that differ", columns, lines)


def _brief(found: Sequence[tuple[str, ...]]) -> list[str]:
    """The values of each row for a terminal: a range if there are many, with three digits.

    Examples:
        >>> _brief([("0.05",), ("0.1", "0.0123456", "0.2"), ("adam", "sgd")])
        ['0.05', '0.0123 to 0.2 (3 values)', 'adam, sgd']
        >>> _brief([("0.05",), ("0.050001",)])  # rounded, they would not differ
        ['0.05', '0.050001']
    """
    brief = [_brief_row(values) for values in found]
    return brief if len(set(brief)) == len(set(found)) else [", ".join(values) for values in found]


def _brief_row(values: Sequence[str]) -> str:
    def rounded(text: str) -> str:
        number = _number(text)
        return f"{number:.3g}" if isinstance(number, float) else text

    if len(values) <= 2:
        return ", ".join(map(rounded, values))
    numbers = [_number(text) for text in values]
    if None in numbers:
        return f"{len(values)} values"
    low, *_, high = sorted(values, key=lambda text: _number(text) or 0)
    return f"{rounded(low)} to {rounded(high)} ({len(values)} values)"


def _number(text: str) -> float | int | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if finite(value) else None
