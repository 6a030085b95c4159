"""What a sweep will cost: runs, passes, and time as this machine would take it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch.nn import functional as F

from steppe.domains import dataset_spec
from steppe.optim import optimizer_spec
from steppe.strangers import printable
from steppe.training import RunConfig
from steppe.training.backbones import build_network
from steppe.training.processes import find_device

from .plan import Sweep
from .store import Job

_IMAGES = {"cpu": 4, "cuda": 64}
"""Images in the pass that is timed."""


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
    """What a sweep will cost.

    Attributes:
        parts: by dataset and optimizer.
        device: what was timed.
    """

    parts: tuple[Part, ...]
    device: str

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the totals."""
        known = [part.seconds for part in self.parts if part.seconds is not None]
        return {
            "runs": sum(part.runs for part in self.parts),
            "passes": sum(part.passes for part in self.parts),
            "seconds": sum(known) if len(known) == len(self.parts) else None,
            "device": self.device,
            "parts": [asdict(part) for part in self.parts],
        }


def estimate(sweep: Sweep, measured: bool = True) -> Cost:
    """Adds up the passes of all runs, and times one of each kind.

    A run makes `steps` updates, each of as many forward and backward passes as its optimizer takes;
    algorithms with several objectives make more, and evaluations are not counted.
    """
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    example: dict[tuple[str, str], str] = {}
    for name, axes in sweep.axes.items():
        key = axes["dataset"], axes["optimizer"]
        example.setdefault(key, name)
        counts[key][0] += 1
        counts[key][1] += axes["steps"] * optimizer_spec(axes["optimizer"]).passes
    device = find_device("auto")
    timed: dict[tuple[Any, ...], float] = {}
    parts = []
    for key, (runs, passes) in counts.items():
        seconds = None
        if measured:
            config = Job(sweep.folder(example[key])).config()
            spec = dataset_spec(config.dataset)
            images = config.batch_size * (len(spec.domains) - len(config.targets))
            kind = (config.backbone, config.image_size, spec.channels)
            if kind not in timed:
                timed[kind] = _seconds_per_image(config, spec.channels, device)
            seconds = passes * images * timed[kind]
        parts.append(Part(*key, runs, passes, seconds))
    return Cost(tuple(parts), str(device))


def _seconds_per_image(config: RunConfig, channels: int, device: torch.device) -> float:
    """Of a forward and backward pass in float32."""
    network = build_network(
        config.backbone, n_classes=10, image_size=config.image_size, channels=channels
    ).to(device)
    n, threads = _IMAGES[device.type], torch.get_num_threads()
    torch.set_num_threads(1)  # as workers do
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


def table(cost: Cost) -> Table:
    """The cost for the terminal."""
    found: Mapping[str, Any] = cost.to_json()
    one = "CPU core" if cost.device == "cpu" else cost.device
    shown = Table("dataset", "optimizer", "runs", "passes", f"on one {one}, about")
    for part in (*cost.parts, None):
        values = asdict(part) if part else {"dataset": "all", "optimizer": "", **found}
        seconds = values["seconds"]
        time_taken = "" if seconds is None else str(timedelta(seconds=round(seconds)))
        shown.add_row(
            Text(printable(values["dataset"])),
            Text(printable(values["optimizer"])),
            f"{values['runs']:,}",
            f"{values['passes']:,}",
            time_taken,
            end_section=part is cost.parts[-1],
        )
    return shown
