"""Load runs for reports: their settings and their accuracies over time.

Configs are read leniently as plain JSON, because an imported run may use an algorithm that steppe
does not have. Unreadable files are reported, but never stop a report.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from steppe.errors import UserError, reason
from steppe.sealed import broken
from steppe.strangers import LIMIT, read

from .followed import PLAN, Followed, Followers
from .index import Contents, Index
from .values import finite, finite_or_none, parse

T = TypeVar("T")
Key = tuple[str, str]
"""A domain and a part of it: ``("sketch", "test")``."""

_DEFAULTS = {"algorithm": "ERM", "optimizer": "adam", "averaging": "none"}
_Axis = tuple[str, dict[str, Any]]
"""A name and its options."""
MEASUREMENTS = "curvature"
"""The subfolder of a run where `steppe curvature` stores its results."""
FIRST_STAGE = "first-stage"
"""The subfolder of a run's first stage, which is a run itself, but not a result."""
_LINES_NAMED = 5
_LONGEST_STATE = 1000
"""Bytes; the file holds one word."""


class Row(NamedTuple):
    """A method: one row of a table."""

    algorithm: str
    optimizer: str
    averaging: str

    @property
    def name(self) -> str:
        """The method's name, without the default algorithm and averaging.

        Examples:
            >>> Row("ERM", "fad", "none").name, Row("CORAL", "adam", "swad").name
            ('fad', 'CORAL adam swad')
        """
        algorithm = () if self.algorithm == "ERM" else (self.algorithm,)
        averaging = () if self.averaging == "none" else (self.averaging,)
        return " ".join((*algorithm, self.optimizer, *averaging))

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key: ERM first, then by algorithm; no averaging before averaging."""
        first = (self.algorithm != "ERM", self.algorithm.lower(), self.algorithm)
        return (*first, self.averaging != "none", self.averaging, self.optimizer)


class Record(NamedTuple):  # which is made five times as fast as a frozen dataclass
    """One evaluation of a run."""

    step: int
    accuracy: Mapping[Key, float]
    """In [0, 1], by domain and part."""
    loss: Mapping[str, float]
    averaged: bool
    """Whether the averaged weights were evaluated."""
    seconds_per_step: float | None
    memory_gb: float | None
    """GiB."""
    evaluation_seconds: float | None = None
    raw: Mapping[str, float] = {}
    """Test accuracy of the raw weights by domain, if they were evaluated beside the average."""
    first_stage: float | None = None
    """Validation accuracy of the run's first stage, if it had one."""
    first_stage_seconds: float | None = None


@dataclass(frozen=True)
class Run:
    """One run: the parts of its config that reports need, and its records by step."""

    path: Path
    dataset: str
    targets: tuple[str, ...]
    row: Row
    trial: int
    choice: str
    """Identifies the hyperparameters: ``draw 3``, or a digest if they were not drawn."""
    draw: int | None
    hparams: Mapping[str, Any]
    """Options of all axes by name, and other settings that a search may vary."""
    steps: int
    space: str | None
    split: str
    state: str
    """`planned`, `running`, `done` or `failed`."""
    config: Mapping[str, Any]
    records: tuple[Record, ...]
    images: Mapping[Key, int] = field(default_factory=dict)
    """Number of images by domain and part; empty if the records do not say it."""
    protocol: Followed | None = None
    """The protocol of its sweep."""

    @cached_property
    def target_set(self) -> frozenset[str]:
        return frozenset(self.targets)

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """All evaluated domains, in the order of the most complete record."""
        fullest = max(self.records, key=lambda record: len(record.accuracy))
        return tuple({domain: None for domain, _ in fullest.accuracy})

    @cached_property
    def seconds(self) -> float:
        """Wall-clock seconds of the updates and evaluations that the run has recorded."""
        total, before = self.records[0].first_stage_seconds or 0.0, -1
        for record in self.records:
            total += (record.seconds_per_step or 0.0) * (record.step - before)
            total += record.evaluation_seconds or 0.0
            before = record.step
        return total

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key independent of the file system: draw, then choice, then path."""
        return (self.draw is not None, self.draw or 0, self.choice, str(self.path))


@dataclass(frozen=True)
class Loaded:
    """The runs found below a folder."""

    runs: tuple[Run, ...]
    problems: tuple[str, ...]
    """One line for each file that could not be read completely."""
    pending: tuple[Path, ...] = ()
    """Folders of runs that have not been evaluated yet."""


def load_runs(root: Path | str | Iterable[Path | str]) -> Loaded:
    """Read every run below a folder, sorted by path.

    Skips hidden folders, those named ``attempt-*`` (unfinished work of a sweep), ``checkpoint``,
    and a run's ``curvature`` and ``first-stage``.

    Args:
        root: one or several folders, or files of runs (`config.json`, `records.jsonl`).
    """
    roots = [Path(root)] if isinstance(root, str | Path) else [Path(item) for item in root]
    folders: dict[Path, Path] = {}
    indexes: dict[Path, Index] = {}
    for path in roots:
        if not path.exists():
            raise UserError(f"{path} does not exist: expected a folder that contains runs")
        for folder, index in [(path.parent, None)] if path.is_file() else _run_folders(path):
            # Several paths may lead to one run; below one path, a walk meets it once.
            folders.setdefault(folder.resolve() if len(roots) > 1 else folder, folder)
            if index is not None:
                indexes[folder] = index
    if not any((folder / "config.json").exists() for folder in folders):
        where = ", ".join(map(str, roots))
        raise UserError(f"no run (config.json) found at or below {where}")
    runs: list[Run] = []
    problems: list[str] = []
    followers = Followers(problems)
    pending: list[Path] = []
    # Millions of new objects, none of them garbage: the collector would double the loading time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        for folder in sorted(folders.values(), key=str):
            before = len(problems)
            if (run := _read_run(folder, indexes.get(folder), problems)) is not None:
                protocol = followers.of(folder)
                runs.append(run if protocol is None else replace(run, protocol=protocol))
            elif len(problems) == before and not (folder / "result" / "config.json").exists():
                pending.append(folder)
        for index in set(indexes.values()):
            index.save()
    finally:
        if collecting:
            gc.enable()
    return Loaded(tuple(runs), tuple(problems), tuple(pending))


def _run_folders(root: Path) -> Iterator[tuple[Path, Index | None]]:
    """The folders of runs, each with the index of the sweep that it belongs to."""
    left: list[tuple[str, Index | None]] = [(str(root), None)]
    while left:  # twice as fast as `os.walk`
        folder, index = left.pop()
        names, files = [], set()
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    names.append(entry.name)
                elif not (entry.is_symlink() and os.path.isdir(entry.path)):
                    files.add(entry.name)  # and nothing is below a link to a folder
        if PLAN in files:
            index = Index(Path(folder), __file__)
        # A measurement may be named config.json, after a domain called "config".
        own = ("events", MEASUREMENTS, FIRST_STAGE)
        left_out = ("checkpoint", *(own if "config.json" in files else ()))
        left += (
            (os.path.join(folder, name), index)
            for name in names
            if name not in left_out and not name.startswith((".", "attempt-"))
        )
        # A sweep's run that is done has its records in `result`, with a config of their own.
        if "config.json" in files and (
            "records.jsonl" in files
            or not os.path.exists(os.path.join(folder, "result", "config.json"))
        ):
            yield Path(folder), index


def _read_run(folder: Path, index: Index | None, problems: list[str]) -> Run | None:
    known = None if index is None else index.find(str(folder))
    file = folder / "config.json"
    try:
        text = known.config if known else read(file)
        config = parse(text)
        facts = _facts(config)
    except (OSError, ValueError) as error:
        problems.append(f"{file}: {reason(error)}")
        return None
    if known:
        state, records = known.state, tuple(map(Record._make, known.records))
        images = known.images
    else:
        before = len(problems)
        data = _read_if_there(folder / "records.jsonl", problems)
        if data is None:
            return None
        # Imported or handmade runs may have no state file.
        word = _read_if_there(folder / "state", problems, _LONGEST_STATE) or b"planned"
        state = word.decode(errors="replace").strip()
        found = read_lines(folder / "records.jsonl", data, _record, problems, whole=state == "done")
        by_step = {record.step: record for record in found}  # the last line of a step wins
        if not by_step:
            return None
        records = tuple(by_step[step] for step in sorted(by_step))
        images = _images(data)
        if index is not None and len(problems) == before:
            index.add(str(folder), Contents(text, state, records, images))
    steps = facts.pop("steps") or records[-1].step + 1
    facts |= {"steps": steps, "state": state, "config": config, "records": records}
    return Run(path=folder, images=images, **facts)


def _read_if_there(file: Path, problems: list[str], limit: int = LIMIT) -> bytes | None:
    try:
        return read(file, limit)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{file}: {reason(error)}")
        return None


def read_lines(
    file: Path,
    data: bytes,
    read_line: Callable[[bytes], T],
    problems: list[str],
    *,
    whole: bool = True,
) -> list[T]:
    """Parse the lines of a file and report unreadable ones in `problems`.

    If the file is not `whole`, its last line may be cut off: a resumed run writes it again.
    """
    found: list[T] = []
    wrong: list[int] = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line or line.isspace():
            continue
        try:
            found.append(read_line(line))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            if whole or number < len(lines):
                wrong.append(number)
    if wrong:
        named = ", ".join(map(str, wrong[:_LINES_NAMED])) + ", ..." * (len(wrong) > _LINES_NAMED)
        problems.append(f"{file}: {len(wrong)} unreadable line{'s' * (len(wrong) > 1)} ({named})")
    return found


_keys: dict[str, dict[str, Key]] = {}
"""One tuple per key, shared by all records to save memory, by domain and part."""


def _record(line: bytes) -> Record:
    if broken(line):
        raise ValueError("checksum mismatch")
    data = parse(line)
    accuracy: dict[Key, float] = {}
    for domain, parts in data["domains"].items():
        known = _keys.setdefault(domain, {})
        for part, scores in parts.items():
            value = scores["accuracy"]
            right = type(value) is float and 0.0 <= value <= 1.0  # spares millions of calls
            key = known.get(part) or known.setdefault(part, (domain, part))
            accuracy[key] = value if right else share(value)
    losses = data.get("loss")
    return Record(
        step_of(data),
        accuracy,
        {k: v for k, v in losses.items() if finite(v)} if isinstance(losses, dict) else {},
        data.get("averaged") is True,
        finite_or_none(data.get("seconds_per_step")),
        finite_or_none(data.get("memory_gb")),
        finite_or_none(data.get("evaluation_seconds")),
        _raw(data),
        finite_or_none(data.get("first_stage_validation")),
        finite_or_none(data.get("first_stage_seconds")),
    )


def _images(data: bytes) -> dict[Key, int]:
    """The number of images of each part, which all records of a run share."""
    for line in io.BytesIO(data):
        with suppress(ValueError, TypeError, KeyError, AttributeError, IndexError):
            _record(line)  # an error if the line is unreadable
            found = parse(line)["domains"].items()
            counts = {
                (domain, part): scores["images"]
                for domain, parts in found
                for part, scores in parts.items()
            }
            if all(type(n) is int and n > 0 for n in counts.values()):
                return counts
    return {}


def _raw(data: Mapping[str, Any]) -> dict[str, float]:
    raw = data.get("raw", {}).items()
    return {name: share(parts["test"]["accuracy"]) for name, parts in raw if "test" in parts}


def step_of(data: Mapping[str, Any]) -> int:
    step = data["step"]
    if type(step) is not int or step < 0:
        raise ValueError(f"step must be an integer >= 0, got {step!r}")
    return step


def share(value: Any) -> float:
    """Check that an accuracy is in [0, 1]."""
    if not (type(value) in (float, int) and 0 <= value <= 1):  # false for NaN
        raise ValueError(f"accuracy must be between 0 and 1, got {value!r}")
    return float(value)


def _facts(config: Any) -> dict[str, Any]:
    """The fields of `Run` that follow from the config; ValueError if it is invalid."""
    if not isinstance(config, dict):
        raise ValueError("expected a JSON object")
    dataset, targets = config.get("dataset"), _names(config.get("targets"))
    if not isinstance(dataset, str) or not dataset:
        raise ValueError("not the config of a run: it has no dataset")
    if not isinstance(targets, list) or not targets:
        raise ValueError("not the config of a run: it has no targets")
    if not all(isinstance(name, str) and name for name in targets):
        raise ValueError(f"targets must be names of domains, got {targets!r}")
    trial, draw, space = config.get("trial_seed", 0), config.get("draw"), config.get("space")
    for key, value in (("trial_seed", trial), ("draw", draw)):
        if type(value) is not int and (key, value) != ("draw", None):
            raise ValueError(f"{key} must be an integer, got {value!r}")
    steps = config.get("steps")
    axes = {axis: _axis(config, axis) for axis in _DEFAULTS}
    return {
        "dataset": dataset,
        "targets": tuple(targets),
        "row": _row(config, axes),
        "trial": trial,
        "choice": _choice(config, axes, targets),
        "draw": draw,
        "hparams": MappingProxyType(_hparams(config, axes)),
        "steps": steps if type(steps) is int else None,
        "space": space if isinstance(space, str) else None,
        "split": str(config.get("split", "domainbed")),
    }


def _row(config: Mapping[str, Any], axes: Mapping[str, _Axis]) -> Row:
    """The run's method; a recipe counts as part of the algorithm."""
    algorithm, optimizer, averaging = (axes[axis][0] for axis in Row._fields)
    if isinstance(recipe := config.get("recipe"), str) and recipe:
        algorithm = recipe if algorithm == "ERM" else f"{algorithm} {recipe}"
    return Row(algorithm, optimizer, averaging)


def _names(value: Any) -> Any:
    """Names of domains, which earlier versions wrote as one string."""
    return [name for name in value.split(",") if name] if isinstance(value, str) else value


def _axis(config: Mapping[str, Any], axis: str) -> _Axis:
    value = config.get(axis, _DEFAULTS[axis])
    if isinstance(value, str):
        return value, {}
    if not isinstance(value, dict) or not isinstance(value.get("name", ""), str):
        raise ValueError(f"{axis} must be a name or an object with a name, got {value!r}")
    return value.get("name", _DEFAULTS[axis]), {k: v for k, v in value.items() if k != "name"}


def _choice(config: Mapping[str, Any], axes: Mapping[str, _Axis], targets: list[str]) -> str:
    pool = domain_pool(config, targets)
    if (draw := config.get("draw")) is not None:
        return f"draw {draw}" + (f" of {'+'.join(pool)}" if pool else "")
    from steppe.training.config import MACHINE, RUN, keys  # slow to import

    others = keys(RUN, MACHINE) | {"imported", *axes}
    own = {k: v for k, v in config.items() if k not in others}
    text = json.dumps([own, axes, *([pool] if pool else [])], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def domain_pool(config: Mapping[str, Any], targets: Iterable[str]) -> tuple[str, ...] | None:
    """The sources and targets of a run whose config names its sources; None for all domains.

    Leave-one-out validation moves a domain from the sources to the targets, which leaves the pool
    unchanged.
    """
    sources = _names(config.get("sources"))
    if not isinstance(sources, list) or not sources:
        return None
    return tuple(sorted({*map(str, sources), *targets}))


def _hparams(config: Mapping[str, Any], axes: Mapping[str, _Axis]) -> dict[str, Any]:
    imported = config.get("imported")
    if isinstance(imported, dict) and isinstance(imported.get("hparams"), dict):
        return dict(imported["hparams"])
    hparams = {k: config[k] for k in ("batch_size", "dropout") if k in config}
    for axis in ("optimizer", "algorithm", "averaging"):
        for key, value in axes[axis][1].items():
            hparams[f"{axis}.{key}" if key in hparams else key] = value
    return hparams
