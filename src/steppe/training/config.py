"""One run, described: validated, complete, and the same after a trip through JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.config import JsonDict

from steppe.algorithms import algorithm_spec
from steppe.averaging import averaging_spec
from steppe.domains import DatasetSpec, dataset_spec, import_plugins
from steppe.errors import LONGEST, UserError, shown, unknown
from steppe.optim import optimizer_spec
from steppe.search import DEFAULT_SPACE, get_space
from steppe.strangers import parse, read

from .draws import draw_hparams
from .loggers import check_loggers

VERSION = 4
"""Of the format of `config.json`; raised when an older steppe would misread it."""

_DEFAULTS = {"algorithm": "ERM", "optimizer": "adam", "averaging": "none"}
"""DomainBed's."""

RUN: JsonDict = {"role": "run"}
"""Marks the keys that say which run it is: what it learns from, its seeds, its draw."""
MACHINE: JsonDict = {"role": "machine"}
"""Marks the keys that say how a run is carried out: it is the same run with another value, and a
resumed one may have it. A key without a mark is a hyperparameter."""

_GIVE = {
    "dataset": "--dataset NAME ('steppe data list' has them)",
    "targets": "--target DOMAIN, to hold out",
}

KEYWORDS = ("imagenet", "none")
"""What `weights` may be, other than a file."""


_LONGEST_TEXT, _LONGEST_LIST, _DEEPEST = 4000, 10_000, 10
"""What no value exceeds: characters, items, and lists in lists."""


class Named(BaseModel):
    """A name on one of the axes, and the options that go with it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.model_extra or {})


class RunConfig(BaseModel):
    """Everything that determines a run, and a little about how it is carried out.

    `make_config` fills in what a dataset and an optimizer have defaults for; a `RunConfig` is
    always complete.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = Field(VERSION, json_schema_extra=RUN)
    dataset: str = Field(
        description="a name, or the path of a folder DOMAIN/CLASS/IMAGE", json_schema_extra=RUN
    )
    targets: tuple[str, ...] = Field(
        min_length=1, description="domains held out for testing", json_schema_extra=RUN
    )
    sources: tuple[str, ...] = Field(
        (), description="domains to train on; empty: all others", json_schema_extra=RUN
    )
    split: Literal["domainbed", "appendix"] = "domainbed"
    trial_seed: int = Field(
        0, ge=0, lt=2**64, description="seeds the split, as in DomainBed", json_schema_extra=RUN
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**64,
        description="seeds initial weights, batches, augmentation, dropout",
        json_schema_extra=RUN,
    )

    draw: int | None = Field(
        None,
        ge=0,
        lt=2**64,
        description="DomainBed's hparams_seed, if one was drawn",
        json_schema_extra=RUN,
    )
    space: str | None = Field(
        None,
        description="where defaults and draws come from: fair (the default), fad, domainbed",
        json_schema_extra=RUN,
    )

    algorithm: Named = Named(name="ERM")
    optimizer: Named
    averaging: Named = Named(name="none")

    backbone: str
    weights: str = Field(description="imagenet, none, or a file")
    freeze_bn: bool = Field(description="keep batch-norm statistics as they are")
    dropout: float = Field(0.0, ge=0, lt=1, description="before the classifier")
    image_size: int = Field(gt=0, le=8192)
    augment: bool = Field(description="crop, flip and jitter training images")
    augment_validation: bool = Field(
        False, description="validate on augmented images, as DomainBed does"
    )

    steps: int = Field(gt=0, le=10**9, description="updates; the last record is at steps - 1")
    checkpoint_every: int = Field(
        gt=0, le=10**9, description="steps between evaluations and checkpoints"
    )
    batch_size: int = Field(gt=0, le=10**5, description="images of each source domain in a step")
    accumulate: int = Field(
        1, gt=0, le=10**5, description="parts that a batch is cut into, to save memory"
    )
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16"] = Field(
        "auto", description="fp32 on a CPU; on a GPU the fastest that is true to the gradients"
    )
    engine: Literal["auto", "off", "compile", "graph"] = Field(
        "auto", description="off on a CPU; on a GPU compiled, and captured in CUDA graphs"
    )
    deterministic: bool = Field(False, description="same bits on a GPU, at some cost")

    data: Literal["auto", "device", "stream", "host"] = Field(
        "auto",
        description="where images live and are transformed; the pixels are the same",
        json_schema_extra=MACHINE,
    )
    packed: bool = Field(
        True,
        description="use the dataset's pack where there is a valid one",
        json_schema_extra=MACHINE,
    )
    device: str = Field(
        "auto", description="auto, cpu, cuda, cuda:1, ...", json_schema_extra=MACHINE
    )
    workers: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="processes that read images; none: auto",
        json_schema_extra=MACHINE,
    )
    root: str | None = Field(
        None, description="the data folder; none: $STEPPE_DATA or ./data", json_schema_extra=MACHINE
    )
    loggers: tuple[str, ...] = Field(
        (), description="tensorboard, wandb, mlflow", json_schema_extra=MACHINE
    )
    plugins: tuple[str, ...] = Field(
        (), description="modules that register datasets or algorithms", json_schema_extra=RUN
    )

    resolved: dict[str, str] | None = Field(
        None,
        description="what auto stood for when the run last started; written by the run",
        json_schema_extra=MACHINE,
    )

    @field_validator("targets", "sources", "loggers", "plugins", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return tuple(v for v in value.split(",") if v) if isinstance(value, str) else value

    @field_validator("workers", mode="before")
    @classmethod
    def _automatic(cls, value: Any) -> Any:
        return None if value in ("none", "auto") else value

    @field_validator("targets", "sources", mode="before")
    @classmethod
    def _as_names(cls, value: Any) -> Any:
        # Domains may be called 0, 15, ...: numbers, once read from a command line.
        if isinstance(value, int | float):
            return (str(value),)
        return tuple(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("algorithm", "optimizer", "averaging", mode="before")
    @classmethod
    def _as_named(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _as_it_was(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        _refuse_monsters(values)
        # A run that was begun before there was an engine goes on without one.
        if values.get("version", VERSION) in (1, 2):
            return {"engine": "off", **values}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of accumulate={self.accumulate}"
            )
        for key in ("targets", "sources"):
            names: tuple[str, ...] = getattr(self, key)
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{key} has {name!r} twice")
        return self

    def spec(self) -> DatasetSpec:
        """The dataset's record."""
        return dataset_spec(self.dataset)

    def to_json(self) -> str:
        """The text of `config.json`."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"


def keys(*marks: JsonDict) -> frozenset[str]:
    """The keys of a config that have one of these marks.

    Examples:
        >>> sorted(keys(MACHINE))
        ['data', 'device', 'loggers', 'packed', 'resolved', 'root', 'workers']
    """
    fields = RunConfig.model_fields.items()
    return frozenset(name for name, field in fields if field.json_schema_extra in marks)


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """Make a complete config from what was given.

    What is missing comes from the dataset (steps, batch size, backbone, ...) and the optimizer
    (its hyper-parameters); unknown keys are errors that suggest the nearest known one.

    Examples:
        >>> config = make_config({"dataset": "PACS", "targets": "sketch", "optimizer": "fad"})
        >>> config.steps, config.backbone, config.optimizer.options["rho"]
        (5001, 'resnet50', 0.05)
        >>> make_config({"dataset": "PACS", "targets": "sketch", "stepz": 3})
        Traceback (most recent call last):
        ...
        steppe.errors.UserError: unknown config key 'stepz', did you mean 'steps'? ...
    """
    given = dict(values)
    _refuse_monsters(given)
    _refuse_newer(given.get("version", VERSION))
    for key in given:
        if key not in RunConfig.model_fields:
            raise UserError(unknown("config key", key, RunConfig.model_fields))
    import_plugins(_texts(given.get("plugins")))
    check_loggers(_texts(given.get("loggers")))
    if isinstance(given.get("root"), str | os.PathLike):
        given["root"] = str(Path(given["root"]).resolve())  # to be found from another folder too
    for key in ("dataset", "targets"):
        if given.get(key) in (None, "", (), []):  # 0 is a domain's name
            raise UserError(f"config has no {key!r}: give {_GIVE[key]}")
    spec = dataset_spec(str(given["dataset"]))
    given["dataset"] = spec.name
    given.setdefault("weights", "imagenet" if spec.pretrained else "none")
    if isinstance(given["weights"], str | os.PathLike) and given["weights"] not in KEYWORDS:
        given["weights"] = str(Path(given["weights"]).resolve())
    pretrained = given["weights"] != "none"
    given.setdefault("space", DEFAULT_SPACE)  # an older run has None, and options of its own
    space = given["space"] or DEFAULT_SPACE
    get_space(space if isinstance(space, str) else shown(space))
    defaults = {
        "freeze_bn": pretrained,
        **{k: getattr(spec, k) for k in ("steps", "checkpoint_every", "batch_size")},
        **{k: getattr(spec, k) for k in ("backbone", "image_size", "augment")},
    }
    given["algorithm"] = _complete_algorithm(given.get("algorithm", {}))
    given["optimizer"] = _complete_optimizer(
        given.get("optimizer", {}), space, _finetunes(space, spec, given["weights"])
    )
    given["averaging"] = _complete_averaging(given.get("averaging", {}), spec)
    algorithm = algorithm_spec(given["algorithm"]["name"])
    if spec.pretrained:
        defaults |= {name: hyper.default for name, hyper in algorithm.run.items()}
    try:
        config = RunConfig(**{**defaults, **given})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        value = "" if not where else f" {where}={shown(first['input'])}:"
        raise UserError(f"config:{value} {message}") from None
    algorithm.check_batch(config.batch_size // config.accumulate)
    sources = config.sources or [name for name in spec.domains if name not in config.targets]
    if sources:  # if none is left, whoever opens the data says so
        algorithm.check_domains(len(sources))
    if config.augment and spec.channels != 3:
        raise UserError(f"augment=true needs images of 3 channels; {spec.name} has {spec.channels}")
    return config


def _refuse_monsters(values: Mapping[str, Any], above: str = "") -> None:
    """Refuses values that no setting has, before anything computes with them or prints them."""
    for key, value in values.items():
        if isinstance(value, Mapping) and not above:
            _refuse_monsters(value, f"{key}.")
        elif (wrong := _monster([key, value])) is not None:
            where = f"{above}{key}"[:LONGEST]
            raise UserError(f"config: {where}={shown(value)}: {wrong}")


def _monster(value: Any, depth: int = 0) -> str | None:
    if isinstance(value, str):
        if "\0" in value:
            return "no name has a null character"
        return "too long" if len(value) > _LONGEST_TEXT else None
    if isinstance(value, int):
        return "an integer of more than 64 bits" if abs(value) >= 2**64 else None
    if isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    if not isinstance(value, list | tuple):
        return None
    if len(value) > _LONGEST_LIST:
        return "too many values"
    if depth == _DEEPEST:
        return "nested too deeply"
    return next((wrong for item in value if (wrong := _monster(item, depth + 1))), None)


def _refuse_newer(version: Any) -> None:
    if not isinstance(version, int) or version < 1:
        raise UserError(
            f"config has version={shown(version)}: expected a number from 1 to {VERSION}"
        )
    if version > VERSION:
        raise UserError(
            f"this config was written by a newer steppe (format {version}; this one reads up to "
            f"{VERSION}): pip install -U steppe"
        )


def _texts(value: Any) -> list[str]:
    """The texts of a list, or of one text with commas; the validator refuses anything else."""
    values = value.split(",") if isinstance(value, str) else value
    if not isinstance(values, list | tuple):
        return []
    return [text for text in values if isinstance(text, str) and text]


def _split_name(value: Any, kind: str) -> tuple[str, dict[str, Any]]:
    if isinstance(value, Named):
        return value.name, value.options
    if isinstance(value, str):
        return value, {}
    if not isinstance(value, Mapping):
        raise UserError(f"config: {kind}={shown(value)}: expected a name, or a name with options")
    options = {str(key): _plain(f"{kind}.{key}", option) for key, option in value.items()}
    return str(options.pop("name", _DEFAULTS[kind])), options


def _plain(where: str, value: Any) -> Any:
    """An option as it comes back from a file, so that a config is the same before and after."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise UserError(
            f"config: {where}={shown(value)}: expected a finite number, a text, or a list of them"
        ) from None


def _complete_algorithm(value: Any) -> dict[str, Any]:
    name, options = _split_name(value, "algorithm")
    spec = algorithm_spec(name)
    spec.check(options)
    return {"name": spec.name, **spec.default_options, **options}


def _complete_averaging(value: Any, dataset: DatasetSpec) -> dict[str, Any]:
    name, options = _split_name(value, "averaging")
    spec = averaging_spec(name)
    spec.check(options)
    own = {"every": dataset.validate_every, "tolerance": dataset.validation_tolerance}
    defaults = {key: own.get(key, default) for key, default in spec.default_options.items()}
    return {"name": spec.name, **defaults, **options}


def _complete_optimizer(value: Any, space: str, pretrained: bool) -> dict[str, Any]:
    name, options = _split_name(value, "optimizer")
    import torch

    spec = optimizer_spec(name)
    known = spec.keywords
    for key in options:
        if key not in known:
            raise UserError(unknown(f"option for optimizer {spec.name!r}:", key, known))
    chosen: dict[str, Any] = {**spec.defaults(space, pretrained), **options}
    try:  # what is wrong with a value, only the optimizer knows
        spec.build([torch.nn.Parameter(torch.zeros(1))], **chosen)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        given = ", ".join(f"{key}={shown(value)}" for key, value in options.items())
        raise UserError(f"config: optimizer {spec.name!r} refuses {given}: {error}") from None
    return {"name": spec.name, **chosen}


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Put ``key=value`` texts into a config; a dot reaches into one of the axes.

    Examples:
        >>> apply_overrides({"optimizer": "fad"}, ["optimizer.rho=0.1", "steps=50"])
        {'optimizer': {'name': 'fad', 'rho': 0.1}, 'steps': 50}
    """
    result = dict(values)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            given = override[:LONGEST]
            raise UserError(f"--set {given}: expected KEY=VALUE, such as optimizer.rho=0.1")
        outer, dot, inner = key.strip().partition(".")
        try:
            value = parse(text)
        except json.JSONDecodeError:
            value = text
        except ValueError as error:  # JSON that nobody means
            raise UserError(f"--set {key}={text[:20]}...: {error}") from None
        if not dot:
            result[outer] = value
            continue
        if outer not in _DEFAULTS:
            raise UserError(f"--set {override[:LONGEST]}: only {', '.join(_DEFAULTS)} have a dot")
        old = result.get(outer, {})
        result[outer] = {**({"name": old} if isinstance(old, str) else old), inner: value}
    return result


def configure(
    options: Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    file: Path | None = None,
    resumed: RunConfig | None = None,
    draw: int | None = None,
    space: str | None = None,
) -> RunConfig:
    """Make a config as the command line gives it, the later overriding the earlier.

    Args:
        options: config keys that were given.
        overrides: ``key=value`` texts.
        file: a config to start from.
        resumed: the config of the run that is taken up again.
        draw: DomainBed's `hparams_seed`; none: no hyperparameters are drawn.
        space: where defaults and draws come from (default: `fair`, the tuned ones).
    """
    values: dict[str, Any] = {}
    texts = list(overrides)
    if resumed is not None:
        values = resumed.model_dump()
        # A name alone asks for nothing new: the run keeps the options it was begun with.
        same = {axis for axis in _DEFAULTS if _names(options.get(axis), values[axis]["name"])}
        options = {key: value for key, value in options.items() if key not in same}
        kept = {f"{axis}={values[axis]['name'].lower()}" for axis in _DEFAULTS}
        texts = [text for text in texts if text.replace(" ", "").lower() not in kept]
    elif file is not None:
        values = read_config(file).model_dump(exclude={"version", "resolved"})  # written anew
        for key in ("dataset", "weights"):
            if options.get(key, values[key]) != values[key]:
                raise UserError(
                    f"{file} is for {key}={values[key]!r}, and other settings in it follow from "
                    f"that: change them there, or give options without --config"
                )
        if draw is None and space not in (None, values["space"]):
            raise UserError(
                f"{file} has all its values, from space={values['space']!r}: --space {space} would "
                "change none of them. Leave out --config, or add --draw."
            )
    values |= options
    if space is not None:
        values["space"] = space
    config = make_config(apply_overrides(values, texts))
    if draw is None:
        return config
    drawn = draw_hparams(
        config.spec(),
        config.optimizer.name,
        config.space or DEFAULT_SPACE,
        draw,
        config.trial_seed,
        config.algorithm.name,
        pretrained=_finetunes(config.space or DEFAULT_SPACE, config.spec(), config.weights),
    )
    axes = ("optimizer", "algorithm")
    for axis in axes:
        drawn[axis] = {**getattr(config, axis).options, **drawn[axis]}
    # The texts once more, because they come last; but not one that is a whole axis: it was drawn.
    later = [text for text in texts if text.partition("=")[0].strip() not in axes]
    drawn["draw"] = draw
    return make_config(apply_overrides({**values, **drawn}, later))


def _finetunes(space: str, dataset: DatasetSpec, weights: Any) -> bool:
    """Which version of a space holds: ours goes by the weights, the others by the dataset."""
    return weights != "none" if space == DEFAULT_SPACE else dataset.pretrained


def _names(given: Any, name: str) -> bool:
    """Whether what was given for an axis is this name and nothing else."""
    return isinstance(given, str) and given.lower() == name.lower()


def read_config(path: Path) -> RunConfig:
    """Read a `config.json`; the dataset of a complete one need not be there any more."""
    try:
        values = parse(read(path))
    except ValueError as error:  # not JSON, or no text at all
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        hint = (
            ": of a list of chosen configs, take one's 'config'" if isinstance(values, list) else ""
        )
        raise UserError(f"{path} holds no config: expected an object with keys{hint}")
    try:
        _refuse_newer(values.get("version", VERSION))
        with suppress(ValidationError):
            return RunConfig(**values)
        return make_config(values)  # fills in what is missing, or says what is wrong
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
