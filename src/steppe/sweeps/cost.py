"""The estimated cost of a sweep: runs, passes, and time on this machine."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from steppe import console
from steppe.domains import dataset_spec
from steppe.optim import optimizer_spec
from steppe.training import RunConfig

from .store import Job
from .sweep import Sweep

if TYPE_CHECKING:  # only measuring needs torch
    import torch

_IMAGES = {"cpu": 4, "cuda": 64}
"""Batch size of the timed pass."""


@dataclass(frozen=True)
class Part:
    """The runs of a sweep on one dataset with one optimizer."""

    dataset: str
    optimizer: str
    runs: int
    passes: int
    seconds: float | None


@dataclass(frozen=True)
class Cost:
    runs: int
    passes: int
    seconds: float | None
    device: str | None
    """Where a pass was timed."""
    parts: tuple[Part, ...]


def estimate(sweep: Sweep, measured: bool = True) -> Cost:
    """Count the passes of all runs, and time one pass per network.

    A run makes `steps` updates, and each update makes the optimizer's number of forward and
    backward passes. The estimate ignores evaluations and the extra passes of algorithms with
    several objectives.
    """
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, axes in sweep.axes.items():
        kinds[axes["dataset"], axes["optimizer"]].append(name)
    device = _device() if measured else None
    timed: dict[tuple[Any, ...], float] = {}
    parts = []
    for (dataset, optimizer), names in kinds.items():
        steps = sum(sweep.axes[name]["steps"] for name in names)
        passes = round(steps * optimizer_spec(optimizer).passes)
        taken = None
        if device is not None:
            config = Job(sweep.folder(names[0])).config()
            spec = dataset_spec(config.dataset)
            images = config.batch_size * (len(spec.domains) - len(config.targets))
            kind = (config.backbone, config.image_size, spec.channels)
            if kind not in timed:
                timed[kind] = seconds_per_image(config, spec.channels, device)
            taken = passes * images * timed[kind]
        parts.append(Part(dataset, optimizer, len(names), passes, taken))
    seconds = [part.seconds for part in parts if part.seconds is not None]
    return Cost(
        sum(part.runs for part in parts),
        sum(part.passes for part in parts),
        sum(seconds) if measured else None,
        None if device is None else str(device),
        tuple(parts),
    )


def _device() -> torch.device:
    from steppe.training.processes import find_device

    return find_device("auto")


def seconds_per_image(config: RunConfig, channels: int, device: torch.device) -> float:
    """Time a forward and backward pass in float32, on one thread of a CPU."""
    import torch
    from torch.nn import functional as F

    from steppe.training.backbones import build_network

    network = build_network(
        config.backbone, n_classes=10, image_size=config.image_size, channels=channels
    ).to(device)
    n, threads = _IMAGES[device.type], torch.get_num_threads()
    torch.set_num_threads(1)  # the workers' default
    images = torch.zeros(n, channels, config.image_size, config.image_size, device=device)
    labels = torch.zeros(n, dtype=torch.int64, device=device)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        F.cross_entropy(network(images), labels).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return min(times) / n


def table(cost: Cost) -> console.Table:
    headings: tuple[str, ...] = ("dataset", "optimizer", "runs", "passes")
    if cost.device is not None:
        one = "CPU core" if cost.device == "cpu" else cost.device
        headings += (f"estimated time on one {one}",)
    parts = [*cost.parts, Part("all", "", cost.runs, cost.passes, cost.seconds)]
    rows = (_row(part)[: len(headings)] for part in parts)
    shown = console.table(headings, rows, labels=2)
    shown.rows[-2].end_section = True
    return shown


TRIAL = (
    *("--backbone", "small-cnn", "--weights", "none", "--image-size", "32"),
    *("--steps", "301", "--batch-size", "8"),
)
"""Options of `steppe sweep plan` with which runs on photographs take minutes on a CPU."""


def hint(cost: Cost) -> str | None:
    """How to make a sweep small, if it would take more than a day on one CPU core."""
    if cost.device != "cpu" or (cost.seconds or 0) <= timedelta(days=1).total_seconds():
        return None
    return (
        "This takes more than a day on one CPU core. For a trial sweep, lower --draws and "
        f"--trials, or plan it with {' '.join(TRIAL)}"
    )


def _row(part: Part) -> list[str]:
    taken = "" if part.seconds is None else str(timedelta(seconds=round(part.seconds)))
    return [part.dataset, part.optimizer, f"{part.runs:,}", f"{part.passes:,}", taken]
