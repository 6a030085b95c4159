"""`steppe bench job`: how long a whole run takes, and what it spends its time on.

A run compiles before its first update, unless an earlier one has left compiled code in a cache on
the disk. So there are two times, the cold one and the warm one; both are those of a process that is
new and has nothing in memory.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from steppe.domains import load
from steppe.errors import RunError, UserError
from steppe.training import RunConfig, configure, train
from steppe.training.progress import Display

from .data import packed_images
from .record import environment

PARTS = ("start", "first update", "updates", "evaluations", "checkpoints", "end")
"""What a run's time is divided into, in order; the first update compiles."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Where compiled code is kept, as torch and triton call it."""


@dataclass(frozen=True)
class Job:
    """A run to be timed.

    Attributes:
        device: where.
        images: a folder ``domain/class/image``; photograph-sized images are made unless given.
        target: the domain held out; the last one unless given.
        backbone: any that a run knows.
        weights: ``none``, ``imagenet`` or a file.
        optimizer: any from the registry.
        precision: of the run.
        steps: updates.
        evaluations: how many, at the first update, at the last, and evenly between; as many as a
            run makes by itself unless given.
        overrides: ``key=value`` texts for the config.
    """

    device: torch.device
    images: Path | None = None
    target: str | None = None
    backbone: str = "resnet18"
    weights: str = "none"
    optimizer: str = "adam"
    precision: str = "auto"
    steps: int = 30
    evaluations: int | None = None
    overrides: tuple[str, ...] = ()

    def config(self, images: Path) -> RunConfig:
        """The run's config."""
        target = self.target or load(images).domains[-1].name
        # From random weights a network would learn at a rate that half precision may not survive.
        slow = {"lr": 1e-4} if self.weights == "none" else {}
        values: dict[str, Any] = {
            "dataset": str(images),
            "targets": [target],
            "backbone": self.backbone,
            "weights": self.weights,
            "freeze_bn": True,
            "optimizer": {"name": self.optimizer, **slow},
            "precision": self.precision,
            "steps": self.steps,
            "device": str(self.device),
        }
        if self.evaluations is not None:
            values["checkpoint_every"] = interval(self.steps, self.evaluations)
        refuse_own(values, self.overrides)
        return configure(values, self.overrides)

    def arguments(self, images: Path) -> list[str]:
        """The words of a command that does the same."""
        words = ["bench", "job", "--json", "--device", str(self.device), "--images", str(images)]
        words += ["--backbone", self.backbone, "--weights", self.weights]
        words += ["--optimizer", self.optimizer, "--precision", self.precision]
        words += ["--steps", str(self.steps)]
        if self.target is not None:
            words += ["--target", self.target]
        if self.evaluations is not None:
            words += ["--evaluations", str(self.evaluations)]
        return words + [word for text in self.overrides for word in ("--set", text)]


def refuse_own(own: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Refuses overrides of what a benchmark sets, and records, itself."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key in own or key.removesuffix(".name") in own:
            raise UserError(f"--set {text}: {key} is the benchmark's to set; it has an option")


def interval(steps: int, evaluations: int) -> int:
    """Steps between evaluations, so that there are as many as asked for, or as many as go.

    Examples:
        >>> interval(5001, 18)
        295
    """
    if not 2 <= evaluations <= max(steps, 2):
        raise UserError(
            f"--evaluations {evaluations}: a run of {steps} steps is evaluated after its first and "
            "its last, and at most after each"
        )
    return max(1, -(-(steps - 1) // (evaluations - 1)))


class Timeline(Display):
    """A display that keeps account of what a run spends its time on, and shows it too.

    Args:
        inner: where progress goes.
        device: is waited for before an evaluation, so that this does not pay for updates.
        every: steps between evaluations.
    """

    def __init__(self, inner: Display, device: torch.device, every: int) -> None:
        super().__init__()
        self._inner, self._device, self._every = inner, device, every
        self._mark = time.perf_counter()
        self._steps = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.updates = self.evaluations = 0

    def start(self, title: str, done: int, steps: int, records: int) -> None:
        """Everything is ready: data, network, optimizer."""
        self._spend("start")
        self._steps = steps
        self._inner.start(title, done, steps, records)

    def step(self, done: int) -> None:
        """An update was made, or on a GPU launched."""
        if self._device.type == "cuda" and ((done - 1) % self._every == 0 or done == self._steps):
            torch.cuda.synchronize(self._device)
        self._spend("updates" if self.updates else "first update")
        self.updates += 1
        self._inner.step(done)

    def evaluating(self, images: int, total: int) -> None:
        """Hands on."""
        self._inner.evaluating(images, total)

    def record(self, record: Mapping[str, Any]) -> None:
        """An evaluation was made, and a checkpoint after it."""
        evaluation = record["evaluation_seconds"]
        self.seconds["evaluations"] += evaluation
        self._spend("checkpoints")
        self.seconds["checkpoints"] -= evaluation
        self.evaluations += 1
        self._inner.record(record)

    def stop(self) -> None:
        """Hands on."""
        self._inner.stop()

    def finish(self) -> None:
        """The run has returned."""
        self._spend("end")

    def _spend(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self._mark
        self._mark = now


@contextmanager
def overheard() -> Iterator[list[str]]:
    """What steppe says meanwhile, line by line."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, ear = logging.getLogger("steppe"), Ear(logging.INFO)
    level = logger.level
    logger.addHandler(ear)
    logger.setLevel(min(level, logging.INFO) if level else logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(ear)
        logger.setLevel(level)


def measure(job: Job) -> dict[str, Any]:
    """A run in this process, with whatever compiled code the caches on the disk have."""
    console = Console(stderr=True)
    with (
        packed_images(job.images, console=console) as images,
        tempfile.TemporaryDirectory(prefix="steppe-bench-") as out,
        overheard() as said,
    ):
        config = job.config(images)
        timeline = Timeline(Display(console), job.device, config.checkpoint_every)
        records = train(config, Path(out) / "run", display=timeline)
        timeline.finish()
    seconds = timeline.seconds
    return {
        "environment": environment(job.device),
        "backbone": job.backbone,
        "optimizer": job.optimizer,
        "data": "doodles, enlarged" if job.images is None else job.images.resolve().name,
        "target": config.targets[0],
        "images of a domain in a step": config.batch_size,
        "steps": timeline.updates,
        "evaluations": timeline.evaluations,
        "said": [without_folder(line, images) for line in said],
        "seconds": {
            "total": round(sum(seconds.values()), 3),
            **{part: round(seconds[part], 3) for part in PARTS},
        },
        "ms per update but the first": round(
            1e3 * seconds["updates"] / max(timeline.updates - 1, 1), 3
        ),
        "peak GiB": round(records[-1]["memory_gb"], 3),
    }


def without_folder(line: str, images: Path) -> str:
    """A line without where things lie on this machine."""
    return line.replace(str(images.resolve().parent) + os.sep, "")


def cold_and_warm(job: Job) -> dict[str, Any]:
    """The run in a new process that finds nothing compiled, and in another that finds it all."""
    found: dict[str, Any] = {}
    with (
        packed_images(job.images, console=Console(stderr=True)) as images,
        tempfile.TemporaryDirectory(prefix="steppe-cache-") as cache,
    ):
        job.config(images)  # what is wrong with it is said before a process is started
        places = {name: str(Path(cache) / name) for name in CACHES}
        command = [sys.executable, "-m", "steppe", *job.arguments(images)]
        for name in ("cold", "warm"):
            began = time.perf_counter()
            ended = subprocess.run(
                command, env={**os.environ, **places}, stdout=subprocess.PIPE, check=False
            )
            whole = time.perf_counter() - began
            if ended.returncode:
                raise RunError(f"the {name} run ended with exit code {ended.returncode}: see above")
            result = json.loads(ended.stdout)
            result["seconds"]["whole process"] = round(whole, 3)
            found[name] = result
    facts = {"seconds", "said", "ms per update but the first", "peak GiB", "environment"}
    return {
        "environment": environment(job.device),
        **{key: value for key, value in found["warm"].items() if key not in facts},
        "data": "doodles, enlarged" if job.images is None else found["warm"]["data"],
        **{
            name: {key: value for key, value in result.items() if key in facts - {"environment"}}
            for name, result in found.items()
        },
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The result for the terminal."""
    columns: dict[str, Any] = {name: result[name] for name in ("cold", "warm") if name in result}
    columns = columns or {"": result}
    title = (
        f"{result['backbone']}, {result['optimizer']}, {result['data']}, {result['steps']:,} "
        f"steps, {result['evaluations']} evaluations"
    )
    table = Table("seconds", *columns, title=title)
    for part in _keys([of_one["seconds"] for of_one in columns.values()]):
        table.add_row(part, *(f"{of_one['seconds'][part]:.1f}" for of_one in columns.values()))
    for key in ("ms per update but the first", "peak GiB"):
        table.add_row(key, *(f"{of_one[key]:.2f}" for of_one in columns.values()))
    return [table]


def _keys(tables: Sequence[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(key for table in tables for key in table))
