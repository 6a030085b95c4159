"""`steppe bench learning`: whether the fast way of training learns what the plain one does.

The engine (compiled, captured, in the precision that `auto` chooses, packed images transformed on
the device) against a plain run (eager, fp32, files through Pillow): pairs of runs with the same
seeds, split, batches and augmentation, for every target. They differ by rounding alone, which
training then makes larger, so that two runs of a pair end in different weights; what is asked is
whether they are equally good. A seed's difference is the mean over targets, and the interval is
Student's over seeds.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID, TimeRemainingColumn
from rich.table import Table
from scipy.special import stdtrit

from steppe.domains import load
from steppe.domains.pack import checksum
from steppe.durable import durable, sync_folder
from steppe.errors import UserError
from steppe.training import RunConfig, configure, train
from steppe.training.progress import Display

from .data import packed_images
from .job import overheard, refuse_own, without_folder
from .record import environment

LEVEL = 0.95
"""Of the confidence intervals."""
BAR = 1.5
"""Points that the interval of the mean difference is to lie within, on either side."""
WAYS: dict[str, dict[str, Any]] = {
    "engine": {"engine": "auto", "data": "auto", "packed": True},
    "plain": {"engine": "off", "data": "host", "packed": False, "precision": "fp32"},
}
"""What the two runs of a pair are told; the engine's precision is the study's."""


@dataclass(frozen=True)
class Study:
    """What is compared.

    Attributes:
        device: where.
        images: a folder ``domain/class/image``.
        backbone: any that a run knows.
        weights: ``none``, ``imagenet`` or a file.
        optimizer: any from the registry.
        steps: updates of a run.
        seeds: of weights, batches and split; they are counted from 0.
        targets: the domains held out, in turn; all of them unless given.
        precision: the engine's.
        overrides: ``key=value`` texts for the configs of both.
    """

    device: torch.device
    images: Path
    backbone: str
    weights: str
    optimizer: str
    steps: int
    seeds: int
    targets: tuple[str, ...] = ()
    precision: str = "auto"
    overrides: tuple[str, ...] = ()

    def config(self, way: str, target: str, seed: int) -> RunConfig:
        """One run of a pair."""
        values = {
            "dataset": str(self.images),
            "targets": [target],
            "backbone": self.backbone,
            "weights": self.weights,
            "optimizer": self.optimizer,
            "precision": self.precision,
            "steps": self.steps,
            "checkpoint_every": self.steps,
            "seed": seed,
            "trial_seed": seed,
            "device": str(self.device),
        }
        chosen = {**values, **WAYS[way]}
        refuse_own(chosen, self.overrides)
        return configure(chosen, self.overrides)

    def facts(self) -> dict[str, Any]:
        """What pairs of one study have in common, without where things lie on this machine."""
        return {
            "backbone": self.backbone,
            "weights": Path(self.weights).name,
            "optimizer": self.optimizer,
            "data": self.images.resolve().name,
            "fingerprint": load(self.images).fingerprint()[:16],
            "weights' checksum": _checksum(self.weights),
            "made with": {
                name: value
                for name, value in environment(self.device).items()
                if name in ("gpu", "torch", "pillow", "steppe")
            },
            "steps": self.steps,
            "precision": self.precision,
            "device": self.device.type,
            "overrides": list(self.overrides),
        }


@dataclass(frozen=True)
class Pair:
    """Two runs that differ in how they were carried out.

    Attributes:
        target: the domain held out.
        seed: of both.
        engine: the accuracy on the target after the last step, from 0 to 1.
        plain: the same of the plain run.
        engine_seconds: what the runs took.
        plain_seconds: the same of the plain run.
    """

    target: str
    seed: int
    engine: float
    plain: float
    engine_seconds: float
    plain_seconds: float

    @property
    def points(self) -> float:
        """Engine minus plain, in points of 100."""
        return 100 * (self.engine - self.plain)


def measure(study: Study, save: Path | None = None) -> dict[str, Any]:
    """Everything `steppe bench learning` reports, as plain values.

    Args:
        study: what is compared.
        save: a file that is written after every pair, so that little is lost if this is killed;
            pairs that it has already are not run again.
    """
    console = Console(stderr=True)
    with packed_images(study.images, console=console):
        domains = [domain.name for domain in load(study.images).domains]
    targets = tuple(dict.fromkeys(study.targets)) or tuple(domains)
    for target in targets:
        if target not in domains:
            raise UserError(f"{study.images} has no domain {target!r}: {', '.join(domains)}")
    for way in WAYS:  # what is wrong is said before hours have passed
        study.config(way, targets[0], 0)
    pairs, said = _saved(study, save)
    if pairs:
        console.print(f"{len(pairs)} pairs found in {save}", highlight=False, markup=False)
    wanted = [(target, seed) for seed in range(study.seeds) for target in targets]
    known = {(pair.target, pair.seed) for pair in pairs}
    missing = [key for key in wanted if key not in known]
    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=2 * study.steps * len(missing))
        began = time.perf_counter()
        for number, (target, seed) in enumerate(missing, start=1):
            accuracies, seconds = {}, {}
            for way in WAYS:
                progress.update(bar, description=f"{target}, seed {seed}, {way}")
                config = study.config(way, target, seed)
                with overheard() as lines:
                    accuracies[way], seconds[way] = _run(config, progress, bar)
                said.setdefault(way, [without_folder(line, study.images) for line in lines])
            pair = Pair(
                target,
                seed,
                accuracies["engine"],
                accuracies["plain"],
                seconds["engine"],
                seconds["plain"],
            )
            pairs.append(pair)
            if save is not None:
                _store(summarize(study, pairs, targets, said), save)
            left = (time.perf_counter() - began) / number * (len(missing) - number)
            console.print(
                f"{target}, seed {seed}: engine {100 * pair.engine:.1f}, plain "
                f"{100 * pair.plain:.1f}; {timedelta(seconds=round(left))} left",
                highlight=False,
                markup=False,
            )
    return summarize(study, pairs, targets, said)


class _Advance(Display):
    """Moves a bar that several runs share."""

    def __init__(self, progress: Progress, bar: TaskID) -> None:
        super().__init__()
        self._progress, self._bar = progress, bar

    def step(self, done: int) -> None:
        """Moves it."""
        self._progress.advance(self._bar)


def _run(config: RunConfig, progress: Progress, bar: TaskID) -> tuple[float, float]:
    """The last accuracy on the target, and the seconds that the run took."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as out:
        records = train(config, Path(out) / "run", display=_Advance(progress, bar))
    accuracy = records[-1]["domains"][config.targets[0]]["test"]["accuracy"]
    return float(accuracy), time.perf_counter() - began


def summarize(
    study: Study,
    pairs: Sequence[Pair],
    targets: Sequence[str],
    said: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """The differences of what has been run so far, in points of 100."""
    by_key = {(pair.target, pair.seed): pair for pair in pairs}
    seeds = sorted({seed for _, seed in by_key})
    whole = [seed for seed in seeds if all((target, seed) in by_key for target in targets)]
    means = [statistics.fmean(by_key[target, seed].points for target in targets) for seed in whole]
    overall = difference(means)
    low_high = overall["interval"]
    return {
        "environment": environment(study.device),
        **study.facts(),
        "targets": list(targets),
        "said": {way: list(lines) for way, lines in said.items()},
        "difference": overall,
        "by seed": {str(seed): round(mean, 4) for seed, mean in zip(whole, means, strict=True)},
        "by target": {
            target: {
                **difference([p.points for p in pairs if p.target == target]),
                "engine": _percent([p.engine for p in pairs if p.target == target]),
                "plain": _percent([p.plain for p in pairs if p.target == target]),
            }
            for target in targets
            if any(pair.target == target for pair in pairs)
        },
        "bar": BAR,
        "within the bar": None if low_high is None else max(map(abs, low_high)) <= BAR,
        "pairs": [asdict(pair) for pair in pairs],
    }


def difference(values: Sequence[float]) -> dict[str, Any]:
    """The mean of some differences, and its interval where there are at least two.

    Examples:
        >>> difference([1.0, 2.0, 3.0])
        {'mean': 2.0, 'interval': [-0.4841, 4.4841], 'n': 3}
    """
    if not values:
        return {"mean": None, "interval": None, "n": 0}
    n, mean = len(values), statistics.fmean(values)
    interval = None
    if n > 1:
        half = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * statistics.stdev(values) / math.sqrt(n)
        interval = [round(mean - half, 4), round(mean + half, 4)]
    return {"mean": round(mean, 4), "interval": interval, "n": n}


def _checksum(weights: str) -> str | None:
    """Of a file of weights; None where they come from elsewhere."""
    return checksum(Path(weights))[:16] if Path(weights).is_file() else None


def _percent(values: Sequence[float]) -> float:
    return round(100 * statistics.fmean(values), 3)


def _saved(study: Study, save: Path | None) -> tuple[list[Pair], dict[str, list[str]]]:
    """The pairs that a file has from before, if they are of the same study."""
    if save is None or not save.exists() or not save.stat().st_size:
        return [], {}
    try:
        old = json.loads(save.read_bytes())
        pairs = [Pair(**pair) for pair in old["pairs"]]
        facts = {key: old[key] for key in study.facts()}
        said = old["said"]
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{save} holds something else: choose another --save") from None
    for key, value in study.facts().items():
        if facts[key] != value:
            raise UserError(
                f"{save} has pairs with {key}={facts[key]!r}, not {value!r}: choose another --save"
            )
    return pairs, said


def _store(result: dict[str, Any], path: Path) -> None:
    """Replaces the file in one go: whoever kills this finds the old one or the new one."""
    new = path.with_name(f"{path.name}.new")
    with durable(new) as file:
        file.write((json.dumps(result, indent=2) + "\n").encode())
    os.replace(new, path)
    sync_folder(path.parent)


def tables(result: dict[str, Any]) -> list[Table]:
    """The result for the terminal."""
    title = (
        f"{result['backbone']}, {result['optimizer']}, {result['data']}, {result['steps']:,} steps"
    )
    table = Table("held out", "engine", "plain", "difference", f"{LEVEL:.0%}", "n", title=title)
    for name, row in result["by target"].items():
        table.add_row(name, f"{row['engine']:.2f}", f"{row['plain']:.2f}", *_cells(row))
    table.add_row("mean over targets", "", "", *_cells(result["difference"]))
    return [table]


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    if row["mean"] is None:
        return "", "", "0"
    interval = "" if row["interval"] is None else "{:+.2f} to {:+.2f}".format(*row["interval"])
    return f"{row['mean']:+.2f}", interval, str(row["n"])
