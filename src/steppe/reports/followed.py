"""The protocol that a run follows, as its sweep's plan stores it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe.errors import UserError, reason, unknown
from steppe.sealed import unseal
from steppe.strangers import command, read

if TYPE_CHECKING:
    from .runs import Run

PLAN = "sweep.json"
"""The file that makes a folder a sweep."""
SELECTION = "train-val"
"""The selection of runs that follow no protocol."""


@dataclass(frozen=True)
class Followed:
    """The protocol of a sweep.

    Attributes:
        name: its name.
        contents: all that it fixes, as JSON, which tells versions of a protocol apart.
        selections: the selections that it allows, its own first; empty for any.
        reruns: on how many further splits it reruns the winner of a search.
        facts: the contents as plain values.
    """

    name: str
    contents: str
    selections: tuple[str, ...] = ()
    reruns: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)


def followed(facts: Any) -> Followed | None:
    """Read the protocol in a plan; ValueError if it is not one."""
    if facts is None:
        return None
    try:
        rules = facts["rules"]
        selection, reruns = rules.get("selection"), rules.get("reruns", {"value": 0})["value"]
        allowed = () if selection is None else (selection["value"], *selection["others"])
        strings = all(isinstance(name, str) for name in (facts["name"], *allowed))
        if not strings or type(reruns) is not int:
            raise TypeError
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f"its protocol is {facts!s:.60}") from None
    return Followed(facts["name"], json.dumps(facts, sort_keys=True), allowed, reruns, facts)


class Followers:
    """The protocols of runs, by the sweeps that contain them."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems
        self._known: dict[str, Followed | None] = {}

    def of(self, folder: Path) -> Followed | None:
        """The protocol of the run in SWEEP/runs/NAME or SWEEP/runs/NAME/result."""
        whole = os.path.abspath(folder)
        run = os.path.dirname(whole) if os.path.basename(whole) == "result" else whole
        runs = os.path.dirname(run)
        if runs not in self._known:
            plan = Path(runs).parent / PLAN
            inside = os.path.basename(runs) == "runs" and plan.is_file()
            self._known[runs] = self._read(plan) if inside else None
        return self._known[runs]

    def _read(self, plan: Path) -> Followed | None:
        try:
            return followed(unseal(read(plan)).get("protocol"))
        except (OSError, ValueError) as error:
            self._problems.append(f"{plan}: {reason(error)}; its protocol is unknown")
            return None


def shared_protocol(runs: Iterable[Run]) -> Followed | None:
    """The protocol of all runs; an error if they follow different ones."""
    first: dict[Followed | None, Run] = {}
    for run in runs:
        first.setdefault(run.protocol, run)
    if len(first) > 1:
        names = [one.name for one in first if one is not None]
        said = [
            f"{_sweep(run)} follows {f'the protocol {one.name!r}' if one else 'no protocol'}"
            for one, run in first.items()
        ]
        again = " (versions with different contents)" if len(set(names)) < len(names) else ""
        ways = ", ".join(command("steppe", "report", _sweep(run)) for run in first.values())
        raise UserError(
            f"runs of different protocols cannot share a table: {'; '.join(said)}{again}. "
            f"Report on each alone: {ways}"
        )
    return next(iter(first), None)


def _sweep(run: Run) -> Path:
    """The sweep of a run, or the run itself if it belongs to none."""
    folder = run.path.parent if run.path.name == "result" else run.path
    return folder.parent.parent if folder.parent.name == "runs" else folder


def selection_of(protocol: Followed | None, asked: str | None, known: Iterable[str]) -> str:
    """The selection that was asked for, or the protocol's."""
    if asked is not None and asked not in known:
        raise UserError(unknown("selection", asked, known))
    if protocol is None or not protocol.selections:
        return asked or SELECTION
    if asked not in (None, *protocol.selections):
        allowed = " or ".join(protocol.selections)
        raise UserError(
            f"--selection {asked} contradicts the protocol {protocol.name!r}, which fixes "
            f"selection={allowed}: leave --selection out"
        )
    chosen = asked or protocol.selections[0]
    if chosen not in known:
        raise UserError(unknown(f"selection of the protocol {protocol.name!r}:", chosen, known))
    return chosen
