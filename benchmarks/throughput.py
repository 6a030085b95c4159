"""Runs per minute of a sweep whose runs share a GPU, or the cores of a CPU."""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from subprocess import run
from typing import Any

import harness
import numpy as np
from harness import IMAGES, OVERRIDES, Result, command, option, track
from images import name_of, packed_images
from PIL import Image
from runs import refuse_own

from steppe.domains import load
from steppe.sweeps import Grid, Job, Sweep, write_plan
from steppe.training import RunDirectory
from steppe.training.directory import VOLATILE

PER_CLASS = 40  # generated images per domain


@dataclass(frozen=True, kw_only=True)
class Options(harness.DeviceOptions):
    images: Path | None = IMAGES
    per_gpu: list[int] | None = option(None, "Workers (default: 16); repeatable.", min=1)
    optimizers: str = option("adam,adamw,sgd,sam,gam,fad", "Comma-separated names.")
    targets: int = option(4, "Held-out domains, one at a time.", min=1)
    trials: int = option(6, "Seeds.", min=1)
    steps: int = option(601, "Updates per run.", min=1)
    backbone: str = option("small-cnn", harness.KNOWN)
    image_size: int = option(32, "Height and width of the network's input.", min=1)
    batch: int = option(32, "Images per domain and update.", min=1)
    overrides: list[str] | None = OVERRIDES

    def grid(self, images: Path, targets: int, trials: int) -> Grid:
        own = {"steps": self.steps, "backbone": self.backbone, "image_size": self.image_size}
        own |= {"weights": "none", "batch_size": self.batch}
        given = self.overrides or []
        refuse_own(own, given)
        return Grid(
            (str(images),),
            optimizers=tuple(self.optimizers.split(",")),
            targets=",".join(domain.name for domain in islice(load(images).domains, targets)),
            trials=trials,
            draws=0,
            overrides=(*(f"{key}={value}" for key, value in own.items()), *given),
        )


def measure(options: Options) -> Result:
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home, _images(options) as images:

        def carried_out(name: str, workers: int, *size: int) -> tuple[Result, Sweep]:
            sweep = write_plan(options.grid(images, *size), Path(home) / name)
            words = [sys.executable, "-m", "steppe", "sweep", "run", str(sweep.path)]
            words += ["--workers", str(workers)]
            if options.where.type == "cuda":
                words += ["--per-gpu", str(workers)]
            began = time.time()
            run(words, check=True, capture_output=True)
            return _row(began, time.time(), sweep), sweep

        # One worker and a few of the runs, for comparison; it also fills the compilers' caches.
        rows["1 worker, a part"], alone = carried_out("alone", 1, 1, 1)
        for number in track(options.per_gpu or [16], "sweeps"):
            name = f"{number} workers"
            rows[name], sweep = carried_out(name, number, options.targets, options.trials)
            for what, of in (("accuracies", _accuracies), ("records", _records)):
                same = [of(alone, run) == of(sweep, run) for run in alone.names]
                rows[name][f"{what} as alone"] = f"{sum(same)} of {len(same)}"
    return {
        "images": "doodles of mixed sizes" if options.images is None else name_of(options.images),
        "backbone": options.backbone,
        "batch": f"{options.batch} of {options.image_size} pixels per domain",
        "updates": options.steps,
        "sweeps": rows,
    }


def _row(began: float, ended: float, sweep: Sweep) -> Result:
    events = [Job(sweep.folder(name)).events() for name in sweep.names]
    first = min(each[0].time for each in events)
    last = max(each[-1].time for each in events)
    return {
        "runs": len(events),
        "done": sum(each[-1].kind == "done" for each in events),
        "seconds": round(ended - began, 2),
        "runs per minute": round(60 * len(events) / (ended - began), 1),
        "seconds to the first claim": round(first - began, 2),
        "seconds from first claim to last result": round(last - first, 2),
    }


def _records(sweep: Sweep, name: str) -> list[dict[str, Any]]:
    """Everything in a run's records that does not measure the machine."""
    records = RunDirectory(Job(sweep.folder(name)).result).records()
    return [{k: v for k, v in record.items() if k not in VOLATILE} for record in records]


def _accuracies(sweep: Sweep, name: str) -> list[Any]:
    return [
        (domain, part, scores["accuracy"])
        for record in _records(sweep, name)
        for domain, parts in record["domains"].items()
        for part, scores in parts.items()
    ]


@contextmanager
def _images(options: Options) -> Iterator[Path]:
    if options.images is not None:
        with packed_images(options.images) as root:
            yield root
        return
    doodles, rng = load("Doodles"), np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
        root = Path(home) / "doodles"
        for domain in doodles.domains:
            for label, name in enumerate(doodles.classes):
                folder = root / domain.name / name
                folder.mkdir(parents=True)
                for i in np.flatnonzero(domain.labels == label)[:PER_CLASS]:
                    image = Image.fromarray(domain.images[int(i)]).convert("RGB")
                    height, width = rng.integers(32, 72, 2).tolist()
                    image.resize((width, height)).save(folder / f"{i}.png")
        with packed_images(root):
            yield root


main = command(Options, measure)
