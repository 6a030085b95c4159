"""Import DomainBed's runs.

Like DomainBed's own reports, the import includes unfinished runs: a run without a file `done` is
imported as `planned`. Tables include it, and reports mention it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steppe.domains import dataset_names, dataset_spec
from steppe.durable import replace
from steppe.errors import UserError, reason
from steppe.strangers import read

from .runs import read_lines, share, step_of
from .values import dumps, finite_or_none, parse

_STEPS = 5001
"""DomainBed's default for every dataset."""
_NOT_LOSSES = re.compile(r"env\d+_.*|step|epoch|step_time|mem_gb|hparams|args")
_IDENTITY = ("dataset", "algorithm", "test_envs", "trial_seed", "hparams_seed")
_FOREIGN = "exists and was not imported from DomainBed; left unchanged"


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    n: int
    """Number of the source's runs that the destination now has."""
    problems: tuple[str, ...]
    """Files that could not be read, and runs that were replaced or left unchanged."""


def import_domainbed(src: Path | str, dst: Path | str) -> Imported:
    """Convert every folder below `src` that has a `results.jsonl` into a run below `dst`.

    A repeated import leaves unchanged runs alone. Runs that DomainBed has continued since then are
    replaced and reported.

    Args:
        src: DomainBed's output folder.
        dst: the folder for the runs, which keep their names.
    """
    src, dst = Path(src), Path(dst)
    if not src.is_dir():
        raise UserError(
            f"{src} is not a folder: expected DomainBed's output with RUN/results.jsonl files"
        )
    folders = sorted(file.parent for file in src.rglob("results.jsonl"))
    if not folders:
        raise UserError(f"{src} contains no results.jsonl: is it DomainBed's output folder?")
    n = 0
    problems: list[str] = []
    for folder in folders:
        if files := _convert(folder, problems):
            run = dst / _name(folder, src)
            told = _write(run, files)
            n += told != _FOREIGN
            problems += [f"{run}: {told}"] if told else []
    return Imported(n, tuple(problems))


def _name(folder: Path, src: Path) -> Path:
    parts = folder.relative_to(src).parts or (folder.resolve().name,)
    # Reports skip folders with these names.
    return Path(*(re.sub(r"^(?=checkpoint$|attempt-)", "_", part) for part in parts))


def _convert(folder: Path, problems: list[str]) -> dict[str, bytes]:
    """The files of a run; none if DomainBed's files are unreadable."""
    file = folder / "results.jsonl"
    try:
        data = read(file)
    except OSError as error:
        problems.append(f"{file}: {reason(error)}")
        return {}
    first: dict[str, Any] = {}  # the line that identifies the run
    names: list[str] = []

    def read_line(line: bytes) -> dict[str, Any]:
        found = parse(line)
        # DomainBed also counts up to the first missing number.
        n_domains = next(i for i in itertools.count() if f"env{i}_out_acc" not in found)
        if not first:
            _check_args(found["args"], n_domains)
            names.extend(_domain_names(found["args"]["dataset"], n_domains))
            first.update(found)
        same = all(found["args"].get(key) == first["args"].get(key) for key in _IDENTITY)
        if not same or n_domains != len(names):
            raise ValueError("the line belongs to another run, or has other domains")
        return _record(found, names)

    records = read_lines(file, data, read_line, problems)
    if not records:
        problems.append(f"{file}: contains no run")
        return {}
    done = (folder / "done").exists()
    last = max(record["step"] for record in records)
    config = _config(first, names, last + 1 if done else max(last + 1, _STEPS))
    return {
        "records.jsonl": "".join(json.dumps(r, allow_nan=False) + "\n" for r in records).encode(),
        "state": b"done\n" if done else b"planned\n",
        "config.json": dumps(config).encode(),
    }


def _check_args(args: Mapping[str, Any], n_domains: int) -> None:
    tests = args["test_envs"]
    if not tests or not all(type(t) is int and 0 <= t < n_domains for t in tests):
        raise ValueError("invalid test_envs")
    if not isinstance(args["dataset"], str) or not args["dataset"]:
        raise ValueError("no dataset")
    if not isinstance(args["algorithm"], str):
        raise ValueError("no algorithm")
    for key in ("trial_seed", "hparams_seed"):
        if type(args.get(key, 0)) is not int:
            raise ValueError(f"{key} is not an integer")


def _domain_names(dataset: str, n: int) -> tuple[str, ...]:
    if dataset in dataset_names() and len(dataset_spec(dataset).domains) == n:
        return dataset_spec(dataset).domains
    return tuple(f"env{i}" for i in range(n))


def _record(data: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    domains = {}
    for i, name in enumerate(names):
        tested = i in data["args"]["test_envs"]
        larger, smaller = ("test", "oracle") if tested else ("train", "val")
        domains[name] = {
            larger: {"accuracy": share(data[f"env{i}_in_acc"])},
            smaller: {"accuracy": share(data[f"env{i}_out_acc"])},
        }
    losses = {k: finite_or_none(v) for k, v in data.items() if not _NOT_LOSSES.fullmatch(k)}
    return {
        "step": step_of(data),
        "epoch": finite_or_none(data.get("epoch")),
        "loss": losses,
        "domains": domains,
        "averaged": False,
        "seconds_per_step": finite_or_none(data.get("step_time")),
        "memory_gb": finite_or_none(data.get("mem_gb")),
    }


def _config(first: Mapping[str, Any], names: Sequence[str], steps: int) -> dict[str, Any]:
    args = first["args"]
    hparams = first.get("hparams")
    hparams = hparams if isinstance(hparams, dict) else {}
    optional = {
        "checkpoint_every": args.get("checkpoint_freq"),
        "batch_size": hparams.get("batch_size"),
        "draw": args.get("hparams_seed"),
    }
    if args["dataset"] in dataset_names() and dataset_spec(args["dataset"]).pretrained:
        # DomainBed stores these for all datasets, but uses them only for large images.
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
        "algorithm": _algorithm(args["algorithm"], hparams),
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


def _algorithm(name: str, hparams: Mapping[str, Any]) -> dict[str, Any]:
    """The algorithm and its options under steppe's names; only the name if steppe lacks it."""
    from steppe.algorithms.registry import algorithms

    if name not in algorithms:
        return {"name": name}
    spec = algorithms[name]
    found: dict[str, Any] = {"name": spec.name}
    for option_name, option in spec.options.items():
        if (own := option.drawn_as or option_name) in hparams:
            value = hparams[own]
            if option.relative_to:
                value /= hparams[option.relative_to]
            whole = isinstance(option.default, int) and isinstance(value, float)
            found[option_name] = int(value) if whole else value
    return found


def _write(folder: Path, files: Mapping[str, bytes]) -> str:
    """Write a run unless an identical one exists; return a remark for the user, or ""."""
    told = ""
    if (folder / "config.json").exists():
        try:
            if all(read(folder / name) == data for name, data in files.items()):
                return ""
        except OSError:  # missing, or not a plain file
            pass
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
