"""What the runs of a study found: all that its verdicts are computed from.

The ledger is one small file. With it a study goes on where it ended, even on another machine, and
its verdicts can be computed again without the runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from steppe import strangers
from steppe.durable import full_disk_explained, replace
from steppe.errors import UserError, shown
from steppe.sealed import Broken, seal, unseal

from .design import Plan

FILE = "outcomes.json"


Kind = Literal["tune", "run", "twin"]


class Slot(NamedTuple):
    """The place of a run in a study."""

    kind: Kind
    method: str
    seed: int
    target: str
    choice: int = 0
    """The candidate of a tuning run."""


_Percent = Annotated[float, Field(ge=0, le=100)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Outcome:
    """The result of one run.

    Attributes:
        accuracy: on all images of the held-out domains, of the study's endpoint; in percent. None
            if the run failed.
        other: of the raw weights beside their average, on test images alone, if it was evaluated.
        validation: on source validation images, in percent.
        seconds: of updates and evaluations.
        device: where it ran.
        error: why it failed.
    """

    accuracy: _Percent | None
    other: _Percent | None = None
    validation: _Percent | None = None
    seconds: Annotated[float, Field(ge=0)] = 0.0
    device: str = ""
    error: str = ""


Outcomes = Mapping[Slot, Outcome]
_ROW = TypeAdapter(tuple[Slot, Outcome])


def write_outcomes(path: Path, digest: str, found: Outcomes) -> None:
    """Replace the ledger; rows are sorted, so that the same outcomes are the same file."""
    rows = ",\n  ".join(json.dumps([list(s), _values(found[s])]) for s in sorted(found))
    text = f'{{\n "study": {json.dumps(digest)},\n "outcomes": [\n  {rows}\n ]\n}}'
    file = path / FILE
    with full_disk_explained(file, "run the study again"):
        replace(file, seal(text) + b"\n")


def _values(outcome: Outcome) -> dict[str, object]:
    found = {k: v for k, v in vars(outcome).items() if not k.startswith("_")}
    return {k: v for k, v in found.items() if v not in (None, "") or k == "accuracy"}


def read_outcomes(path: Path, plan: Plan) -> dict[Slot, Outcome]:
    """Read the ledger of a study; empty if there is none yet.

    Raises:
        UserError: it is damaged, or belongs to a study with another design.
    """
    file = path / FILE
    try:
        facts = unseal(strangers.read(file))
    except FileNotFoundError:
        return {}
    except (Broken, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}): restore it from a copy") from None
    if facts.get("study") != plan.digest:
        raise UserError(f"{file} belongs to a study with another design ({facts.get('study')!r})")
    rows: dict[Slot, Outcome] = {}
    try:
        rows.update(_ROW.validate_python(tuple(row)) for row in facts.get("outcomes", ()))
    except ValidationError as error:
        first = error.errors()[0]
        where = f"row {len(rows) + 1}, {'.'.join(map(str, first['loc']))}={shown(first['input'])}"
        raise UserError(f"{file} is damaged: {where}: {first['msg']}") from None
    except TypeError as error:
        raise UserError(f"{file} is damaged: {error}") from None
    methods = {method.name for method in plan.design.methods}
    for slot in rows:
        if slot.method not in methods or slot.target not in plan.design.targets or slot.seed < 0:
            raise UserError(f"{file} is damaged: no run of this study is {shown(list(slot))}")
    return rows


def hours(found: Outcomes, kinds: Iterable[Kind] = ("tune", "run", "twin")) -> float:
    """Time of runs; runs that share a GPU count one by one."""
    return sum(o.seconds for slot, o in found.items() if slot.kind in set(kinds)) / 3600
