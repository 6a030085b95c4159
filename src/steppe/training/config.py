"""The config of one run: validated, complete, and unchanged by a round trip through JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict

from steppe.algorithms.registry import algorithms
from steppe.averaging.registry import averages
from steppe.domains import DatasetSpec, dataset_spec
from steppe.errors import LONGEST, UserError, shown
from steppe.optim.registry import optimizers
from steppe.registry import Registry
from steppe.strangers import parse, read

VERSION = 4
"""Format of `config.json`; incremented when an older steppe would misread it."""

AXES: Mapping[str, Registry[Any]] = {
    "algorithm": algorithms,
    "optimizer": optimizers,
    "averaging": averages,
}
"""Keys whose values are a name with options, and the registry of the names."""

RUN: JsonDict = {"role": "run"}
"""Marks keys that identify a run: its data, its seeds, its hyperparameter sample."""
MACHINE: JsonDict = {"role": "machine"}
"""Marks keys that say how a run executes; a resumed run may change them. A key without a mark is a
hyperparameter."""

_LONGEST_TEXT, _LONGEST_LIST, _DEEPEST = 4000, 10_000, 10
"""Upper limits for any value: characters, items, nesting depth."""
_PLAIN = (str, int, float, list, tuple, type(None))
"""Common types that are not mappings, checked first because checking for a mapping is slow."""

_run_key = partial(Field, json_schema_extra=RUN)
_machine_key = partial(Field, json_schema_extra=MACHINE)
_seed_key = partial(_run_key, ge=0, lt=2**64)


class Named(BaseModel):
    """A name on one of the axes, with its options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class RunConfig(BaseModel):
    """Everything that determines a run, and a few settings of how it executes.

    A `RunConfig` is always complete: `make_config` fills in the defaults of the dataset and the
    optimizer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = _run_key(VERSION)
    dataset: str = _run_key(
        description="Dataset name ('steppe list datasets') or folder DOMAIN/CLASS/IMAGE"
    )
    targets: tuple[str, ...] = _run_key(
        min_length=1, description="Held-out domain, or several separated by commas; repeatable"
    )
    recipe: str | None = _run_key(
        None, description="Settings that belong together ('steppe list recipes'); others override"
    )
    sources: tuple[str, ...] = _run_key(
        (), description="Domain to train on, or several separated by commas; repeatable"
    )
    split: Literal["domainbed", "appendix"] = Field(
        "domainbed", description="Train/validation split: domainbed, or appendix (the FAD paper's)"
    )
    trial_seed: int = _seed_key(0, description="Seed of the split, as in DomainBed")
    seed: int = _seed_key(
        0, description="Seed of initial weights, batches, augmentation and dropout"
    )
    init_seed: int | None = _seed_key(
        None, description="Seed of initial weights (default: as seed)"
    )
    twin: int = _seed_key(
        0,
        description="Repeat a run with another rounding: initial weights differ by N units in the "
        "last place",
    )

    draw: int | None = _seed_key(
        None, description="Use hyperparameter sample N; sample 0 is the defaults"
    )
    space: str | None = _run_key(
        None,
        description="Search space for defaults and samples: fair (tuned per optimizer), "
        "fad (the paper's), domainbed or yu2024",
    )

    algorithm: Named = Field(Named(name="ERM"), description="Domain-generalization algorithm")
    optimizer: Named = Field(description="Optimizer")
    averaging: Named = Field(Named(name="none"), description="Weight averaging")

    backbone: str = Field(description="Backbone name ('steppe list backbones'), or any timm model")
    weights: str = Field(
        description="Initial weights: imagenet, none, a run's folder, or a safetensors or "
        "checkpoint file"
    )
    class_embeddings: str = Field(
        "none",
        description="File of text embeddings, one per class: the classifier of CLIP's image tower",
    )
    embedding: int | None = Field(
        None,
        gt=0,
        le=10**6,
        description="Keep CLIP's projection to N dimensions, and normalize features (default: "
        "that of class_embeddings)",
    )
    freeze: str = Field(
        "none",
        description="Layers not to train: none, all (a linear probe), the number of stages from "
        "the stem on, or names such as layer1,layer2",
    )
    lora: int = Field(
        0, ge=0, le=10**5, description="Rank of LoRA's updates of a transformer; 0 for none"
    )
    lr_decay: float = Field(
        1.0, gt=0, le=1, description="Learning rate of a layer relative to that of the next one"
    )
    drop_path: float = Field(
        0.0, ge=0, lt=1, description="Rate of stochastic depth, for timm's models"
    )
    freeze_bn: bool = Field(description="Freeze batch-norm statistics")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the classifier")
    image_size: int = Field(gt=0, le=8192, description="Height and width of the network's input")
    augment: bool = Field(description="Crop, flip and jitter training images")
    augment_validation: bool = Field(
        False, description="Validate on augmented images, as DomainBed does"
    )

    linear_probe: bool = Field(
        False, description="Start from a classifier fitted to the features (LP-FT)"
    )
    linear_steps: int = Field(
        0, ge=0, le=10**9, description="Train the classifier alone in the first N steps"
    )
    linear_lr: float = Field(
        5e-5, gt=0, allow_inf_nan=False, description="Learning rate of these steps"
    )
    lr_schedule: Literal["constant", "plateau"] = Field(
        "constant",
        description="constant, or plateau: divide the learning rate by 10 when the source "
        "validation loss stops falling; the third time, stop",
    )
    second_stage: bool = Field(
        False,
        description="Then train again, with the same learning rates, on all source images",
    )

    steps: int = Field(
        gt=0, le=10**9, description="Number of updates; the last record is at steps - 1"
    )
    checkpoint_every: int = Field(
        gt=0, le=10**9, description="Steps between evaluations and checkpoints"
    )
    evaluate_both: bool = _run_key(
        False, description="Also evaluate the raw weights where an average is evaluated"
    )
    batch_size: int = Field(gt=0, le=10**5, description="Images per source domain and step")
    accumulate: int = Field(
        1, gt=0, le=10**5, description="Split each batch into N parts to save memory"
    )
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16"] = Field(
        "auto",
        description="fp32, tf32, fp16, bf16 or auto: fp32 on a CPU; on a GPU, the fastest with "
        "accurate gradients",
    )
    engine: Literal["auto", "off", "compile", "graph"] = Field(
        "auto",
        description="off, compile, graph or auto: off on a CPU; on a GPU, compiled and captured in "
        "CUDA graphs",
    )
    deterministic: bool = Field(
        False, description="Make repeated GPU runs bit-identical, at some cost in speed"
    )

    data: Literal["auto", "device", "stream", "host"] = _machine_key(
        "auto",
        description="Where images are stored and transformed: auto, device, stream or host; the "
        "pixels are the same",
    )
    packed: bool = _machine_key(True, description="Use the dataset's pack if it exists")
    device: str = _machine_key("auto", description="Device: auto, cpu, cuda or cuda:1")
    workers: int | None = _machine_key(
        None, ge=0, le=1024, description="Processes that read images"
    )
    root: str | None = _machine_key(None, description="Data folder")
    loggers: tuple[str, ...] = _machine_key(
        (), description="Logger: tensorboard, wandb or mlflow; repeatable"
    )
    plugins: tuple[str, ...] = _run_key(
        (),
        description="Module that registers your own datasets, algorithms, optimizers or averaging; "
        "repeatable",
    )
    merged_from: tuple[str, ...] = _run_key(
        (), description="Runs whose weights were averaged; written by 'steppe merge'"
    )

    resolved: dict[str, str] | None = _machine_key(
        None, description="What auto resolved to when the run last started; written by the run"
    )

    @field_validator("targets", "sources", "loggers", "plugins", mode="before")
    @classmethod
    def _several(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            return tuple(v for v in value.split(",") if v)
        if info.field_name in ("loggers", "plugins"):
            return value
        # A command line parses domains called 0, 15, ... as numbers.
        if isinstance(value, int | float):
            return (str(value),)
        return tuple(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("freeze", mode="before")
    @classmethod
    def _counted(cls, value: Any) -> Any:
        return str(value) if type(value) is int else value

    @field_validator("workers", mode="before")
    @classmethod
    def _automatic(cls, value: Any) -> Any:
        return None if value in ("none", "auto") else value

    @field_validator("algorithm", "optimizer", "averaging", mode="before")
    @classmethod
    def _as_named(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _as_it_was(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        refuse_foreign(values)
        # Runs from before the engine existed continue without it.
        return {"engine": "off", **values} if values.get("version", VERSION) <= 2 else values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of accumulate={self.accumulate}"
            )
        if self.linear_steps >= self.steps:
            raise ValueError(
                f"linear_steps={self.linear_steps} leaves none of steps={self.steps} for the whole "
                "network: lower it, or raise steps"
            )
        for key in ("targets", "sources"):
            names: tuple[str, ...] = getattr(self, key)
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{key} lists {name!r} twice")
        return self

    def spec(self) -> DatasetSpec:
        return dataset_spec(self.dataset)

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"


def keys(*marks: JsonDict) -> frozenset[str]:
    """Config keys that have one of these marks.

    Examples:
        >>> sorted(keys(MACHINE))
        ['data', 'device', 'loggers', 'packed', 'resolved', 'root', 'workers']
    """
    fields = RunConfig.model_fields.items()
    return frozenset(name for name, field in fields if field.json_schema_extra in marks)


def refuse_foreign(values: Mapping[str, Any]) -> None:
    """Reject a newer format and oversized values before anything computes with them."""
    flat = dict(values)
    for outer, options in values.items():
        if not isinstance(options, _PLAIN) and isinstance(options, Mapping):
            del flat[outer]
            flat |= {f"{outer}.{key}": value for key, value in options.items()}
    for key, value in flat.items():
        small = value is None or type(value) in (float, bool)  # most values of a plan's configs
        if (wrong := _oversized(key) or (None if small else _oversized(value, 1))) is not None:
            raise UserError(f"config: {key[:LONGEST]}={shown(value)}: {wrong}")
    version = values.get("version", VERSION)
    if not isinstance(version, int) or version < 1:
        raise UserError(
            f"config has version={shown(version)}: expected an integer from 1 to {VERSION}"
        )
    if version > VERSION:
        raise UserError(
            f"this config was written by a newer steppe (format {version}; this one reads up to "
            f"{VERSION}): pip install -U steppe"
        )


def _oversized(value: Any, depth: int = 0) -> str | None:
    if isinstance(value, str):
        if "\0" in value:
            return "null characters are not allowed"
        return "too long" if len(value) > _LONGEST_TEXT else None
    if isinstance(value, int):
        return "an integer of more than 64 bits" if abs(value) >= 2**64 else None
    if not isinstance(value, _PLAIN) and isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    if not isinstance(value, list | tuple):
        return None
    if len(value) > _LONGEST_LIST:
        return "too many values"
    if depth == _DEEPEST:
        return "nested too deeply"
    return next((wrong for item in value if (wrong := _oversized(item, depth + 1))), None)


def read_config(path: Path) -> RunConfig:
    """Read a `config.json`; a complete one does not need its dataset."""
    try:
        values = parse(read(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        hint = ", such as a list entry's 'config'" if isinstance(values, list) else ""
        raise UserError(f"{path} is not a config: expected a JSON object{hint}")
    try:
        with suppress(ValidationError):
            return RunConfig(**values)
        from .complete import make_config

        return make_config(values)  # fills in missing keys, or explains the error
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
