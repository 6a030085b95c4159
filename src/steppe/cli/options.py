"""Options derived from declarations elsewhere: config keys, dataclass fields, launchers."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from steppe.domains import DatasetSpec
from steppe.errors import UserError
from steppe.options import arguments
from steppe.search import DEFAULT_SPACE
from steppe.training.config import AXES, MACHINE, RUN, Named, RunConfig

from .common import load_plugins

_PANELS = {str(RUN): "Run", str(MACHINE): "Execution"}
_DEFAULTS: Mapping[str, str | bool] = {
    "dataset": False,
    "targets": False,
    "sources": "all others",
    "draw": "no sampling",
    "optimizer": "adam",
    "space": DEFAULT_SPACE,
    "weights": "imagenet; none for small-image datasets",
    "freeze_bn": "true, except with --weights none",
    "root": "$STEPPE_DATA or ./data",
    "workers": "depends on the machine",
}
"""Displayed defaults of keys whose default is not the field's own."""


def names(text: str) -> tuple[str, ...]:
    """Split comma-separated names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(text: str) -> tuple[float, ...] | None:
    """Parse comma-separated numbers, distinct and positive; None if the text is empty."""
    try:
        found = tuple(float(word) for word in names(text))
        if len(set(found)) == len(found) and all(0 < n < math.inf for n in found):
            return found or None
    except ValueError:
        pass
    raise typer.BadParameter(
        f"expected distinct positive numbers separated by commas, such as 0.3,1,3; got {text}"
    )


_LISTS = {tuple[str, ...]: names, tuple[float, ...]: numbers}


def _option(name: str, kind: Any, flag: str = "", **facts: Any) -> inspect.Parameter:
    """An option with default None, whose meaning `show_default` describes."""
    default = facts.pop("show_default", False)
    if default:
        facts["help"] = f"{facts['help'].rstrip('.')} (default: {default})."
    facts["show_default"] = False
    info = typer.Option(flag or "--" + name.replace("_", "-"), **facts)
    annotation = Annotated[kind | None, info]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def keys(*wanted: str) -> list[inspect.Parameter]:
    """Options for config keys; the config itself validates their values."""
    found = []
    for key in wanted:
        field = RunConfig.model_fields[key]
        several, flag = field.annotation == tuple[str, ...], key.replace("_", "-")
        flag = f"--{flag.removesuffix('s') if several else flag}"
        flag += f"/--no-{flag[2:]}" if field.annotation is bool else ""
        kinds = (field.annotation, *get_args(field.annotation))
        kind = next((kind for kind in (bool, int, float) if kind in kinds), str)
        known = f": {', '.join(AXES[key])}" if key in AXES else ""
        folder = {"metavar": "DIR", "parser": lambda text: str(Path(text))}
        option = _option(
            key,
            list[str] if several else kind,
            flag,
            help=f"{field.description}{known}.",
            show_default=_default(_datasets(key) if field.is_required() else field.default, key),
            rich_help_panel=_PANELS.get(str(field.json_schema_extra), "Training"),
            **folder if key == "root" else {},
        )
        found.append(option)
    return found


SHORTCUTS = [
    _option(
        name,
        float,
        help=f"{meaning}; short for --set optimizer.{name}=VALUE",
        show_default="see 'steppe list optimizers NAME'",
        rich_help_panel="Training",
    )
    for name, meaning in {"lr": "Learning rate", "rho": "Perturbation radius"}.items()
]
"""The most frequent optimizer options."""


def overriding(
    given: Iterable[str], shortcuts: Mapping[str, Any], overrides: Iterable[str] | None
) -> list[str]:
    """Return `--lr` and `--rho` as settings of `--set`, followed by those of `--set` itself."""
    own = {f"optimizer.{key}": value for key, value in shortcuts.items()}
    others = list(overrides or ())
    for key in {text.partition("=")[0].strip() for text in others} & {*own, *given}:
        option = key.removeprefix("optimizer.").replace("_", "-")
        raise UserError(f"--{option} and --set {key} are the same setting: pass only one")
    return [*(f"{key}={value}" for key, value in own.items()), *others]


def _datasets(key: str) -> str:
    usual = getattr(DatasetSpec, key, None)
    plain = isinstance(usual, bool | int | str)
    return f"the dataset's, usually {_default(usual)}" if plain else "the dataset's"


def _default(value: Any, key: str = "") -> str | bool:
    if key in _DEFAULTS:
        return _DEFAULTS[key]
    value = value.name if isinstance(value, Named) else value
    return False if value in (None, ()) else json.dumps(value).strip('"')


def fields(cls: type, *wanted: str, default: str = "", **facts: Any) -> list[inspect.Parameter]:
    """Options for fields of a dataclass, with help texts from its docstring."""
    hints, meanings = get_type_hints(cls), dict(arguments(inspect.getdoc(cls) or ""))
    found = []
    for name in wanted:
        meaning = meanings.get(name, name).replace("`", "")  # python -OO drops docstrings
        own = getattr(cls, name, None)
        shown = default or (",".join(own) if isinstance(own, tuple) else _default(own))
        more: dict[str, Any] = {
            "show_default": shown,
            "help": meaning[0].upper() + meaning[1:],
            **facts,
        }
        if parser := _LISTS.get(hints[name]):
            more |= {"parser": parser, "metavar": "A,B,..."}
        found.append(_option(name, str if parser else hints[name], **more))
    return found


def with_options(
    **groups: Iterable[inspect.Parameter],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add groups of options to a command, which gets the given values of each as a dictionary."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**values: Any) -> None:
            for group, options in groups.items():
                given = {option.name: values.pop(option.name, None) for option in options}
                values[group] = {k: v for k, v in given.items() if v not in (None, [])}
            command(**values)

        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name not in groups]
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own]
        parameters += [option for options in groups.values() for option in options]
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        return called

    return decorate


class RunCommand(TyperCommand):
    """A command that adds every launcher's options and stores their values in ``context.obj``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for word, following in pairwise([*args, ""]):  # plugins may add options
            if word == "--plugin" or word.startswith("--plugin="):
                load_plugins([following if word == "--plugin" else word.partition("=")[2]])
        launchers_own = _launcher_options()
        own, self.params = self.params, [*self.params, *launchers_own]
        try:
            rest = super().parse_args(ctx, args)
        finally:
            self.params = own
        values = {parameter.name: ctx.params.pop(parameter.name) for parameter in launchers_own}
        ctx.obj = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if value not in (None, [], ())
        }
        return rest


def _launcher_options() -> list[Any]:
    from steppe.sweeps import launchers

    kinds = {bool: bool, int: int, float: float, tuple: list[str]}
    found: dict[str, inspect.Parameter] = {}
    for spec in launchers.entries():
        for name, option in spec.options.items():
            kind = kinds.get(type(option.default), str)
            told = _option(name, kind, help=f"{spec.name}: {option.meaning}")
            found.setdefault(name, told)

    app = typer.Typer(add_completion=False)  # turns a signature into options
    app.command()(with_options(given=found.values())(lambda given: None))
    made: Any = typer.main.get_command(app)
    return list(made.params)
