"""Runs as reports see them: what was tried, and the accuracies along the way.

Configs are read as plain JSON and leniently: a run imported from elsewhere may name an algorithm
that steppe does not have. What cannot be read is named, and never stops a report.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from steppe.errors import UserError, reason
from steppe.sealed import broken
from steppe.strangers import read

from .values import finite, finite_or_none, parse

Key = tuple[str, str]
"""A domain and a part of it: ``("sketch", "test")``."""

AXES = ("algorithm", "optimizer", "averaging")
_DEFAULTS = {"algorithm": "ERM", "optimizer": "adam", "averaging": "none"}
MEASUREMENTS = "curvature"
"""The folder of a run in which `steppe curvature` keeps its results."""
_LINES_NAMED = 5
_LONGEST_STATE = 1000
"""Bytes; it is one word."""


class Row(NamedTuple):
    """A method: what a row of a table is about."""

    algorithm: str
    optimizer: str
    averaging: str

    @property
    def name(self) -> str:
        """The method in words, with the usual algorithm and averaging left out.

        Examples:
            >>> Row("ERM", "fad", "none").name, Row("CORAL", "adam", "swad").name
            ('fad', 'CORAL adam swad')
        """
        algorithm = () if self.algorithm == "ERM" else (self.algorithm,)
        averaging = () if self.averaging == "none" else (self.averaging,)
        return " ".join((*algorithm, self.optimizer, *averaging))

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts rows: ERM first, then by name, without averaging before with."""
        first = (self.algorithm != "ERM", self.algorithm.lower(), self.algorithm)
        return (*first, self.averaging != "none", self.averaging, self.optimizer)


@dataclass(frozen=True, slots=True)
class Record:
    """One evaluation of a run."""

    step: int
    accuracy: Mapping[Key, float]
    """By domain and part, from 0 to 1."""
    loss: Mapping[str, float]
    averaged: bool
    """Whether the weights were averaged ones."""
    seconds_per_step: float | None
    memory_gb: float | None


@dataclass(frozen=True)
class Run:
    """One run: its config as far as reports need it, and its records by step."""

    path: Path
    dataset: str
    targets: tuple[str, ...]
    algorithm: str
    optimizer: str
    averaging: str
    trial: int
    choice: str
    """What hyper-parameters it has: ``draw 3``, or a digest of them where none was drawn."""
    draw: int | None
    hparams: Mapping[str, Any]
    """The options of all axes by name, and the other settings that a search may vary."""
    steps: int
    space: str | None
    split: str
    state: str
    """`planned`, `running`, `done` or `failed`."""
    config: Mapping[str, Any]
    records: tuple[Record, ...]

    @property
    def row(self) -> Row:
        return Row(self.algorithm, self.optimizer, self.averaging)

    @property
    def target_set(self) -> frozenset[str]:
        return frozenset(self.targets)

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """Every domain that was evaluated, in the order of the fullest record."""
        fullest = max(self.records, key=lambda record: len(record.accuracy))
        return tuple(dict.fromkeys(domain for domain, _ in fullest.accuracy))

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts runs, whatever order they were found in: by draw, then choice, then path."""
        return (self.draw is not None, self.draw or 0, self.choice, str(self.path))


@dataclass(frozen=True)
class Loaded:
    """What was found below a folder."""

    runs: tuple[Run, ...]
    problems: tuple[str, ...]
    """A line for every file of which something could not be read."""
    unreadable_lines: int = 0
    pending: tuple[Path, ...] = ()
    """Folders of runs that are planned, or began and have not been evaluated yet."""


def load_runs(root: Path | str | Iterable[Path | str]) -> Loaded:
    """Read every run below a folder, in one order whatever the file system's.

    Folders called ``attempt-*`` (a sweep's unfinished work), ``checkpoint`` and ``curvature`` are
    left out.

    Args:
        root: a folder; or several folders, or files of runs (`config.json`, `records.jsonl`).
    """
    roots = [Path(root)] if isinstance(root, str | Path) else [Path(item) for item in root]
    folders: dict[Path, Path] = {}
    for path in roots:
        if not path.exists():
            raise UserError(f"{path} does not exist: expected a folder with runs below it")
        for folder in [path.parent] if path.is_file() else _run_folders(path):
            folders.setdefault(folder.resolve(), folder)  # one run, however it is reached
    if not any((folder / "config.json").exists() for folder in folders):
        where = ", ".join(map(str, roots))
        raise UserError(f"no run (config.json) found at or below {where}")
    runs, problems, unreadable, pending = [], [], 0, []
    with _no_collection():
        for folder in sorted(folders.values(), key=str):
            found_run = _read_run(folder)
            problems += found_run.problems
            unreadable += found_run.unreadable
            if found_run.run is not None:
                runs.append(found_run.run)
            elif not found_run.problems and not (folder / "result" / "config.json").exists():
                pending.append(folder)
    return Loaded(tuple(runs), tuple(problems), unreadable, tuple(pending))


@contextmanager
def _no_collection() -> Iterator[None]:
    # Millions of new objects, none of them garbage: looking for cycles takes as long as reading.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run_folders(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        # A measurement may be called config.json, after a domain.
        left_out = ("checkpoint", MEASUREMENTS) if "config.json" in files else ("checkpoint",)
        names[:] = [n for n in names if n not in left_out and not n.startswith("attempt-")]
        if "config.json" in files:
            yield Path(folder)


class _Found(NamedTuple):
    run: Run | None
    problems: list[str]
    unreadable: int = 0


def _read_run(folder: Path) -> _Found:
    file = folder / "config.json"
    try:
        config = parse(read(file))
        if not isinstance(config, dict):
            raise ValueError("expected an object with keys")
        facts = _facts(config)
    except (OSError, ValueError) as error:
        return _Found(None, [f"{file}: {reason(error)}"])
    file = folder / "records.jsonl"
    try:
        data = read(file)
    except FileNotFoundError:
        return _Found(None, [])
    except OSError as error:
        return _Found(None, [f"{file}: {reason(error)}"])
    state, problems = "planned", []
    try:
        state = read(folder / "state", _LONGEST_STATE).decode(errors="replace").strip()
    except FileNotFoundError:
        pass  # imported, or made by hand
    except OSError as error:
        problems.append(f"{folder / 'state'}: {reason(error)}")
    records, wrong = _read_records(data, whole=state == "done")
    if wrong:
        problems.append(f"{file}: {unreadable_lines(wrong)}")
    if not records:
        return _Found(None, problems, len(wrong))
    steps = facts.pop("steps") or records[-1].step + 1
    run = Run(path=folder, steps=steps, state=state, config=config, records=records, **facts)
    return _Found(run, problems, len(wrong))


def unreadable_lines(numbers: list[int]) -> str:
    """Name lines that could not be read.

    Examples:
        >>> unreadable_lines([3, 8])
        '2 unreadable lines (3, 8)'
    """
    named = ", ".join(map(str, numbers[:_LINES_NAMED]))
    more = ", ..." if len(numbers) > _LINES_NAMED else ""
    return f"{len(numbers)} unreadable line{'s' * (len(numbers) != 1)} ({named}{more})"


def _read_records(data: bytes, whole: bool) -> tuple[tuple[Record, ...], list[int]]:
    """The records by step, the last line of each counting; and the numbers of unreadable lines.

    Args:
        data: the file.
        whole: whether the run is done, so that nothing will be added.
    """
    records: dict[int, Record] = {}
    wrong: list[int] = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line or line.isspace():
            continue
        try:
            if broken(line):
                raise ValueError("it differs from its checksum")
            record = _record(parse(line))
        except (ValueError, TypeError, KeyError, AttributeError):
            # What a crash cut off is no damage while a resumed run may write it again.
            if whole or number < len(lines):
                wrong.append(number)
            continue
        records[record.step] = record
    return tuple(records[step] for step in sorted(records)), wrong


_keys: dict[Key, Key] = {}
"""One tuple for each key, however many records have it."""


def _record(data: Any) -> Record:
    step = data["step"]
    if type(step) is not int or step < 0:
        raise ValueError("step is no number")
    accuracy: dict[Key, float] = {}
    for domain, parts in data["domains"].items():
        for part, scores in parts.items():
            value = scores["accuracy"]
            if type(value) is not float:
                value = _number(value)
            if not 0.0 <= value <= 1.0:  # nor is NaN
                raise ValueError("an accuracy is not between 0 and 1")
            key = (domain, part)
            accuracy[_keys.setdefault(key, key)] = value
    losses = data.get("loss")
    loss = {k: v for k, v in losses.items() if finite(v)} if isinstance(losses, dict) else {}
    return Record(
        step,
        accuracy,
        loss,
        data.get("averaged") is True,
        finite_or_none(data.get("seconds_per_step")),
        finite_or_none(data.get("memory_gb")),
    )


def _number(value: Any) -> float:
    if not finite(value):
        raise TypeError("expected a number")
    return float(value)


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `Run` has from the config alone; a ValueError where it describes no run."""
    dataset, targets = config.get("dataset"), config.get("targets")
    if not isinstance(dataset, str) or not dataset:
        raise ValueError("no run's config: it names no dataset")
    if isinstance(targets, str):
        targets = [name for name in targets.split(",") if name]
    if not isinstance(targets, list) or not targets:
        raise ValueError("no run's config: it names no targets")
    if not all(isinstance(name, str) and name for name in targets):
        raise ValueError(f"targets={targets!r}: expected names of domains")
    trial, draw, space = config.get("trial_seed", 0), config.get("draw"), config.get("space")
    for key, value in (("trial_seed", trial), ("draw", draw)):
        if type(value) is not int and (key, value) != ("draw", None):
            raise ValueError(f"{key}={value!r} is no whole number")
    steps = config.get("steps")
    named = {axis: _named(config, axis) for axis in AXES}
    return {
        "dataset": dataset,
        "targets": tuple(targets),
        **{axis: name for axis, (name, _) in named.items()},
        "trial": trial,
        "choice": _choice(config, named, targets),
        "draw": draw,
        "hparams": MappingProxyType(_hparams(config, named)),
        "steps": steps if type(steps) is int else None,
        "space": space if isinstance(space, str) else None,
        "split": str(config.get("split", "domainbed")),
    }


def _named(config: Mapping[str, Any], axis: str) -> tuple[str, dict[str, Any]]:
    value = config.get(axis, _DEFAULTS[axis])
    if isinstance(value, str):
        return value, {}
    if not isinstance(value, dict) or not isinstance(value.get("name", ""), str):
        raise ValueError(f"{axis}={value!r}: expected a name, or a name with options")
    return value.get("name", _DEFAULTS[axis]), {k: v for k, v in value.items() if k != "name"}


def _choice(
    config: Mapping[str, Any], named: Mapping[str, tuple[str, dict[str, Any]]], targets: list[str]
) -> str:
    pool = domain_pool(config, targets)
    if (draw := config.get("draw")) is not None:
        return f"draw {draw}" + (f" of {'+'.join(pool)}" if pool else "")
    from steppe.training.config import MACHINE, RUN, keys  # slow to import

    others = keys(RUN, MACHINE) | {"imported", *AXES}
    own = {k: v for k, v in config.items() if k not in others}
    text = json.dumps([own, named, *([pool] if pool else [])], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def domain_pool(config: Mapping[str, Any], targets: Iterable[str]) -> tuple[str, ...] | None:
    """The domains that a run knows of, where its config names the sources; None for all.

    Runs of leave-one-out validation move a domain from the sources to the targets: the pool is what
    they have in common.
    """
    sources = config.get("sources")
    if isinstance(sources, str):
        sources = [name for name in sources.split(",") if name]
    if not isinstance(sources, list) or not sources:
        return None
    return tuple(sorted({*map(str, sources), *targets}))


def _hparams(
    config: Mapping[str, Any], named: Mapping[str, tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    imported = config.get("imported")
    if isinstance(imported, dict) and isinstance(imported.get("hparams"), dict):
        return dict(imported["hparams"])
    hparams = {k: config[k] for k in ("batch_size", "dropout") if k in config}
    for axis in ("optimizer", "algorithm", "averaging"):
        for key, value in named[axis][1].items():
            hparams[f"{axis}.{key}" if key in hparams else key] = value
    return hparams
