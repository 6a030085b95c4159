"""Wall-clock time of a whole run: start, updates, evaluations and checkpoints.

A run compiles before its first update unless an earlier run left compiled code in the disk cache.
--cold measures both cases, each in a new process.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import OVERRIDES, Result, RunOptions, command, option, wait
from images import name_of, packed_images
from runs import refuse_own, said

from steppe.console import Console, stderr
from steppe.errors import RunError, UserError
from steppe.training import RunConfig, RunDirectory, configure, train
from steppe.training.progress import Display

# The parts of a run, in order; the first update includes compilation.
PARTS = ("start", "first update", "updates", "evaluations", "checkpoints", "end")
OF_ONE_RUN = ("seconds", "said", "ms per update but the first", "peak GiB")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # of compiled code


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    target: str | None = option(None, "Test domain (default: the last one).")
    weights: str = option("none", "none, imagenet, or a file.")
    steps: int = option(30, "Number of updates.", min=1)
    evaluations: int | None = option(None, "Maximum number (default: as in a normal run).", min=2)
    overrides: list[str] | None = OVERRIDES
    cold: bool = option(False, "Run in a new process with empty caches, then again.", "--cold")

    def config(self, images: Path) -> RunConfig:
        values = self.values(images) | {"weights": self.weights, "steps": self.steps}
        if self.target is not None:
            values["targets"] = [self.target]
        if self.weights != "none":
            values["optimizer"] = self.optimizer
        if self.evaluations is not None:
            values["checkpoint_every"] = interval(self.steps, self.evaluations)
        refuse_own(values, self.overrides or ())
        return configure(values, self.overrides or ())


def interval(steps: int, evaluations: int) -> int:
    """Return steps between evaluations for at most the requested number of evaluations."""
    if not 2 <= evaluations <= max(steps, 2):
        raise UserError(
            f"--evaluations {evaluations}: a run of {steps} steps evaluates after its first and "
            f"last step, so it needs 2 to {max(steps, 2)} evaluations"
        )
    return max(1, -(-(steps - 1) // (evaluations - 1)))


class Timeline(Display):
    def __init__(self, config: RunConfig, console: Console | None) -> None:
        super().__init__(console)
        self._device, self._every = torch.device(config.device), config.checkpoint_every
        self._mark = time.perf_counter()
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.updates = self.evaluations = 0

    def start(self, title: str, done: int, steps: int, records: int) -> None:
        self.spend("start")
        super().start(title, done, steps, records)

    def step(self, done: int) -> None:
        if (done - 1) % self._every == 0 or done == self._meter.total:
            wait(self._device)  # so that the evaluation does not include updates
        self.spend("updates" if self.updates else "first update")
        self.updates = self._done = done
        self._meter.update(done)

    def record(self, record: Mapping[str, Any]) -> None:
        evaluation = record["evaluation_seconds"]
        self.seconds["evaluations"] += evaluation
        self.spend("checkpoints")
        self.seconds["checkpoints"] -= evaluation
        self.evaluations += 1

    def spend(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self._mark
        self._mark = now


def measure(options: Options) -> Result:
    with packed_images(options.images) as images:
        config = options.config(images)  # reports errors before starting a process
        found = _cold_and_warm(options, images) if options.cold else _run(options, config, images)
    return {**found, "data": name_of(options.images)}


def _run(options: Options, config: RunConfig, images: Path) -> Result:
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
        timeline, out = Timeline(config, stderr()), Path(home) / "run"
        records = train(config, out, display=timeline)
        timeline.spend("end")
        lines = said(RunDirectory(out), images)
    seconds = {"total": sum(timeline.seconds.values()), **timeline.seconds}
    each = 1e3 * seconds["updates"] / max(timeline.updates - 1, 1)
    return {
        "backbone": options.backbone,
        "optimizer": options.optimizer,
        "target": config.targets[0],
        "images of a domain in a step": config.batch_size,
        "steps": timeline.updates,
        "evaluations": timeline.evaluations,
        "said": lines,
        "seconds": {part: round(value, 3) for part, value in seconds.items()},
        "ms per update but the first": round(each, 3),
        "peak GiB": round(records[-1]["memory_gb"], 3),
    }


def _cold_and_warm(options: Options, images: Path) -> Result:
    found: Result = {}
    words = [sys.executable, __file__, *_words(options), "--json", "--images", str(images)]
    with tempfile.TemporaryDirectory(prefix="steppe-cache-") as cache:
        env = {**os.environ, **{name: str(Path(cache) / name) for name in CACHES}}
        for name in ("cold", "warm"):
            began = time.perf_counter()
            ended = subprocess.run(words, env=env, stdout=subprocess.PIPE, check=False)
            whole = time.perf_counter() - began
            if ended.returncode:
                raise RunError(f"the {name} run ended with exit code {ended.returncode}: see above")
            result = json.loads(ended.stdout)
            result["seconds"]["whole process"] = round(whole, 3)
            found[name] = {key: result.pop(key) for key in OF_ONE_RUN}
    del result["environment"]
    return {**result, **found}


def _words(options: Options) -> list[str]:
    names = ("device", "backbone", "weights", "optimizer", "precision", "steps", "target")
    values = [(name, getattr(options, name)) for name in (*names, "evaluations")]
    values += [("set", text) for text in options.overrides or ()]
    return [w for name, value in values if value is not None for w in (f"--{name}", str(value))]


main = command(Options, measure)
