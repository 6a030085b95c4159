"""`steppe bench step`: what a step of a run costs.

The same batches and steps as in `steppe train`, from packed images. For one algorithm: what
reading, augmenting, moving, normalizing and counting add to forward, backward and the optimizer.
For several: how their steps compare with ERM's.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from steppe.domains import load, packing
from steppe.domains.batches import training_batches
from steppe.domains.pack import Packed
from steppe.errors import UserError
from steppe.training import RunConfig, RunDirectory, make_config
from steppe.training.precision import settings
from steppe.training.processes import Processes
from steppe.training.progress import Silent
from steppe.training.trainer import Trainer

from .record import environment
from .task import PIXELS, write_doodles

DOMAINS = 3
BASELINE = "ERM"
"""What other algorithms are compared with."""


@contextmanager
def packed_images(per_class: int = 24) -> Iterator[Path]:
    """A folder of photograph-sized images in three domains and one to hold out, packed."""
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
        root = Path(home) / "images"
        write_doodles(root, per_class)
        packing.make(load(root, packed=False), root.parent)
        yield root


def run_config(
    images: Path,
    backbone: str,
    batch: int,
    optimizer: str,
    device: torch.device,
    precision: str,
    deterministic: bool,
    algorithm: str = "ERM",
) -> RunConfig:
    """A run on the packed images: no weights are needed to time it, frozen batch norm is usual."""
    return make_config(
        {
            "dataset": str(images),
            "targets": ["sketch"],
            "backbone": backbone,
            "weights": "none",
            "freeze_bn": True,
            "algorithm": algorithm,
            "optimizer": {"name": optimizer, "lr": 1e-4},
            "batch_size": batch // DOMAINS,
            "device": str(device),
            "precision": precision,
            "deterministic": deterministic,
        }
    )


def measure(
    device: torch.device,
    backbone: str,
    batch: int,
    optimizer: str,
    rounds: int,
    steps: int,
    precision: str = "fp32",
    deterministic: bool = False,
) -> dict[str, Any]:
    """Everything `steppe bench step` reports, as plain values."""
    if batch % DOMAINS:
        raise UserError(f"--batch {batch} is not a multiple of {DOMAINS} domains")
    with (
        packed_images() as images,
        tempfile.TemporaryDirectory() as out,
        settings(precision, deterministic),
    ):
        config = run_config(images, backbone, batch, optimizer, device, precision, deterministic)
        run = RunDirectory(Path(out))
        trainer = Trainer(config, run, Processes(device), Silent())
        batches = training_batches(trainer.sampling, 0, config.steps, trainer.workers)
        for warm_up in itertools.islice(batches, 2):
            trainer.step(warm_up)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            each = progress.track(range(rounds), description=f"{backbone}, {optimizer}")
            measured = [_round(trainer, batches, steps, device) for _ in each]
        packed = all(isinstance(domain.images, Packed) for domain in trainer.dataset.domains)
    return {
        "environment": environment(device),
        "backbone": backbone,
        "optimizer": optimizer,
        "batch": f"{DOMAINS} x {batch // DOMAINS}",
        "precision": precision,
        "deterministic": deterministic,
        "data": f"{PIXELS} x {PIXELS} images, {'packed' if packed else 'files'}",
        "rounds": rounds,
        "steps a round": steps,
        "ms per step": _spread([1e3 * r["step"] for r in measured]),
        "ms waiting for data": _spread([1e3 * r["data"] for r in measured]),
        **(_update(measured) if device.type == "cpu" else {}),
    }


def compare(
    device: torch.device,
    backbone: str,
    batch: int,
    optimizer: str,
    rounds: int,
    steps: int,
    precision: str,
    names: Sequence[str],
) -> dict[str, Any]:
    """The steps of algorithms over ERM's: a turn of each in every round, so that noise is shared.

    Batches are read before the clock starts: what is compared is the step alone. An adversary's
    steps are those of its turns, on average.
    """
    if batch % DOMAINS:
        raise UserError(f"--batch {batch} is not a multiple of {DOMAINS} domains")
    names = list(dict.fromkeys((BASELINE, *names)))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with (
        packed_images() as images,
        tempfile.TemporaryDirectory() as out,
        settings(precision, deterministic=False),
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        bar = progress.add_task(f"{backbone}, {optimizer}", total=(rounds + 1) * len(names))
        trainers = {}
        for name in names:
            config = run_config(images, backbone, batch, optimizer, device, precision, False, name)
            trainers[name] = Trainer(config, RunDirectory(Path(out)), Processes(device), Silent())
        for round_number in range(rounds + 1):
            for name, trainer in trainers.items():
                first = round_number * steps
                batches = [trainer.sampling.batches(first + step) for step in range(steps)]
                began = time.perf_counter()
                for domains in batches:
                    trainer.step(domains)
                trainer.check_divergence()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if round_number:  # the first is for warming up
                    seconds[name].append((time.perf_counter() - began) / steps)
                progress.advance(bar)
    return {
        "environment": environment(device),
        "backbone": backbone,
        "optimizer": optimizer,
        "batch": f"{DOMAINS} x {batch // DOMAINS}",
        "precision": precision,
        "rounds": rounds,
        "steps a round": steps,
        "algorithms": {
            name: {
                "ms per step": _spread([1e3 * value for value in own]),
                f"over {BASELINE}": _spread(
                    [value / base for value, base in zip(own, seconds[BASELINE], strict=True)]
                ),
            }
            for name, own in seconds.items()
        },
    }


def comparison_tables(result: dict[str, Any]) -> list[Table]:
    """The comparison for the terminal."""
    title = f"{result['backbone']}, {result['optimizer']}, batch {result['batch']}"
    table = Table("", "ms per step", f"over {BASELINE}", "min", "max", title=title)
    for name, of_one in result["algorithms"].items():
        ratio = of_one[f"over {BASELINE}"]
        shares = (f"{ratio[key]:.2f}" for key in ("median", "min", "max"))
        table.add_row(name, f"{of_one['ms per step']['median']:.0f}", *shares)
    return [table]


def _update(measured: list[dict[str, float]]) -> dict[str, Any]:
    """The share of the update; a GPU's host does not wait for it, and cannot tell."""
    return {
        "ms in forward, backward, optimizer": _spread([1e3 * r["update"] for r in measured]),
        "overhead": _spread([1 - r["update"] / r["step"] for r in measured]),
    }


def _round(
    trainer: Trainer, batches: Iterator[Any], steps: int, device: torch.device
) -> dict[str, float]:
    """Seconds a step, on average over some steps: whole, in the update, waiting for data."""
    trainer.update_seconds = waited = 0.0
    began = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        trainer.step(batch)
        trainer.check_divergence()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    whole = time.perf_counter() - began
    return {
        "step": whole / steps,
        "update": trainer.update_seconds / steps,
        "data": waited / steps,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The result for the terminal."""
    title = f"{result['backbone']}, {result['optimizer']}, batch {result['batch']}"
    table = Table("", "median", "min", "max", title=f"{title}, {result['data']}")
    columns = ("median", "min", "max")
    for name in (name for name in result if name.startswith("ms ")):
        table.add_row(name, *(f"{result[name][key]:.1f}" for key in columns))
    if "overhead" in result:
        shares = (f"{100 * result['overhead'][key]:.1f} %" for key in columns)
        table.add_row("overhead: all but the update", *shares)
    return [table]
