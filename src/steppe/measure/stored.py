"""What was measured of a run's curvature, as its folder keeps it: ``curvature/NAME.json``."""

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

from .settings import Precision

VERSION = 1
"""Of the format of these files; raised when an older steppe would misread them."""
FOLDER = "curvature"
"""Below the run's folder."""
TRAINING = "train"
"""The name of a measurement on what the run was trained on."""
VOLATILE = ("seconds", "date")
"""Fields that measure the machine or the day: two equal measurements may differ in them."""
_LONGEST = 150
"""Characters in a name; file systems take 255 bytes."""


@dataclass(frozen=True)
class Sample:
    """The images of one domain that the loss is the mean of: so many, drawn `of` so many."""

    domain: str
    part: Literal["train", "all"]
    """``train``: the images that the run learned from; ``all`` of the domain."""
    images: int
    of: int


@dataclass(frozen=True)
class Weights:
    """Which weights of a run, and the step after which they were saved."""

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
    """The residual that was asked for, relative to the largest eigenvalue."""
    converged: bool


@dataclass(frozen=True)
class DensityCurve:
    """The smoothed spectral density: its values on a grid of eigenvalues.

    Behind it are `steps` products of each of the random `probes`.
    """

    grid: tuple[float, ...]
    values: tuple[float, ...]
    probes: int
    steps: int


@dataclass(frozen=True)
class Measured:
    """The curvature of a run's loss at some of its weights, with what is needed to redo it.

    Attributes:
        name: what its file is called: ``train``, or the domains' names.
        domains: the images that the loss is the mean of.
        parameters: how many numbers it was differentiated by: those that the predictions use.
        gradient_norm: small at a minimum.
        density: how its eigenvalues are spread, where that was asked for.
        batch_size: images in a batch: the mean is the same, its rounding may not be.
        seed: of the images drawn and of the random vectors.
        products: products of the Hessian with a vector, without those of `flatness`.
        passes: over the data, for these products and the gradient.
        version: of this format.
    """

    name: str
    dataset: str
    domains: tuple[Sample, ...]
    weights: Weights
    loss_function: str
    parameters: int
    precision: Precision
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
        """How many images the loss is the mean of."""
        return sum(sample.images for sample in self.domains)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as its file has them."""
        values: dict[str, Any] = _plain(self)
        return values


def _plain(value: Any) -> Any:
    """A value as JSON has it; of a result, the fields that make two of them equal."""
    if is_dataclass(value):
        kept = (field.name for field in fields(value) if field.compare)
        return {name: _plain(getattr(value, name)) for name in kept}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def measurement_name(domains: Sequence[str] | None, which: str) -> str:
    """What a measurement's file is called, without its ending.

    `domains` are in the dataset's order; None for what the run was trained on.

    Examples:
        >>> measurement_name(None, "last"), measurement_name(["art_painting", "sketch"], "best")
        ('train', 'art_painting+sketch@best')
        >>> measurement_name(None, "step:300")
        'train@step-300'
    """
    name = TRAINING
    if domains is not None:
        # Quoted, so that no domain's name reads as another name, or as a path.
        name = "+".join(quote(domain, safe=" ", errors="surrogateescape") for domain in domains)
        if name == TRAINING:
            name += "+"
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}~{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    # Not every file system has colons.
    return name if which == "last" else f"{name}@{which.replace(':', '-')}"


def prepare_folder(run: Path) -> None:
    """Finds out before a measurement, not after it, whether its result can be stored."""
    folder = run / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        probe = folder / f".{os.getpid()}.writing"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written to ({error.strerror}): results are kept in the run's "
            "folder; copy the run to where you may write"
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
            f"{path} could not be written: {error.strerror or error}. Make room and measure again."
        ) from error


def load_measurements(run: str | os.PathLike[str]) -> dict[str, Measured]:
    """Read what was measured of a run's curvature, by name.

    A name is ``train``, or names of domains joined by ``+``; with ``@best`` at the end for the
    weights validated best, ``@step-300`` for those after step 300.

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
            f"{path} is damaged ({reason}): remove it and measure again with 'steppe curvature'"
        ) from None


def _contradiction(measured: Measured, stem: str) -> str | None:
    """What cannot be true of a measurement, if anything."""
    values, residuals = measured.eigenvalues.values, measured.eigenvalues.residuals
    numbers = (*values, *residuals, measured.trace.value, measured.trace.stderr, measured.loss)
    checks = {
        "it has no eigenvalues, or no domains": bool(values and measured.domains),
        "it has numbers that are not finite": all(map(math.isfinite, numbers)),
        "its eigenvalues do not descend": list(values) == sorted(values, reverse=True),
        "not every eigenvalue has a residual": len(values) == len(residuals),
        "its format is not one that was ever written": measured.version >= 1,
        f"it is called {measured.name}": measured.name == stem,
    }
    return next((wrong for wrong, holds in checks.items() if not holds), None)
