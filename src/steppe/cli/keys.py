"""Options of commands that are keys of a run's config: `RunConfig` says what they are."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic.fields import FieldInfo

from steppe.algorithms import algorithm_names
from steppe.averaging import averaging_names
from steppe.optim import optimizer_names
from steppe.training.config import MACHINE, RUN, Named, RunConfig

AXES: Mapping[str, Callable[[], Iterable[str]]] = {
    "algorithm": algorithm_names,
    "optimizer": optimizer_names,
    "averaging": averaging_names,
}
_PANELS = {str(RUN): "Which run", str(MACHINE): "How it is carried out"}
_FOLDERS = ("root",)
_SAID: Mapping[str, str | bool] = {
    "dataset": False,
    "targets": False,
    "optimizer": "adam",
    "space": "fair",
    "root": "$STEPPE_DATA or ./data",
    "workers": "chosen from the machine",
}
"""Defaults that are not the field's own."""


def option(key: str) -> inspect.Parameter:
    """A key of the config as an option; None where it is not given."""
    field = RunConfig.model_fields[key]
    several = field.annotation == tuple[str, ...]
    flag = f"--{key.removesuffix('s') if several else key}".replace("_", "-")
    names = f": {', '.join(AXES[key]())}" if key in AXES else ""
    info = typer.Option(
        f"{flag}/--no-{flag[2:]}" if field.annotation is bool else flag,
        help=f"{field.description}{names}.",
        show_default=_default(key, field),
        rich_help_panel=_PANELS.get(str(field.json_schema_extra), "Training"),
        metavar="DIR" if key in _FOLDERS else None,
    )
    kind: Any = list[str] if several else Path if key in _FOLDERS else _read_as(field.annotation)
    return inspect.Parameter(
        key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _read_as(annotation: Any) -> type:
    """What the command line makes of a value; the config refuses what it cannot be."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in (bool, int, float) if kind in kinds), str)


def _default(key: str, field: FieldInfo) -> str | bool:
    if key in _SAID:
        return _SAID[key]
    if field.is_required():
        return "the dataset's"
    value = field.default.name if isinstance(field.default, Named) else field.default
    return False if value in (None, ()) else json.dumps(value).strip('"')


def with_keys(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for each key; those that were given arrive in `given`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**values: Any) -> None:
            given = {key: values.pop(key) for key in keys}
            given = {key: value for key, value in given.items() if value not in (None, [])}
            command(
                **values, given={k: str(v) if isinstance(v, Path) else v for k, v in given.items()}
            )

        signature = inspect.signature(command, eval_str=True)
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values()]
        parameters = [p for p in own if p.name != "given"] + [option(key) for key in keys]
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        return called

    return decorate
