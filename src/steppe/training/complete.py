"""Complete a config from command-line options, a file, a resumed run, and defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steppe.algorithms import algorithm_spec
from steppe.averaging import averaging_spec
from steppe.axes import AxisSpec
from steppe.domains import DatasetSpec, dataset_spec, import_plugins
from steppe.errors import LONGEST, UserError, shown, unknown
from steppe.optim import OptimizerSpec, optimizer_spec
from steppe.search import DEFAULT_SPACE, get_space
from steppe.strangers import parse

from .config import AXES, Named, RunConfig, read_config, refuse_foreign
from .draws import draw_hparams
from .loggers import check_loggers
from .recipes import recipes
from .zoo import fixed_size

_DEFAULTS = {"algorithm": "ERM", "optimizer": "adam", "averaging": "none"}
"""As in DomainBed."""

_DATASETS = ("steps", "checkpoint_every", "batch_size", "backbone", "image_size", "augment")
"""Keys whose defaults come from the dataset."""

_NEEDED = {
    "dataset": "--dataset NAME ('steppe data list' shows them)",
    "targets": "--target DOMAIN, the domain to hold out",
}


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """Make a complete config from some of its keys.

    Missing keys take the defaults of the dataset (steps, batch size, backbone, ...) and of the
    optimizer (its hyperparameters). An unknown key is an error that suggests the closest known one.

    Examples:
        >>> config = make_config({"dataset": "PACS", "targets": "sketch", "optimizer": "fad"})
        >>> config.steps, config.backbone, config.optimizer.options["rho"]
        (5001, 'resnet50', 0.05)
        >>> make_config({"dataset": "PACS", "targets": "sketch", "stepz": 3})
        Traceback (most recent call last):
        ...
        steppe.errors.UserError: unknown config key 'stepz', did you mean 'steps'? ...
    """
    return _complete(values, {})


def _complete(values: Mapping[str, Any], drawn: Mapping[str, Any]) -> RunConfig:
    """`make_config`, for values of which some options of the optimizer were drawn."""
    given = dict(values)
    if not drawn:  # others were checked when the config without a draw was made
        refuse_foreign(given)
    for key in given:
        if key not in RunConfig.model_fields:
            raise UserError(_unknown_key(key, given))
    if given.get("merged_from"):
        raise UserError(
            "config: merged_from: a merged run cannot be trained or resumed. Start from its "
            "weights (--weights RUN), or use the config of a run that it was merged from."
        )
    import_plugins(_texts(given.get("plugins")))
    check_loggers(_texts(given.get("loggers")))
    if isinstance(given.get("root"), str | os.PathLike):
        given["root"] = str(Path(given["root"]).resolve())
    for key, advice in _NEEDED.items():
        if given.get(key) in (None, "", (), []):  # 0 is a domain's name
            raise UserError(f"config has no {key!r}: pass {advice}")
    spec = dataset_spec(str(given["dataset"]))
    given["dataset"] = spec.name
    for key in ("targets", "sources"):
        if isinstance(value := given.get(key), str | list | tuple):
            given[key] = _domains([value] if isinstance(value, str) else value, spec)
    if isinstance(given.get("recipe"), str):
        recipe = recipes[given["recipe"]]
        given = {**recipe.apply(given, spec.pretrained), "recipe": recipe.name}
    weights = given.setdefault("weights", "imagenet" if spec.pretrained else "none")
    if isinstance(weights, str | os.PathLike) and weights not in ("imagenet", "none"):
        given["weights"] = str(Path(weights).resolve())
    _complete_embedding(given)
    given.setdefault("space", DEFAULT_SPACE)  # None in older runs, which store all their options
    space = given["space"] or DEFAULT_SPACE
    get_space(space if isinstance(space, str) else shown(space))
    defaults = {"freeze_bn": weights != "none", **{key: getattr(spec, key) for key in _DATASETS}}
    if "image_size" not in given and isinstance(backbone := given.get("backbone"), str):
        defaults["image_size"] = fixed_size(backbone) or defaults["image_size"]
    name, options = _split_name(given.get("algorithm", {}), "algorithm")
    algorithm = algorithm_spec(name)
    given["algorithm"] = _completed(algorithm, options, algorithm.default_options)
    name, options = _split_name(given.get("averaging", {}), "averaging")
    average = averaging_spec(name)
    own = {"every": spec.validate_every, "tolerance": spec.validation_tolerance}
    known = {key: own.get(key, default) for key, default in average.default_options.items()}
    given["averaging"] = _completed(average, options, known)
    if given.get("second_stage") is True and average.cls.follows_loss:
        raise UserError(
            f"averaging {average.name!r} needs the validation loss, which a second stage does not "
            "have: choose sma, or leave out second_stage"
        )
    given["optimizer"] = _complete_optimizer(
        given.get("optimizer", {}), space, _finetunes(space, spec, weights), drawn
    )
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
    if algorithm.keeps_classifier:
        _refuse_classifier_training(config)
    algorithm.check_batch(config.batch_size // config.accumulate)
    sources = config.sources or [name for name in spec.domains if name not in config.targets]
    if sources:  # opening the data reports that none is left
        algorithm.check_domains(len(sources))
    if config.augment and spec.channels != 3:
        raise UserError(
            f"augment=true needs images with 3 channels; {spec.name} has {spec.channels}"
        )
    return config


def _refuse_classifier_training(config: RunConfig) -> None:
    for key, idle in (("linear_steps", 0), ("linear_probe", False)):
        if (value := getattr(config, key)) != idle:
            raise UserError(
                f"{key}={shown(value)} would train the classifier, which algorithm "
                f"{config.algorithm.name!r} keeps fixed: leave out {key}, or pass --set "
                f"{key}={json.dumps(idle)} if a recipe sets it"
            )


def _complete_embedding(given: dict[str, Any]) -> None:
    """Make the file of class embeddings absolute, and note its number of dimensions."""
    file = given.get("class_embeddings", "none")
    if file == "none" or not isinstance(file, str | os.PathLike):
        return
    given["class_embeddings"] = str(Path(file).resolve())
    if given.get("embedding") is None:
        from .embeddings import embedding_size

        given["embedding"] = embedding_size(Path(file))


def _domains(names: Iterable[Any], spec: DatasetSpec) -> tuple[Any, ...]:
    """Split domain names that are joined by commas, or by "+" as in a sweep.

    Examples:
        >>> _domains(["sketch,photo", "cartoon"], dataset_spec("PACS"))
        ('sketch', 'photo', 'cartoon')
    """
    found: list[Any] = []
    for name in names:
        text = isinstance(name, str) and name not in spec.domains
        mark = next((mark for mark in ",+" if text and mark in name), None)
        parts = [part.strip() for part in name.split(mark)] if mark else [name]
        found += _domains(filter(None, parts), spec) if mark else parts
    return tuple(found)


def _unknown_key(key: str, given: Mapping[str, Any]) -> str:
    """Message for an unknown key, with the closest key or the axis that has such an option."""
    known = list(RunConfig.model_fields)
    for axis, registry in AXES.items():
        chosen = registry[_split_name(given.get(axis, {}), axis)[0]]
        known += [f"{axis}.{option}" for option in _option_names(chosen)]
    for axis, registry in AXES.items():
        having = [one.name for one in registry.entries() if key in _option_names(one)]
        if having and not any(name.endswith(f".{key}") for name in known):
            return (
                f"unknown config key {shown(key)}: {axis}.{key} is an option of "
                f"{', '.join(having)}. Choose one with --{axis}, then --set {axis}.{key}=..."
            )
    return unknown("config key", key, known)


def _option_names(spec: AxisSpec) -> Iterable[str]:
    drawn = spec.space() if isinstance(spec, OptimizerSpec) else {}
    return {**drawn, **spec.options, **spec.further}


def _texts(value: Any) -> list[str]:
    """Strings of a list, or of one comma-separated string; validation rejects anything else."""
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
    """The option after a round trip through JSON, so that storing a config never changes it."""
    kind = type(value)
    if kind in (str, bool) or (kind in (int, float) and abs(value) < 1e15):
        return value  # JSON would change nothing; a plan has a hundred thousand of these
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise UserError(
            f"config: {where}={shown(value)}: expected a finite number, a string, or a list of them"
        ) from None


def _completed(
    spec: AxisSpec, options: dict[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    spec.check(options)
    return {"name": spec.name, **defaults, **options}


def _complete_optimizer(
    value: Any, space: str, pretrained: bool, drawn: Mapping[str, Any]
) -> dict[str, Any]:
    name, options = _split_name(value, "optimizer")
    spec = optimizer_spec(name)
    chosen: dict[str, Any] = {**spec.defaults(space, pretrained), **options}
    # The values of steppe's own spaces are valid: a plan of thousands of draws builds no optimizer.
    plugin = isinstance(spec.target, type)
    if plugin or any(key not in drawn or drawn[key] != value for key, value in options.items()):
        _try_optimizer(spec, options, chosen)
    return {"name": spec.name, **chosen}


def _try_optimizer(
    spec: OptimizerSpec, options: Mapping[str, Any], chosen: Mapping[str, Any]
) -> None:
    """Build the optimizer, because only it knows which values are valid."""
    import torch

    spec.check_names(options)
    try:
        probe = torch.nn.LayerNorm(1)  # some optimizers look for such layers
        spec.build(probe.parameters(), probe, **chosen)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        given = ", ".join(f"{key}={shown(value)}" for key, value in (options or chosen).items())
        raise UserError(f"config: optimizer {spec.name!r} rejects {given}: {error}") from None


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply ``key=value`` strings to a config; a dotted key sets an option on an axis.

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
        except ValueError as error:  # valid JSON, but oversized
            raise UserError(f"--set {key}={text[:20]}...: {error}") from None
        if not dot:
            result[outer] = value
            continue
        if outer not in _DEFAULTS:
            hint, _, _ = unknown("axis", outer, _DEFAULTS).partition(" Known:")
            only = f"only {', '.join(_DEFAULTS)} take a dot"
            raise UserError(f"--set {override[:LONGEST]}: {hint.rstrip('.')} ({only})")
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
    """Make a config from command-line input; later arguments override earlier ones.

    Args:
        options: config keys and their values.
        overrides: ``key=value`` strings.
        file: a config to start from.
        resumed: the config of the run to resume.
        draw: hyperparameter sample, DomainBed's `hparams_seed` (default: draw nothing).
        space: search space of defaults and draws (default: `fair`, the tuned values).
    """
    values: dict[str, Any] = {}
    texts = list(overrides)
    if resumed is not None:
        values = resumed.model_dump()
        # Repeating the name alone keeps the options that the run started with.
        kept = {f"{axis}={values[axis]['name']}".lower() for axis in _DEFAULTS}
        options = {k: v for k, v in options.items() if f"{k}={v}".lower() not in kept}
        texts = [text for text in texts if text.replace(" ", "").lower() not in kept]
    elif file is not None:
        values = read_config(file).model_dump(exclude={"version", "resolved"})
        for key in ("dataset", "weights", "recipe"):
            if options.get(key, values[key]) != values[key]:
                raise UserError(
                    f"{file} is for {key}={values[key]!r}, which determines other settings in it: "
                    "edit the file, or pass options without --config"
                )
        if draw is None and space not in (None, values["space"]):
            raise UserError(
                f"{file} already has every value, from space={values['space']!r}: --space {space} "
                "would change nothing. Leave out --config, or add --draw."
            )
    values |= options
    if space is not None:
        values["space"] = space
    config = make_config(apply_overrides(values, texts))
    # Not in `make_config`: runs that are stored with an idle value can still be read and resumed.
    asked = {*options, *(text.partition("=")[0].strip() for text in texts)}
    if "linear_lr" in asked and not config.linear_steps:
        raise UserError(
            f"linear_lr={config.linear_lr:g} has no effect without linear_steps, the number of "
            "steps that train the classifier alone: pass --linear-steps N, or leave out linear_lr"
        )
    return config if draw is None else redraw(config, draw, values, texts, asked=options)


def redraw(
    config: RunConfig,
    draw: int,
    values: Mapping[str, Any],
    overrides: Sequence[str] = (),
    asked: Mapping[str, Any] | None = None,
) -> RunConfig:
    """A config with the hyperparameters of a sample.

    Args:
        config: the config without a draw.
        draw: the sample.
        values: what `config` was made from.
        overrides: ``key=value`` strings, which replace drawn values.
        asked: the values that replace drawn ones too (default: all).
    """
    drawn_from, dataset = config.space or DEFAULT_SPACE, config.spec()
    drawn = draw_hparams(
        dataset,
        config.optimizer.name,
        drawn_from,
        draw,
        config.trial_seed,
        config.algorithm.name,
        pretrained=_finetunes(drawn_from, dataset, config.weights),
    )
    axes = ("optimizer", "algorithm")
    own = drawn["optimizer"]
    for axis in axes:
        drawn[axis] = {**getattr(config, axis).options, **drawn[axis]}
    # Overrides win over drawn values, except one that names a whole axis, whose options were drawn.
    later = [text for text in overrides if text.partition("=")[0].strip() not in axes]
    drawn["draw"] = draw
    kept = {k: v for k, v in (values if asked is None else asked).items() if k not in axes}
    return _complete(apply_overrides({**values, **drawn, **kept}, later), own)


def _finetunes(space: str, dataset: DatasetSpec, weights: Any) -> bool:
    """Whether a space's fine-tuning version applies: `fair` looks at the weights, others do not."""
    return weights != "none" if space == DEFAULT_SPACE else dataset.pretrained
