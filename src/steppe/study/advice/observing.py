"""The indicators of a dataset: its short runs compared, and the loss measured after a warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from steppe.curvature import GaussNewtonOperator
from steppe.domains.batches import Batch, View
from steppe.errors import RunError
from steppe.measure.images import Drawn, Stream, draw
from steppe.measure.measuring import NUMBERS, cross_entropy, used_parameters
from steppe.training import RunDirectory, load_model
from steppe.training.processes import find_device
from steppe.training.setup import open_data

from . import indicators as I
from .extent import BASELINE, PROBED
from .probes import WARM_UP, Probe, Result, columns

IMAGES, BATCH = 64, 16
"""Training images per source domain on which the loss is measured, and in a batch of them."""

Values = dict[str, float]


def observe(
    done: Mapping[Probe, Path],
    found: Mapping[Probe, Result],
    device: str = "auto",
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Values:
    """Return the value of every indicator.

    Args:
        done: the folder of every finished short run.
        found: the accuracies of the short runs.
        device: where to measure the loss.
        show: called with the number of measured warm-ups, and that of all.

    Raises:
        RunError: every warm-up diverged.
    """
    warm = warm_ups(done)
    each: list[Values] = []
    with one_thread():
        for path in warm:
            show(len(each), len(warm))
            each.append(measured(path, device))
    show(len(warm), len(warm))
    values = {name: fmean(one[name] for one in each) for name in each[0]}
    return {**values, **compared(found)}


def warm_ups(done: Mapping[Probe, Path]) -> list[Path]:
    """Return the folders of the warm-ups.

    Raises:
        RunError: every warm-up diverged.
    """
    found = [path for probe, path in sorted(done.items()) if probe.factor == WARM_UP]
    if not found:
        raise RunError("every warm-up run diverged: look at the images and their labels")
    return found


def compared(found: Mapping[Probe, Result]) -> Values:
    """Return the accuracies of the baseline's short runs, and the others' gains over them."""
    reached: dict[str, list[Result]] = {name: [] for name in PROBED}
    for optimizer, result in columns(found):
        reached[optimizer].append(result)
    values = {}
    for part, column in (("validation", 0), ("left-out", 1)):
        # A run that diverged is worth nothing.
        scores = {name: [r[column] or 0.0 for r in rows] for name, rows in reached.items()}
        values[part] = fmean(scores[BASELINE])
        for name in PROBED:
            if name != BASELINE:
                values[f"{part} gain of {name}"] = I.gain(scores[name], scores[BASELINE])
    return values


def measured(run: Path, device: str) -> Values:
    """Measure the loss of a run's training domains at its weights."""
    config = RunDirectory(run).config()
    model = load_model(run, "last", str(find_device(device)))
    dataset, splits = open_data(config)
    training = [split.parts["train"] for split in splits if split.source]
    drawn, _ = draw(dataset, splits, None, IMAGES * len(training), seed=0)
    # Batches of one size, at least two, because estimates compare them.
    size = max(1, min(BATCH, *(len(one.chosen) // 2 for one in drawn)))
    where, view = next(model.parameters()).device, View(model.image_size, augment=False)
    domains = [_batches(one, view, size, where) for one in drawn]
    params = used_parameters(model, domains[0])
    rows = [torch.stack([_gradient(model, b, params) for b in some]) for some in domains]
    whole = [Batch(*map(torch.cat, zip(*some, strict=True))) for some in domains]
    small = sum(batch.images.numel() for batch in whole) <= NUMBERS
    op = GaussNewtonOperator(model, cross_entropy, whole, params, keep_graphs=small)
    top, trace = I.top_eigenvalue(op), I.trace(op)

    def loss() -> Tensor:
        return torch.stack([cross_entropy(model, batch) for batch in whole]).mean()

    return {
        "noise scale": I.noise_scale(stratified(rows), size * len(rows)),
        "disagreement": I.disagreement(torch.stack([row.mean(0) for row in rows])),
        "top eigenvalue": top,
        "trace": trace,
        "anisotropy": I.anisotropy(top, trace),
        "rise": I.rise(loss, params),
        "images": float(sum(map(len, training))),
        "classes": float(len(dataset.classes)),
    }


def stratified(rows: Sequence[Tensor]) -> Tensor:
    """The gradients of batches with as many images of each domain, as training has them.

    Args:
        rows: the gradients of batches of each domain.
    """
    batches = min(map(len, rows))
    return torch.stack([row[:batches] for row in rows]).mean(0)


def _batches(drawn: Drawn, view: View, size: int, device: torch.device) -> list[Batch]:
    stream = Stream([drawn], view, size, device)
    return [batch for batch in stream if len(batch.labels) == size]


def _gradient(model: nn.Module, batch: Batch, params: Sequence[nn.Parameter]) -> Tensor:
    found = torch.autograd.grad(cross_entropy(model, batch), list(params))
    return torch.cat([gradient.flatten() for gradient in found])


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, like the runs: rounding, and so the values, depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
