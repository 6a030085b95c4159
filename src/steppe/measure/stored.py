"""Measurements of a run's curvature, stored in its folder as ``curvature/NAME.json``."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import Field, TypeAdapter, ValidationError

from steppe.curvature.results import Flatness, Trace
from steppe.durable import replace
from steppe.errors import RunError, UserError
from steppe.strangers import parse, read
from steppe.training.which import PATTERN

from .settings import Format

VERSION = 1
"""Format of these files; incremented when an older steppe would misread them."""
FOLDER = "curvature"
TRAINING = "train"
"""Name of a measurement on the run's training data."""
VOLATILE = ("seconds", "date")
"""Fields that may differ between identical measurements."""
_LONGEST = 150
"""Characters in a name; file systems allow 255 bytes."""


@dataclass(frozen=True)
class Sample:
    """Images of one domain that the loss averages over: `images`, drawn from `of`."""

    domain: str
    part: Literal["train", "all"]
    """``train`` for the training split, ``all`` for the whole domain."""
    images: int
    of: int


@dataclass(frozen=True)
class Weights:
    """The choice of a run's weights, and the step after which they were saved."""

    which: Annotated[str, Field(pattern=PATTERN)]
    step: int
    averaged: bool


@dataclass(frozen=True)
class Spectrum:
    """The largest eigenvalues of the Hessian, descending."""

    values: tuple[float, ...]
    residuals: tuple[float, ...]
    """The norms of `H v - value * v`, in the same order."""
    tol: float
    """The target residual, relative to the largest eigenvalue."""
    converged: bool


@dataclass(frozen=True)
class DensityCurve:
    """The smoothed spectral density on a grid, from `steps` products with each random probe."""

    grid: tuple[float, ...]
    values: tuple[float, ...]
    probes: int
    steps: int


@dataclass(frozen=True)
class Measured:
    """The curvature of a run's loss at its weights, with everything needed to repeat it.

    Attributes:
        name: file name without suffix: ``train``, or the domains' names.
        domains: the images that the loss averages over.
        parameters: number of parameters that predictions depend on.
        gradient_norm: small at a minimum.
        density: the spectral density, if requested.
        batch_size: images per batch; it only affects rounding.
        seed: seed of the images and the random vectors.
        products: Hessian-vector products, without those of `flatness`.
        passes: passes over the data for these products and the gradient.
        version: file format.
    """

    name: str
    dataset: str
    domains: tuple[Sample, ...]
    weights: Weights
    loss_function: str
    parameters: int
    precision: Format
    loss: float
    gradient_norm: float
    eigenvalues: Spectrum
    trace: Trace
    flatness: Flatness
    density: DensityCurve | None
    batch_size: int
    seed: int
    products: int
    passes: int
    seconds: float
    date: str
    device: str
    versions: Mapping[str, str]
    version: int = VERSION

    @property
    def lambda_max(self) -> float:
        return self.eigenvalues.values[0]

    @property
    def images(self) -> int:
        """Number of images that the loss averages over."""
        return sum(sample.images for sample in self.domains)

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = _plain(self)
        return values


def _plain(value: Any) -> Any:
    """Convert a value to JSON types; results keep only the fields that they compare by."""
    if is_dataclass(value):
        kept = (field.name for field in fields(value) if field.compare)
        return {name: _plain(getattr(value, name)) for name in kept}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def measurement_name(domains: Sequence[str] | None, which: str) -> str:
    """File name of a measurement, without suffix.

    `domains` are in the dataset's order; None means the run's training data.

    Examples:
        >>> measurement_name(None, "last"), measurement_name(["art_painting", "sketch"], "best")
        ('train', 'art_painting+sketch@best')
        >>> measurement_name(None, "step:300")
        'train@step-300'
    """
    name = TRAINING
    if domains is not None:
        # Quoted, so that no domain name reads as another name or as a path.
        name = "+".join(quote(domain, safe=" ", errors="surrogateescape") for domain in domains)
        if name == TRAINING:
            name += "+"
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}~{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    # Some file systems do not allow colons.
    return name if which == "last" else f"{name}@{which.replace(':', '-')}"


def prepare_folder(run: Path) -> None:
    """Check before a measurement that its result can be stored."""
    folder = run / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        probe = folder / f".{os.getpid()}.writing"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{folder} is not writable ({error.strerror}): results go to the run's folder, so copy "
            "the run to a writable place"
        ) from None


def measurement_file(run: Path, name: str) -> Path:
    return run / FOLDER / f"{name}.json"


def save_measurement(run: Path, measured: Measured) -> None:
    path = measurement_file(run, measured.name)
    text = json.dumps(measured.to_json(), indent=2, allow_nan=False) + "\n"
    try:
        replace(path, text.encode())
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error.strerror or error}. Free some space and rerun."
        ) from error


def load_measurements(run: str | os.PathLike[str]) -> dict[str, Measured]:
    """Read a run's curvature measurements, by name.

    A name is ``train``, or domain names joined by ``+``. ``@best`` at the end marks the best
    weights by validation, ``@step-300`` those after step 300.

    Examples:
        >>> import tempfile
        >>> load_measurements(tempfile.mkdtemp())
        {}
    """
    folder = Path(run) / FOLDER
    return {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}


_adapter = TypeAdapter(Measured)


def _read(path: Path) -> Measured:
    try:
        text = read(path)
        values = parse(text)
        version = values.get("version") if isinstance(values, dict) else None
        if isinstance(version, int) and version > VERSION:
            raise UserError(
                f"{path} was written by a newer steppe (format {version}; this one reads up to "
                f"{VERSION}): pip install -U steppe"
            )
        measured = _adapter.validate_json(text, strict=True)
        if (wrong := _contradiction(measured, path.stem)) is not None:
            raise ValueError(wrong)
        return measured
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(
            f"{path} is damaged ({reason}): remove it and rerun 'steppe curvature'"
        ) from None


def _contradiction(measured: Measured, stem: str) -> str | None:
    """The first impossible fact about a measurement, if any."""
    values, residuals = measured.eigenvalues.values, measured.eigenvalues.residuals
    numbers = (*values, *residuals, measured.trace.value, measured.trace.stderr, measured.loss)
    checks = {
        "no eigenvalues or no domains": bool(values and measured.domains),
        "non-finite numbers": all(map(math.isfinite, numbers)),
        "eigenvalues not in descending order": list(values) == sorted(values, reverse=True),
        "not every eigenvalue has a residual": len(values) == len(residuals),
        f"unknown format {measured.version}": measured.version >= 1,
        f"it belongs to {measured.name}": measured.name == stem,
    }
    return next((wrong for wrong, holds in checks.items() if not holds), None)
