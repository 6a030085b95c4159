"""The options of every launcher on the command line, plugins' included."""

from __future__ import annotations

from collections.abc import Container, Iterator
from inspect import Parameter, Signature
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from steppe.errors import UserError
from steppe.options import Option


class RunCommand(TyperCommand):
    """A command that hands its launcher's options to the function in ``context.obj``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if named := list(_plugins(args)):
            from steppe.domains import import_plugins

            import_plugins(named)
        launchers_own = _parameters(taken={parameter.name for parameter in self.params})
        own, self.params = self.params, [*self.params, *launchers_own]
        try:
            rest = super().parse_args(ctx, args)
        finally:
            self.params = own
        values = {parameter.name: ctx.params.pop(parameter.name) for parameter in launchers_own}
        ctx.obj = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if value not in (None, [], ())  # if it was given
        }
        return rest


def _plugins(args: list[str]) -> Iterator[str]:
    """What is said with --plugin: it decides which options there are."""
    for word, following in pairwise([*args, ""]):
        if word == "--plugin":
            yield following
        elif word.startswith("--plugin="):
            yield word.partition("=")[2]


def _parameters(taken: Container[str]) -> list[Any]:
    """A parameter for every option, as typer makes them from a signature."""
    from steppe.sweeps import launchers

    options: dict[str, tuple[str, Option]] = {}
    for spec in launchers.entries():
        for name, option in spec.options.items():
            if name in taken:
                raise UserError(
                    f"launcher {spec.name!r} cannot have the option {name!r}: 'sweep run' has one "
                    "of that name"
                )
            options.setdefault(name, (spec.name, option))

    def command(**_: Any) -> None: ...

    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_type(name, *option))
            for name, option in options.items()
        ]
    )
    app = typer.Typer(add_completion=False)
    app.command()(command)
    made: Any = typer.main.get_command(app)
    return list(made.params)


def _type(name: str, launcher: str, option: Option) -> Any:
    flag = "--" + name.replace("_", "-")
    told = typer.Option(flag, help=f"{launcher}: {option.meaning}")
    match option.default:
        case bool():
            return Annotated[bool | None, told]
        case tuple():
            return Annotated[list[str] | None, told]
        case int() | float():
            return Annotated[type(option.default) | None, told]
    return Annotated[str | None, told]
