"""A planned sweep, read from its folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steppe import strangers
from steppe.durable import temporary_name
from steppe.errors import UserError
from steppe.sealed import KEY, Broken, unseal

from .store import Event, Job, state_of

FILE = "sweep.json"
WRITING = temporary_name(Path(FILE)).name
"""The plan's temporary name while `durable.replace` writes it."""
VERSION = 1
"""Format version of `sweep.json`."""
AXES = ("dataset", "targets", "algorithm", "optimizer", "averaging")
"""The axes of a sweep, besides trials and draws."""
_SHAPE: Mapping[str, Any] = {"retries": int, "grids": list, "commands": list, "runs": dict}
_RUN_SHAPE: Mapping[str, Any] = {
    **dict.fromkeys(AXES, str),
    "trial": int,
    "draw": int | None,
    "steps": int,
}


@dataclass(frozen=True)
class Sweep:
    """A planned sweep.

    Attributes:
        path: its folder.
        axes: each run's place in the grid, in the order in which workers take them.
        retries: how often to retry a failed run.
        facts: the other entries of `sweep.json`: grids, commands, versions.
    """

    path: Path
    axes: Mapping[str, Mapping[str, Any]]
    retries: int
    facts: Mapping[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.axes)

    def folder(self, name: str) -> Path:
        return self.path / "runs" / name

    def survey(
        self, now: float, stale: float, names: Iterable[str] | None = None
    ) -> Iterator[tuple[Job, list[Event], str]]:
        """Each run, or each of the named runs, with its events and state."""
        for name in self.axes if names is None else names:
            job = Job(self.folder(name))
            events = job.events()
            yield job, events, state_of(job, events, now, self.retries, stale)


def read_plan(path: Path) -> Sweep:
    """Read a planned sweep.

    Raises:
        UserError: it is missing or damaged, or a run's name would lead outside its folder.
    """
    file = path / FILE
    try:
        facts = unseal(strangers.read(file))
    except FileNotFoundError:
        plan = strangers.command("steppe", "sweep", "plan", path)
        raise UserError(f"{path} is not a sweep: plan one with: {plan} --datasets ...") from None
    except Broken:
        raise UserError(
            f"{file} does not match its checksum. If you edited it, remove its last entry, "
            f'"{KEY}". Otherwise it is damaged: restore it, or plan the sweep in a new folder.'
        ) from None
    except ValueError as error:
        raise UserError(f"{file} is damaged: it is not valid JSON ({error})") from None
    version = facts.get("version")
    if not isinstance(version, int):
        raise UserError(f"{file} is not a plan: version must be a number, got {version!r:.60}")
    if version > VERSION:
        raise UserError(f"{path} was planned by a newer steppe: pip install -U steppe")
    _check_shape(file, "the plan", facts, _SHAPE)
    runs: dict[str, Any] = facts.pop("runs")
    for name, axes in runs.items():
        if not strangers.is_name(name):
            raise UserError(f"{file} is damaged: {name!r:.200} is not a valid run name")
        if not isinstance(axes, dict):
            raise UserError(f"{file} is damaged: run {name} is {axes!r:.60}")
        _check_shape(file, f"run {name}", axes, _RUN_SHAPE)
    if (path / "runs").is_symlink():  # a downloaded sweep's link could lead anywhere
        raise UserError(
            f"{path / 'runs'} is a symbolic link: replace it with the folder itself (only the "
            "whole sweep may be behind a link)"
        )
    return Sweep(path, runs, facts["retries"], facts)


def _check_shape(file: Path, what: str, facts: Mapping[str, Any], shape: Mapping[str, Any]) -> None:
    for key, expected in shape.items():
        if key not in facts:
            raise UserError(f"{file} is damaged: {what} has no {key!r}")
        if not isinstance(facts[key], expected):
            raise UserError(f"{file} is damaged: {key!r} of {what} is {facts[key]!r:.60}")
