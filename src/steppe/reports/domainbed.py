"""Runs of DomainBed as runs of steppe.

DomainBed's reports read every `results.jsonl`, whether the run was finished or not. So do these: a
run without a file `done` is imported as `planned`, counts in tables, and is named in reports.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steppe.domains import dataset_names, dataset_spec
from steppe.durable import replace
from steppe.errors import UserError, reason
from steppe.strangers import read

from .runs import unreadable_lines
from .values import finite_or_none, parse, plain

_STEPS = 5001
"""Of every dataset in DomainBed, unless a run says otherwise."""
_OF_A_DOMAIN = re.compile(r"env\d+_")
_NOT_LOSSES = frozenset({"step", "epoch", "step_time", "mem_gb", "hparams", "args"})
_IDENTITY = ("dataset", "algorithm", "test_envs", "trial_seed", "hparams_seed")


@dataclass(frozen=True)
class Imported:
    """What became of DomainBed's folders."""

    n: int
    """Runs that the destination has from the source now."""
    problems: tuple[str, ...]
    """What could not be read, and what was replaced or left alone."""
    unreadable_lines: int = 0
    unchanged: int = 0
    """Runs that were there before, the same."""


def import_domainbed(src: Path | str, dst: Path | str) -> Imported:
    """Turn every folder below `src` that has a `results.jsonl` into a run below `dst`.

    Importing again changes nothing that is the same; a run that DomainBed has continued since is
    replaced, and named.

    Args:
        src: DomainBed's output folder.
        dst: the folder for the runs; they keep their names.
    """
    src, dst = Path(src), Path(dst)
    if not src.is_dir():
        raise UserError(
            f"{src} is not a folder: expected DomainBed's output, RUN/results.jsonl below"
        )
    n, unchanged, unreadable = 0, 0, 0
    problems: list[str] = []
    folders = list(_results(src))
    if not folders:
        raise UserError(f"{src} has no results.jsonl below it: is it DomainBed's output folder?")
    for folder in folders:
        converted = _convert(folder)
        problems += converted.problems
        unreadable += converted.unreadable
        if not converted.files:
            continue
        told = _write(dst / _name(folder, src), converted.files)
        n += told != _FOREIGN
        unchanged += told is None
        if told:
            problems.append(f"{dst / _name(folder, src)}: {told}")
    return Imported(n, tuple(problems), unreadable, unchanged)


def _results(src: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(src):
        names.sort()
        if "results.jsonl" in files:
            yield Path(folder)


def _name(folder: Path, src: Path) -> Path:
    parts = folder.relative_to(src).parts or (folder.resolve().name,)
    # Reports do not look into folders with these names.
    hidden = [part == "checkpoint" or part.startswith("attempt-") for part in parts]
    return Path(*(f"_{part}" if hide else part for part, hide in zip(parts, hidden, strict=True)))


@dataclass(frozen=True)
class _Converted:
    files: Mapping[str, bytes]
    problems: tuple[str, ...] = ()
    unreadable: int = 0


def _convert(folder: Path) -> _Converted:
    """The files of a run, empty where DomainBed's cannot be made sense of."""
    file = folder / "results.jsonl"
    try:
        lines = read(file).split(b"\n")
    except OSError as error:
        return _Converted({}, (f"{file}: {reason(error)}",))
    problems: list[str] = []
    wrong: list[int] = []
    first: dict[str, Any] | None = None
    names: tuple[str, ...] = ()
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = parse(line)
            n_domains = _count_domains(data)
            if first is None:
                names = _domain_names(data["args"]["dataset"], n_domains)
                _check_args(data["args"], n_domains)
                first = data
            if _identity(data) != _identity(first):
                raise ValueError("a line of another run")
            records.append(_record(data, names))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            wrong.append(number)
    if wrong:
        problems.append(f"{file}: {unreadable_lines(wrong)}")
    if first is None or not records:
        return _Converted({}, (*problems, f"{file}: no run in it"), len(wrong))
    done = (folder / "done").exists()
    last = max(record["step"] for record in records)
    config = _config(first, names, last + 1 if done else max(last + 1, _STEPS))
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    files = {
        "records.jsonl": text.encode(),
        "state": b"done\n" if done else b"planned\n",
        "config.json": (
            json.dumps(plain(config), indent=2, allow_nan=False, default=str) + "\n"
        ).encode(),
    }
    return _Converted(files, tuple(problems), len(wrong))


def _identity(data: Mapping[str, Any]) -> list[Any]:
    return [data["args"].get(key) for key in _IDENTITY]


def _count_domains(data: Mapping[str, Any]) -> int:
    """As DomainBed counts: up to the first that is missing."""
    return next(i for i in itertools.count() if f"env{i}_out_acc" not in data)


def _check_args(args: Mapping[str, Any], n_domains: int) -> None:
    tests = args["test_envs"]
    if not tests or not all(type(t) is int and 0 <= t < n_domains for t in tests):
        raise ValueError("test_envs name no domains")
    if not isinstance(args["dataset"], str) or not args["dataset"]:
        raise ValueError("no dataset")
    if not isinstance(args["algorithm"], str):
        raise ValueError("no algorithm")
    for key in ("trial_seed", "hparams_seed"):
        if type(args.get(key, 0)) is not int:
            raise ValueError(f"{key} is no number")


def _domain_names(dataset: str, n: int) -> tuple[str, ...]:
    if dataset in dataset_names() and len(dataset_spec(dataset).domains) == n:
        return dataset_spec(dataset).domains
    return tuple(f"env{i}" for i in range(n))


def _record(data: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    if type(data["step"]) is not int or data["step"] < 0:
        raise ValueError("step is no number")
    if _count_domains(data) != len(names):
        raise ValueError("a line with other domains")
    tests = {names[i] for i in data["args"]["test_envs"]}
    domains = {}
    for i, name in enumerate(names):
        larger, smaller = ("test", "oracle") if name in tests else ("train", "val")
        domains[name] = {
            larger: {"accuracy": _accuracy(data[f"env{i}_in_acc"])},
            smaller: {"accuracy": _accuracy(data[f"env{i}_out_acc"])},
        }
    losses = {
        key: finite_or_none(value)
        for key, value in data.items()
        if key not in _NOT_LOSSES and not _OF_A_DOMAIN.match(key)
    }
    return {
        "step": data["step"],
        "epoch": finite_or_none(data.get("epoch")),
        "loss": losses,
        "domains": domains,
        "averaged": False,
        "seconds_per_step": finite_or_none(data.get("step_time")),
        "memory_gb": finite_or_none(data.get("mem_gb")),
    }


def _accuracy(value: Any) -> float:
    if (number := finite_or_none(value)) is None or not 0 <= number <= 1:
        raise ValueError("an accuracy is no number from 0 to 1")
    return number


def _config(first: Mapping[str, Any], names: tuple[str, ...], steps: int) -> dict[str, Any]:
    args = first["args"]
    hparams = first.get("hparams")
    hparams = hparams if isinstance(hparams, dict) else {}
    optional = {
        "checkpoint_every": args.get("checkpoint_freq"),
        "batch_size": hparams.get("batch_size"),
        "draw": args.get("hparams_seed"),
    }
    if args["dataset"] in dataset_names() and dataset_spec(args["dataset"]).pretrained:
        # DomainBed has these for all datasets, and uses them for large images only.
        optional |= {
            "dropout": hparams.get("resnet_dropout"),
            "augment": hparams.get("data_augmentation"),
            "freeze_bn": hparams.get("freeze_bn"),
            "backbone": "resnet18" if hparams.get("resnet18") else None,
        }
    return {
        "version": 2,
        "dataset": args["dataset"],
        "targets": [names[i] for i in args["test_envs"]],
        "trial_seed": args.get("trial_seed", 0),
        "seed": args["seed"] if type(args.get("seed")) is int else 0,
        "algorithm": {"name": args["algorithm"], **_options(args["algorithm"], hparams)},
        "optimizer": {
            "name": "adam",
            **{key: hparams[key] for key in ("lr", "weight_decay") if key in hparams},
        },
        "averaging": {"name": "none"},
        "augment_validation": True,
        "steps": args["steps"] if type(args.get("steps")) is int else steps,
        **{key: value for key, value in optional.items() if value is not None},
        "space": "domainbed",
        "imported": {"from": "domainbed", "args": args, "hparams": hparams},
    }


def _options(algorithm: str, hparams: Mapping[str, Any]) -> dict[str, Any]:
    """The algorithm's options under steppe's names, where steppe has the algorithm."""
    from steppe.algorithms import algorithm_names, algorithm_spec  # needs torch

    if algorithm not in algorithm_names():
        return {}
    found = {}
    for name, option in algorithm_spec(algorithm).options.items():
        if (own := option.drawn_as or name) in hparams:
            whole = isinstance(option.default, int) and isinstance(hparams[own], float)
            found[name] = int(hparams[own]) if whole else hparams[own]
    return found


_FOREIGN = "is there and was not imported from DomainBed: left alone"


def _write(folder: Path, files: Mapping[str, bytes]) -> str | None:
    """Writes a run, and returns what to say about it: None where it was there, the same."""
    told = ""
    if (folder / "config.json").exists():
        if all(_read(folder / name) == data for name, data in files.items()):
            return None
        try:
            foreign = "imported" not in parse(read(folder / "config.json"))
        except (OSError, ValueError, TypeError):
            foreign = True
        if foreign:
            return _FOREIGN
        told = "differed and was replaced"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    for name, data in files.items():  # config.json last: it makes the folder a run
        replace(folder / name, data)
    return told


def _read(path: Path) -> bytes | None:
    try:
        return read(path)
    except OSError:  # not there, or not what was written
        return None
