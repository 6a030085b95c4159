"""The table an advisor is fitted to: tasks with their indicators and measured accuracies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from steppe import strangers
from steppe.durable import replace
from steppe.errors import UserError, reason, shown

VERSION = 1
SHIPPED = Path(__file__).with_name("table.json")
LIMIT = 2**24
"""Size limit of a table, in bytes."""

_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)
_Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
_Number = Annotated[float, Field(strict=True, ge=-1e100, le=1e100)]  # squares are finite
_Percent = Annotated[float, Field(strict=True, ge=0, le=100)]
Fact = str | int | float | bool | None


@dataclass(frozen=True, config=_CONFIG)
class Example:
    """A task on which every optimizer was measured.

    Attributes:
        task: its name.
        family: the tasks that are variants of each other. Evaluation holds a family out as a whole.
        base: where its images come from.
        indicators: what is measured before an optimizer is chosen.
        scores: target accuracies of every optimizer in percent, one per seed. The same seed has the
            same split, batches and initial weights for all of them.
    """

    task: _Name
    family: _Name
    base: _Name
    indicators: Mapping[_Name, _Number]
    scores: Annotated[
        Mapping[_Name, Annotated[tuple[_Percent, ...], Field(min_length=1)]], Field(min_length=1)
    ]

    @model_validator(mode="after")
    def _paired(self) -> Self:
        counts = {name: len(values) for name, values in self.scores.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"optimizers must have the same number of seeds, got {counts}")
        return self


@dataclass(frozen=True, config=_CONFIG)
class Table:
    """Examples, and how they were measured (machine, versions, date)."""

    examples: tuple[Example, ...]
    facts: Mapping[_Name, Fact]


_EXAMPLE: TypeAdapter[Example] = TypeAdapter(Example)
_FACTS: TypeAdapter[dict[str, Fact]] = TypeAdapter(
    dict[_Name, Fact], config=ConfigDict(allow_inf_nan=False)
)


def read_table(path: Path | str) -> Table:
    """Read a table.

    Raises:
        UserError: it is missing or damaged; the message names the row and what is wrong with it.
    """
    try:
        found = strangers.parse(strangers.read(path, LIMIT))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable table of tasks: {reason(error)}") from None
    keys = {"version", "facts", "examples"}
    if not isinstance(found, dict) or set(found) != keys:
        raise UserError(f"{path} is not a table of tasks: expected an object with {sorted(keys)}")
    if found["version"] != VERSION:
        raise UserError(
            f"{path} has table version {shown(found['version'])}, expected {VERSION}: "
            "pip install -U steppe"
        )
    if not isinstance(found["examples"], list):
        raise UserError(f"{path}: examples must be a list, got {shown(found['examples'])}")
    facts = _parsed(_FACTS, found["facts"], f"{path}: facts")
    rows = [
        _parsed(_EXAMPLE, row, f"{path}: row {number}")
        for number, row in enumerate(found["examples"], 1)
    ]
    check(rows, str(path))
    return Table(tuple(rows), facts)


def write_table(
    path: Path | str, examples: Iterable[Example], facts: Mapping[str, Fact] | None = None
) -> None:
    """Write a table atomically, one example a line."""
    rows = list(examples)
    check(rows, str(path))
    known = _parsed(_FACTS, dict(facts or {}), f"{path}: facts")
    lines = [json.dumps(asdict(row), separators=(",", ":"), allow_nan=False) for row in rows]
    head = f'{{\n"version": {VERSION},\n"facts": {json.dumps(known, allow_nan=False)},\n'
    body = ",\n".join(lines)
    replace(Path(path), f'{head}"examples": [\n{body}\n]\n}}\n'.encode())


def check(examples: Sequence[Example], where: str) -> None:
    """Refuse a table that is empty, names a task twice, or has holes.

    Raises:
        UserError: naming the row, counted from 1.
    """
    if not examples:
        raise UserError(f"{where}: no examples")
    first, seen = examples[0], set[str]()
    for number, row in enumerate(examples, 1):
        at = f"{where}: row {number} (task {shown(row.task)})"
        if row.task in seen:
            raise UserError(f"{at}: an earlier row has the same task")
        seen.add(row.task)
        for kind in ("indicators", "scores"):
            different = set(getattr(row, kind)) ^ set(getattr(first, kind))
            if different:
                raise UserError(f"{at}: {kind} differ from row 1's: {', '.join(sorted(different))}")


@cache
def shipped() -> Table:
    """The table that comes with steppe.

    Raises:
        UserError: this installation has none.
    """
    if not SHIPPED.exists():
        raise UserError(
            f"this installation has no table of measured tasks ({SHIPPED}): reinstall steppe, or "
            "read one of your own with read_table(path)"
        )
    return read_table(SHIPPED)


def _parsed(adapter: TypeAdapter[Any], facts: Any, where: str) -> Any:
    task = facts.get("task") if isinstance(facts, dict) else None
    where += f" (task {shown(task)})" if task is not None else ""
    try:
        return adapter.validate_python(facts)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        value = "" if first["type"] == "value_error" else f"={shown(first['input'])}"
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{where}: {f'{key}{value}: ' if key else ''}{message}") from None
