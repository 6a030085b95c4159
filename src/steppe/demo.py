"""`steppe demo`: the optimizers side by side on built-in data, in under a minute on a CPU.

Handwritten digits (scikit-learn's, 8 x 8 pixels), each of six rotations a domain. A small network
trains on five of them and is tested on the sixth, which it has never seen.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.optim import build_optimizer, optimizer_spec

ANGLES = (0, 15, 30, 45, 60, 75)
TARGET = 75
"""Held out: an end of the range, so that the network has to extrapolate."""
STEPS = 250
BATCH = 32
SEEDS = 3

# Learning rates suit a small network trained from nothing; the defaults of the registry are for
# fine-tuning. The same seeds, batches and steps for all, nothing chosen by the held-out domain.
OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.05},
    "adam": {"lr": 2e-3},
    "sam": {"lr": 0.05, "rho": 0.1},
    "gam": {"lr": 0.05, "rho": 0.1, "alpha": 0.5},
    "fad": {"lr": 0.05, "rho": 0.1, "alpha": 0.5, "beta": 0.5},
}


@dataclass(frozen=True)
class Result:
    """One training run."""

    seen: float
    unseen: float
    milliseconds: float


def rotated_digits() -> dict[int, tuple[Tensor, Tensor]]:
    """The digits at each angle: images in [0, 1] and labels."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    domains = {}
    # Every domain has images of its own: a digit never appears at two angles.
    for angle, chosen in zip(ANGLES, order.chunk(len(ANGLES)), strict=True):
        domains[angle] = (_rotate(images[chosen], angle), labels[chosen])
    return domains


def _rotate(images: Tensor, degrees: float) -> Tensor:
    radians = torch.deg2rad(torch.tensor(float(degrees)))
    cos, sin, zero = radians.cos(), radians.sin(), torch.tensor(0.0)
    matrix = torch.stack([cos, -sin, zero, sin, cos, zero]).reshape(1, 2, 3)
    grid = F.affine_grid(matrix.expand(len(images), -1, -1), list(images.shape), False)
    return F.grid_sample(images, grid, align_corners=False)


def network() -> nn.Sequential:
    """A small convolutional network with batch norm."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean()
    model.train()
    return 100 * float(right)


def train(name: str, seed: int, domains: dict[int, tuple[Tensor, Tensor]]) -> Result:
    """Trains on all domains but the target and tests on it."""
    torch.manual_seed(seed)
    model = network()
    optimizer = build_optimizer(name, model.parameters(), model=model, **OPTIMIZERS[name])
    sources = [data for angle, data in domains.items() if angle != TARGET]
    x, y = (torch.cat(parts) for parts in zip(*sources, strict=True))
    draw = torch.Generator().manual_seed(seed)
    times = []
    for _ in range(STEPS):
        batch = torch.randint(len(y), (BATCH,), generator=draw)

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            return loss

        start = time.perf_counter()
        optimizer.step(closure)  # type: ignore[arg-type]
        times.append(1e3 * (time.perf_counter() - start))
    # The median, because one disturbance of the machine would show in a mean.
    milliseconds = statistics.median(times)
    return Result(_accuracy(model, x, y), _accuracy(model, *domains[TARGET]), milliseconds)


def run() -> None:
    """Trains every optimizer with every seed and prints the table."""
    console = Console()
    domains = rotated_digits()
    sources = ", ".join(f"{a}°" for a in ANGLES if a != TARGET)
    console.print(
        f"Digits rotated by {sources} for training, {TARGET}° held out; "
        f"{STEPS} steps, batch {BATCH}, {SEEDS} seeds."
    )
    results: dict[str, list[Result]] = {name: [] for name in OPTIMIZERS}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=len(OPTIMIZERS) * SEEDS)
        for seed in range(SEEDS):
            for name in OPTIMIZERS:
                progress.update(task, description=f"{name}, seed {seed}")
                results[name].append(train(name, seed, domains))
                progress.advance(task)
    console.print(table(results))
    console.print(
        "Mean ± standard error over seeds, in percent. One small task decides nothing about the "
        "methods; it shows that they run, what they cost, and how to call them."
    )


def table(results: dict[str, list[Result]]) -> Table:
    """The results as a table for the terminal."""
    grid = Table()
    for heading in ("optimizer", "passes/step", "ms/step", "seen angles", f"{TARGET}° (unseen)"):
        grid.add_column(heading, justify="left" if heading == "optimizer" else "right")
    for name, runs in results.items():
        grid.add_row(
            name,
            str(optimizer_spec(name).passes),
            f"{statistics.median(r.milliseconds for r in runs):.1f}",
            _cell([r.seen for r in runs]),
            _cell([r.unseen for r in runs]),
        )
    return grid


def _cell(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.1f} ± {error:.1f}"
