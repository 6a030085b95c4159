"""The curvature of a run's loss at the weights that it found."""

from __future__ import annotations

import datetime
import logging
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe import __version__
from steppe.curvature import (
    Eigenvalues,
    HessianOperator,
    flatness,
    lambda_max_from_flatness,
    spectral_density,
    top_eigenvalues,
    trace,
)
from steppe.domains import Dataset, Domain, Split
from steppe.domains.batches import Batch, View, evaluation_batches
from steppe.domains.dataset import Indices
from steppe.errors import RunError, UserError, unknown

from . import setup
from .config import RunConfig
from .directory import RunDirectory
from .measured import (
    DensityCurve,
    FlatnessFound,
    Measured,
    Sample,
    Spectrum,
    TraceEstimate,
    Weights,
    load_measurements,
    measurement_file,
    measurement_name,
    prepare_folder,
    save_measurement,
)
from .models import TrainedModel, load_model
from .phases import Advance, Phases
from .processes import find_device
from .which import Which

Precision = Literal["float32", "float64"]

RHO, ALPHA = 0.05, 0.5
"""Where the run's optimizer has none."""
PROBES, DENSITY_STEPS = 4, 80
GRID = 256
"""Points of the density."""
NUMBERS = 64 * 3 * 224**2
"""What a batch has, unless told otherwise."""
HELD = 2 << 30
"""Bytes of images that are held on the device; more are read anew in every pass."""
_DRAW = 3
"""Begins the seeds of the images drawn, so that they are none of training or evaluation."""

log = logging.getLogger("steppe")


def measure_run(
    run: str | os.PathLike[str],
    *,
    domains: Sequence[str] | None = None,
    top: int = 50,
    images: int = 1024,
    which: Which = "last",
    rho: float | None = None,
    alpha: float | None = None,
    tol: float = 1e-3,
    trace_rtol: float = 0.02,
    batch_size: int | None = None,
    density: bool = False,
    seed: int = 0,
    device: str = "auto",
    root: str | None = None,
    precision: Precision = "float32",
    progress: Callable[[Advance], None] | None = None,
) -> Measured:
    r"""Measure the curvature of a run's loss at its weights, and keep the result in its folder.

    The loss is the mean cross-entropy of the model's logits, in evaluation mode and without
    augmentation, on images drawn evenly from the domains without regard to their classes. The
    result is written to ``curvature/NAME.json`` below the run's folder; `load_measurements` reads
    it back.

    Args:
        run: the run's folder; an unfinished run needs a checkpoint.
        domains: names of domains of the run's dataset. Of a domain that the run was trained on, the
            images of its training split are used, of others all. Unless given, the training split
            of all domains that it was trained on.
        top: how many eigenvalues of the Hessian, the largest first.
        images: how many to draw, over all domains; 0: all.
        which: ``last``, the weights after the last step; ``best``, those validated best; or
            ``step:N``, those of the checkpoint after step N.
        rho: the radius of the paper's flatness; that of the run's optimizer unless given, or 0.05
            where it has none.
        alpha: the share of the zeroth order in R_FAD; that of FAD unless given, or 0.5. (GAM's
            `alpha` is another thing: the weight of its first-order term.)
        tol: the residual of the eigenvalues to reach, relative to the largest.
        trace_rtol: the standard error of the trace to reach, relative to it.
        batch_size: images in a batch: fewer need less memory. Unless given, as many as have the
            numbers of 64 colour images of 224 x 224 pixels.
        density: whether to estimate the spectral density too.
        seed: of the images drawn and of the random vectors.
        device: where to compute.
        root: the data folder.
        precision: "float32" or "float64".
        progress: told how far the whole is.

    Examples:
        >>> import tempfile
        >>> from steppe.training import make_config, train
        >>> folder = tempfile.mkdtemp()
        >>> digits = {"dataset": "RotatedDigits", "targets": "75", "sources": "0"}
        >>> _ = train(make_config({**digits, "steps": 2}), folder)
        >>> found = measure_run(folder, top=2, images=16, trace_rtol=0.5, device="cpu")
        >>> found.lambda_max > found.eigenvalues.values[1] > 0
        True
    """
    began = time.perf_counter()
    path = run_folder(Path(run))
    directory = RunDirectory(path)
    config = directory.config()
    _check(top, images, batch_size, precision, tol, trace_rtol)
    own_rho, own_alpha = _radius(config)
    rho, alpha = own_rho if rho is None else rho, own_alpha if alpha is None else alpha
    lambda_max_from_flatness(0.0, rho=rho, alpha=alpha)  # refuses now what would be refused later
    where = find_device(device)
    model = load_model(path, which, str(where)).to(getattr(torch, precision))
    if directory.state != "done":
        log.warning(
            "%s is not finished (%s): measured as it was after step %d",
            path,
            directory.state,
            model.step,
        )
    if root is not None:
        config = config.model_copy(update={"root": str(Path(root).resolve())})
    dataset, splits = setup.open_data(config)
    _check_images(directory, dataset)
    drawn, is_training = _draw(dataset, splits, domains, images, seed)
    name = measurement_name(None if is_training else [d.domain.name for d in drawn], which)
    prepare_folder(path)
    _say_what_is_replaced(path, name)
    phases = Phases(_costs(top, density), progress)
    phases.begin("images")
    each = model.channels * model.image_size**2
    batch_size = batch_size or max(1, NUMBERS // each)
    total = each * sum(len(one.chosen) for one in drawn)
    stream = _Stream(drawn, View(model.image_size, augment=False), batch_size, where)
    batches = list(stream) if total <= HELD else stream
    params = _used(model, batches)
    if top > (n := sum(p.numel() for p in params)):
        raise UserError(f"top={top}: the model has {n} parameters, ask for at most as many")
    # The graphs of so few images take no more memory than that of one batch usually does.
    keep = True if total <= NUMBERS else None
    op = HessianOperator(model, cross_entropy, batches, params, keep_graphs=keep)
    with _explained(), _warnings_logged(path):
        loss, gradient = op.gradient()
        found = top_eigenvalues(
            op, top, tol=tol, vectors=True, seed=seed, progress=phases.begin("eigenvalues")
        )
        traced = trace(
            op, rtol=trace_rtol, eigenvalues=found, seed=seed, progress=phases.begin("trace")
        )
        curve = _density(op, seed, phases.begin("density")) if density else None
        flat = flatness(
            model,
            cross_entropy,
            batches,
            rho,
            alpha,
            params=params,
            seed=seed,
            progress=phases.begin("flatness"),
        )
    low, high = traced.interval()
    measured = Measured(
        name=name,
        dataset=dataset.spec.name,
        domains=tuple(one.sample for one in drawn),
        weights=Weights(which, model.step, model.averaged),
        loss_function="cross-entropy",
        parameters=n,
        precision=precision,
        loss=loss,
        gradient_norm=float(torch.linalg.vector_norm(gradient)),
        eigenvalues=_spectrum(found, tol),
        trace=TraceEstimate(
            traced.value, traced.stderr, low, high, traced.samples, trace_rtol, traced.converged
        ),
        flatness=FlatnessFound(
            rho=flat.rho,
            alpha=flat.alpha,
            zeroth=flat.zeroth,
            first=flat.first,
            fad=flat.fad,
            zeroth_one_step=flat.zeroth_one_step,
            first_one_step=flat.first_one_step,
            fad_one_step=flat.fad_one_step,
            lambda_max=lambda_max_from_flatness(flat.fad, rho=flat.rho, alpha=flat.alpha),
            converged=flat.converged,
            passes=flat.passes,
        ),
        density=curve,
        batch_size=batch_size,
        seed=seed,
        products=op.products,
        passes=op.passes,
        seconds=round(time.perf_counter() - began, 2),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device=torch.cuda.get_device_name(where) if where.type == "cuda" else where.type,
        versions={
            "steppe": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )
    save_measurement(path, measured)
    return measured


def run_folder(run: Path) -> Path:
    """The run's own folder; a finished run of a sweep has it below."""
    result = run / "result"
    return result if (result / "config.json").exists() else run


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy of a batch."""
    return F.cross_entropy(model(batch.images), batch.labels)


@dataclass(frozen=True)
class _Drawn:
    """The images of a domain that were drawn."""

    domain: Domain
    chosen: Indices
    sample: Sample


class _Stream:
    """Batches that are read anew in every pass."""

    def __init__(
        self, drawn: Sequence[_Drawn], view: View, batch_size: int, device: torch.device
    ) -> None:
        self._drawn, self._view, self._batch_size, self._device = drawn, view, batch_size, device

    def __iter__(self) -> Iterator[Batch]:
        for one in self._drawn:
            # Domain by domain: some algorithms look at a batch as a whole.
            for images, labels in evaluation_batches(
                one.domain, one.chosen, self._view, self._batch_size
            ):
                yield Batch(images.to(self._device), labels.to(self._device))


def _check(
    top: int, images: int, batch_size: int | None, precision: str, tol: float, trace_rtol: float
) -> None:
    for name, value in (("tol", tol), ("trace_rtol", trace_rtol)):
        if not value > 0:
            raise UserError(f"{name}={value}: give a positive number")
    if top < 1:
        raise UserError(f"top={top}: ask for at least one eigenvalue")
    if images < 0:
        raise UserError(f"images={images}: give a number of images, or 0 for all")
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size={batch_size}: a batch has at least one image")
    if precision not in get_args(Precision):
        raise UserError(unknown("precision", precision, get_args(Precision)))


def _say_what_is_replaced(run: Path, name: str) -> None:
    if not measurement_file(run, name).exists():
        return
    try:
        old = load_measurements(run)[name]
    except UserError as error:
        log.warning("%s", error)
        return
    log.info(
        "replaces the measurement of %s: %d eigenvalues, %d images, %s",
        old.date,
        len(old.eigenvalues.values),
        old.images,
        old.precision,
    )


def _check_images(directory: RunDirectory, dataset: Dataset) -> None:
    """Refuses other images than the run had: the split would be another one."""
    if directory.data().get("fingerprint") != dataset.fingerprint():
        raise UserError(
            f"the images of {dataset.spec.name} ({dataset.origin}) are not those that "
            f"{directory.path} was trained on: put them back, or name their folder with --root"
        )


def _draw(
    dataset: Dataset,
    splits: Sequence[Split],
    names: Sequence[str] | None,
    images: int,
    seed: int,
) -> tuple[list[_Drawn], bool]:
    """The images of each domain, and whether they are what the run was trained on."""
    known = [domain.name for domain in dataset.domains]
    training = {split.domain.name: split for split in splits if split.source}
    wanted = list(training) if names is None else list(names)
    if not wanted:
        raise UserError(f"no domain is named: known are {', '.join(known)}")
    for name in wanted:
        if name not in known:
            raise UserError(
                unknown(f"domain of {dataset.spec.name}", name, known)
                + f" (trained on: {', '.join(training)})"
            )
        if wanted.count(name) > 1:
            raise UserError(f"domain {name!r} is named twice: name each once")
    pools: list[tuple[int, Domain, Literal["train", "all"], Indices]] = []
    for position, domain in enumerate(dataset.domains):
        if domain.name in wanted:
            split = training.get(domain.name)
            pool = np.arange(len(domain)) if split is None else split.parts["train"]
            pools.append((position, domain, "all" if split is None else "train", pool))
    counts = shares([len(pool) for *_, pool in pools], images)
    if 0 in counts:
        raise UserError(
            f"images={images}: there are {len(pools)} domains, ask for at least one image of each"
        )
    drawn = []
    for (position, domain, part, pool), count in zip(pools, counts, strict=True):
        # The first of one order: more images are these and others.
        order = np.random.default_rng([_DRAW, seed, position]).permutation(pool)
        sample = Sample(domain.name, part, count, len(pool))
        drawn.append(_Drawn(domain, order[:count], sample))
    return drawn, set(wanted) == set(training)


def shares(sizes: Sequence[int], total: int) -> list[int]:
    """How many to take of each, as evenly as the sizes allow; all, if `total` is 0.

    Examples:
        >>> shares([100, 3, 50], 60), shares([2, 2], 9), shares([2, 5], 0)
        ([29, 3, 28], [2, 2], [2, 5])
    """
    taken = list(sizes)
    left = total or sum(sizes)
    for rank, i in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        taken[i] = min(sizes[i], left // (len(sizes) - rank))
        left -= taken[i]
    return taken


def _used(model: TrainedModel, batches: list[Batch] | _Stream) -> list[nn.Parameter]:
    """The parameters that the predictions use: an adversary's and a teacher's are not among them.

    Their rows of the Hessian would be zero.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    loss = cross_entropy(model, next(iter(batches)))
    gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, params, allow_unused=True)
    return [p for p, gradient in zip(params, gradients, strict=True) if gradient is not None]


def _radius(config: RunConfig) -> tuple[float, float]:
    """The optimizer's own rho and alpha, where it has them."""
    chosen = config.optimizer
    rho = chosen.options.get("rho", RHO)
    # GAM's alpha weighs its first-order term and may exceed 1: it is none of Equation 3's.
    alpha = chosen.options.get("alpha", ALPHA) if chosen.name == "fad" else ALPHA
    return float(rho), float(alpha)


def _costs(top: int, density: bool) -> dict[str, float]:
    """What the phases cost, in products of the Hessian with a vector: rough, for the time left."""
    costs = {"images": 2.0, "eigenvalues": 40.0 + 4 * top, "trace": 25.0}
    if density:
        costs["density"] = float(PROBES * DENSITY_STEPS)
    return {**costs, "flatness": 250.0}


def _spectrum(found: Eigenvalues, tol: float) -> Spectrum:
    values, residuals = tuple(found.values.tolist()), tuple(found.residuals.tolist())
    return Spectrum(values, residuals, tol, found.converged)


def _density(op: HessianOperator, seed: int, report: Callable[[Any], None]) -> DensityCurve:
    found = spectral_density(op, probes=PROBES, steps=DENSITY_STEPS, seed=seed, progress=report)
    low, high = float(found.nodes.min()), float(found.nodes.max())
    margin = 0.05 * (high - low) or 1.0  # five widths of the smoothing: nothing lies beyond
    grid = torch.linspace(low - margin, high + margin, GRID, dtype=torch.float64)
    values = found.at(grid)
    return DensityCurve(tuple(grid.tolist()), tuple(values.tolist()), PROBES, DENSITY_STEPS)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"the device has too little memory ({str(error).splitlines()[0]}): ask for fewer "
            "eigenvalues (--top) or smaller batches (--batch-size)"
        ) from None


@contextmanager
def _warnings_logged(run: Path) -> Iterator[None]:
    """A solver's warnings as lines of the log, once the progress is out of the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        log.warning("%s: %s", run, warning.message)
