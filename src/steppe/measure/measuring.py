"""Measure the curvature of a run's loss at its weights."""

from __future__ import annotations

import datetime
import logging
import os
import platform
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe import __version__
from steppe.console import Meter
from steppe.curvature import (
    HessianOperator,
    flatness,
    lambda_max_from_flatness,
    spectral_density,
    top_eigenvalues,
    trace,
)
from steppe.curvature.results import Report
from steppe.domains.batches import Batch, View
from steppe.errors import RunError, UserError
from steppe.optim.registry import optimizers
from steppe.training import RunConfig, RunDirectory, TrainedModel, load_model
from steppe.training.processes import find_device
from steppe.training.setup import open_data

from .images import Drawn, Stream, draw
from .phases import Phases
from .settings import Format, Settings
from .stored import (
    DensityCurve,
    Measured,
    Spectrum,
    Weights,
    load_measurements,
    measurement_file,
    measurement_name,
    prepare_folder,
    save_measurement,
)

RHO, ALPHA = 0.05, 0.5
"""Defaults for runs whose optimizer has none."""
PROBES, DENSITY_STEPS = 4, 80
GRID = 256
"""Grid points of the density."""
NUMBERS = 64 * 3 * 224**2
"""Input values per batch by default."""
HELD = 2 << 30
"""Bytes of images kept on the device; more are read again in every pass."""

log = logging.getLogger("steppe")


def measure_run(
    run: str | os.PathLike[str],
    settings: Settings | None = None,
    *,
    device: str = "auto",
    root: str | None = None,
    meter: Meter | None = None,
) -> Measured:
    """Measure the curvature of a run's loss at its weights, and store the result in its folder.

    The loss is the mean cross-entropy of the model's logits, in evaluation mode and without
    augmentation, on images drawn evenly from the domains regardless of class. The result goes to
    ``curvature/NAME.json`` in the run's folder; `load_measurements` reads it back.

    Args:
        run: the run's folder; an unfinished run needs a checkpoint.
        settings: what to measure, and how accurately.
        device: where to compute.
        root: the data folder (default: the run's own).
        meter: shows the overall progress as a share.

    Examples:
        >>> import tempfile
        >>> from steppe.training import make_config, train
        >>> folder = tempfile.mkdtemp()
        >>> digits = {"dataset": "RotatedDigits", "targets": "75", "sources": "0"}
        >>> _ = train(make_config({**digits, "steps": 2}), folder)
        >>> few = Settings(top=2, images=16, trace_rtol=0.5)
        >>> found = measure_run(folder, few, device="cpu")
        >>> found.lambda_max > found.eigenvalues.values[1] > 0
        True
    """
    began = time.perf_counter()
    settings = settings or Settings()
    path = run_folder(Path(run))
    directory = RunDirectory(path)
    config = directory.config()
    ball = _ball(config, settings)
    where = find_device(device)
    if settings.precision == "tf32" and where.type == "cpu":
        raise UserError("precision=tf32 needs a GPU: on a CPU, use float32")
    dtype: Format = "float64" if settings.precision == "float64" else "float32"
    model = load_model(path, settings.which, str(where)).to(getattr(torch, dtype))
    if directory.state != "done":
        seen = "%s is not finished (%s): measuring its weights after step %d"
        log.warning(seen, path, directory.state, model.step)
    if root is not None:
        config = config.model_copy(update={"root": str(Path(root).resolve())})
    dataset, splits = open_data(config)
    if directory.data().get("fingerprint") != dataset.fingerprint():  # the split would differ
        raise UserError(
            f"the images of {dataset.spec.name} ({dataset.origin}) are not those that {path} was "
            "trained on: restore them, or pass their folder with --root"
        )
    drawn, is_training = draw(dataset, splits, settings.domains, settings.images, settings.seed)
    name = measurement_name(None if is_training else [d.domain.name for d in drawn], settings.which)
    prepare_folder(path)
    _say_what_is_replaced(path, name)
    phases = Phases(_costs(settings), meter or Meter("curvature", 1.0, console=None, unit="share"))
    with _explained(), _warnings_logged(path):
        found = _solve(model, drawn, settings, ball, phases)
    measured = Measured(
        name=name,
        dataset=dataset.spec.name,
        domains=tuple(one.sample for one in drawn),
        weights=Weights(settings.which, model.step, model.averaged),
        loss_function="cross-entropy",
        precision=dtype,
        seed=settings.seed,
        seconds=round(time.perf_counter() - began, 2),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device=torch.cuda.get_device_name(where) if where.type == "cuda" else where.type,
        versions={
            "steppe": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **found,
    )
    save_measurement(path, measured)
    return measured


def run_folder(run: Path) -> Path:
    """The run's own folder; a sweep's finished job has it in `result`."""
    result = run / "result"
    return result if (result / "config.json").exists() else run


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.images), batch.labels)


def used_parameters(model: nn.Module, batches: Iterable[Batch]) -> list[nn.Parameter]:
    """Parameters that predictions depend on.

    Others, such as an adversary's or a teacher's, would have zero rows in the Hessian.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    loss = cross_entropy(model, next(iter(batches)))
    gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, params, allow_unused=True)
    return [p for p, gradient in zip(params, gradients, strict=True) if gradient is not None]


def _solve(
    model: TrainedModel,
    drawn: Sequence[Drawn],
    settings: Settings,
    ball: tuple[float, float],
    phases: Phases,
) -> dict[str, Any]:
    phases.begin("images")
    device = next(model.parameters()).device
    each = model.channels * model.image_size**2
    numbers = each * sum(len(one.chosen) for one in drawn)
    batch_size = settings.batch_size or max(1, NUMBERS // each)
    stream = Stream(drawn, View(model.image_size, augment=False), batch_size, device)
    batches: Iterable[Batch] = list(stream) if numbers <= HELD else stream
    params = used_parameters(model, batches)
    parameters = sum(p.numel() for p in params)
    if settings.top > parameters:
        raise UserError(
            f"top={settings.top} is more than the model's {parameters} parameters: reduce it"
        )
    # Keeping the graphs of so few images takes no more memory than one usual batch.
    keep = True if numbers <= NUMBERS else None
    op = HessianOperator(model, cross_entropy, batches, params, keep_graphs=keep)
    value, gradient = op.gradient()
    seed = settings.seed
    found = top_eigenvalues(
        op,
        settings.top,
        tol=settings.tol,
        precision="tf32" if settings.precision == "tf32" else "fp32",
        vectors=True,
        seed=seed,
        progress=phases.begin("eigenvalues"),
    )
    traced = trace(
        op, rtol=settings.trace_rtol, eigenvalues=found, seed=seed, progress=phases.begin("trace")
    )
    curve = _density(op, seed, phases.begin("density")) if settings.density else None
    flat = flatness(
        model,
        cross_entropy,
        batches,
        *ball,
        params=params,
        seed=seed,
        progress=phases.begin("flatness"),
    )
    values, residuals = tuple(found.values.tolist()), tuple(found.residuals.tolist())
    return {
        "parameters": parameters,
        "loss": value,
        "gradient_norm": float(torch.linalg.vector_norm(gradient)),
        "eigenvalues": Spectrum(values, residuals, settings.tol, found.converged),
        "trace": traced,
        "flatness": flat,
        "density": curve,
        "batch_size": batch_size,
        "products": op.products,
        "passes": op.passes,
    }


def _density(op: HessianOperator, seed: int, report: Report) -> DensityCurve:
    found = spectral_density(op, probes=PROBES, steps=DENSITY_STEPS, seed=seed, progress=report)
    low, high = float(found.nodes.min()), float(found.nodes.max())
    margin = 0.05 * (high - low) or 1.0  # five smoothing widths, beyond which it vanishes
    grid = torch.linspace(low - margin, high + margin, GRID, dtype=torch.float64)
    values = found.at(grid)
    return DensityCurve(tuple(grid.tolist()), tuple(values.tolist()), PROBES, DENSITY_STEPS)


def _ball(config: RunConfig, settings: Settings) -> tuple[float, float]:
    """The settings' rho and alpha (default: the optimizer's, then `RHO` and `ALPHA`)."""
    chosen = config.optimizer
    known = optimizers[chosen.name].radii if chosen.name in optimizers else ("rho",)
    # ASAM's rho is relative to the weights, not the radius of a ball.
    is_radius = "rho" in known and not chosen.options.get("adaptive")
    rho = settings.rho
    if rho is None:
        rho = float(chosen.options.get("rho", RHO)) if is_radius else RHO
    # Only FAD's alpha is that of Equation 3; GAM's weights its first-order term and may exceed 1.
    own = float(chosen.options.get("alpha", ALPHA)) if chosen.name == "fad" else ALPHA
    alpha = own if settings.alpha is None else settings.alpha
    lambda_max_from_flatness(0.0, rho=rho, alpha=alpha)  # rejects bad values before the work
    return rho, alpha


def _say_what_is_replaced(run: Path, name: str) -> None:
    if not measurement_file(run, name).exists():
        return
    try:
        old = load_measurements(run)[name]
    except UserError as error:
        log.warning("%s", error)
    else:
        what = f"{len(old.eigenvalues.values)} eigenvalues, {old.images} images, {old.precision}"
        log.info("replacing the measurement of %s: %s", old.date, what)


def _costs(settings: Settings) -> dict[str, float]:
    """Rough cost of each phase in Hessian-vector products, for the progress display."""
    costs = {"images": 2.0, "eigenvalues": 40.0 + 4 * settings.top, "trace": 25.0}
    if settings.density:
        costs["density"] = float(PROBES * DENSITY_STEPS)
    return {**costs, "flatness": 250.0}


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"the device is out of memory ({str(error).splitlines()[0]}): reduce the number of "
            "eigenvalues (--top) or the batch size (--batch-size)"
        ) from None


@contextmanager
def _warnings_logged(run: Path) -> Iterator[None]:
    """Log the solvers' warnings once the progress display is gone."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        log.warning("%s: %s", run, warning.message)
