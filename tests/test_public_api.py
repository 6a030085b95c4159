"""The public names and their signatures, against a stored listing: a change is deliberate.

To renew the listing, run ``python tests/test_public_api.py > tests/public_api.txt`` and look at the
difference: what is removed or renamed there breaks someone's program.
"""

import dataclasses
import difflib
import enum
import functools
import importlib
import inspect
import pkgutil
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import steppe

LISTING = Path(__file__).with_name("public_api.txt")
RENEW = "python tests/test_public_api.py > tests/public_api.txt"
INTERNAL = {"cli"}
"""Packages for `steppe` commands only."""
SPECIAL = {
    "__call__",
    "__contains__",
    "__enter__",
    "__exit__",
    "__getitem__",
    "__iter__",
    "__len__",
    "__matmul__",
}
"""Methods that a program calls by other means than their name."""


def public_modules() -> list[str]:
    """Everything with names for other programs; frameworks each have a module of their own."""
    parts = pkgutil.iter_modules(steppe.__path__)
    names = [f"steppe.{part.name}" for part in parts if part.ispkg and part.name not in INTERNAL]
    names.append("steppe.errors")
    if "steppe.integrations" in names:
        path = importlib.import_module("steppe.integrations").__path__
        inside = pkgutil.iter_modules(path, "steppe.integrations.")
        names += [found.name for found in inside if "._" not in found.name]
    return sorted(names)


def public_names(module: types.ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    # Of the errors, the exceptions: what makes their messages is for steppe alone.
    kind = inspect.isclass if module.__name__ == "steppe.errors" else callable
    return [
        name
        for name, value in inspect.getmembers(module, kind)
        if value.__module__ == module.__name__ and not name.startswith("_")
    ]


def listing(modules: list[str]) -> list[str]:
    lines = [f"import steppe; steppe.{name}" for name in sorted(steppe._SUBPACKAGES)]
    public = {}
    for module in map(importlib.import_module, modules):
        public |= {
            f"{module.__name__}.{name}": getattr(module, name) for name in public_names(module)
        }
    classes = frozenset(value for value in public.values() if inspect.isclass(value))
    for path, value in public.items():
        lines += describe(path, value, classes)
    return lines


def describe(path: str, value: object, public: frozenset[type] = frozenset()) -> Iterator[str]:
    """The lines for one public name; what a class has from a public one is said there."""
    if inspect.isclass(value):
        yield from describe_class(path, value, public)
    elif inspect.isroutine(value):
        yield path + signature(value)
    else:  # a constant or an alias of types: its own repr belongs to the Python version
        yield f"{path} = ..."


def describe_class(path: str, cls: type, public: frozenset[type]) -> Iterator[str]:
    ours = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "steppe"]
    above = {base for parent in ours[1:] if parent in public for base in parent.__mro__}
    own = [base for base in ours if base not in above]
    bases = [base.__name__ for base in cls.__bases__ if base is not object]
    heading = f"class {path}" + (f"[{', '.join(bases)}]" if bases else "")
    is_model = hasattr(cls, "model_fields")
    constructors = [base for base in ours if {"__init__", "__new__"} & set(vars(base))]
    made_by_python = is_model or issubclass(cls, enum.Enum) or is_protocol(cls)
    yield heading + (signature(cls) if constructors and not made_by_python else "")
    if issubclass(cls, enum.Enum):
        yield from (f"{path}.{member.name} = {member.value!r}" for member in cls)
    if not dataclasses.is_dataclass(cls) or is_model:  # the constructor has a dataclass's fields
        yield from fields(path, cls, own)
    names = {name for base in own for name in vars(base)}
    if dataclasses.is_dataclass(cls):  # where a function as a default looks like a method
        names -= {field.name for field in dataclasses.fields(cls)}
    for name in sorted(names):
        if name.startswith("_") and name not in SPECIAL:
            continue
        member = inspect.getattr_static(cls, name)
        if isinstance(member, property | functools.cached_property):
            getter = member.fget if isinstance(member, property) else member.func
            returns = inspect.signature(getter).return_annotation
            yield f"{path}.{name}: {annotation(returns)}"
        elif isinstance(member, classmethod | staticmethod) or inspect.isroutine(member):
            yield f"{path}.{name}{signature(getattr(cls, name))}"


def fields(path: str, cls: type, own: list[type]) -> Iterator[str]:
    known = getattr(cls, "model_fields", {})
    if issubclass(cls, tuple):  # a named tuple's constructor has its fields
        return
    for base in reversed(own):
        for name, kind in inspect.get_annotations(base).items():
            if name.startswith("_") or name == "model_config":
                continue
            default = ""
            if name in known and not known[name].is_required():
                default = f" = {plain(known[name].get_default(call_default_factory=True))}"
            yield f"{path}.{name}: {annotation(kind)}{default}"


def is_protocol(cls: type) -> bool:
    return bool(getattr(cls, "_is_protocol", False))


def signature(value: Any) -> str:
    """A signature as it was written, whichever Python reads it."""
    found = inspect.signature(value)
    parts, kinds = [], [parameter.kind for parameter in found.parameters.values()]
    named = False
    for number, parameter in enumerate(found.parameters.values()):
        if parameter.name.startswith("_"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            named = True
            if parameter.VAR_POSITIONAL not in kinds:
                parts.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        text = stars.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {plain(parameter.default)}"
        parts.append(text)
        positional = parameter.kind is parameter.POSITIONAL_ONLY
        if positional and kinds[number + 1 : number + 2] != [parameter.kind]:
            parts.append("/")
    if inspect.isclass(value) or found.return_annotation is found.empty:
        return f"({', '.join(parts)})"
    return f"({', '.join(parts)}) -> {annotation(found.return_annotation)}"


def annotation(kind: object) -> str:
    """An annotation's own words; an evaluated one would read differently in every Python."""
    if isinstance(kind, typing.ForwardRef):  # what a named tuple makes of words
        kind = kind.__forward_arg__
    if isinstance(kind, str):
        return " ".join(kind.split())
    if kind is None:
        return "None"
    if isinstance(kind, type) and not typing.get_args(kind):
        return kind.__qualname__
    raise AssertionError(f"{kind!r}: its module needs 'from __future__ import annotations'")


def plain(value: object) -> str:
    """A default, without addresses in memory."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return value.__qualname__
    if isinstance(value, enum.Enum):
        return str(f"{type(value).__name__}.{value.name}")
    text = repr(value)
    return f"<{type(value).__name__}>" if " at 0x" in text or " object" in text else text


def importable(modules: list[str]) -> tuple[list[str], list[str]]:
    """Those modules that can be imported, and those that need a package that is not here."""
    here, absent = [], []
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "steppe":
                raise
            absent.append(name)
        else:
            here.append(name)
    return here, absent


def test_the_public_names_and_signatures_are_the_listed_ones():
    here, absent = importable(public_modules())
    stored = LISTING.read_text(encoding="utf-8").splitlines()
    away = tuple(f"{prefix}{name}." for name in absent for prefix in ("", "class "))
    expected = [line for line in stored if not line.startswith(away)]
    difference = list(difflib.unified_diff(expected, listing(here), "listed", "found", "", "", 0))
    assert not difference, (
        "the public API has changed. If that is meant, tell its users in CHANGELOG.md and renew "
        f"the listing with\n\n    {RENEW}\n\n" + "\n".join(difference)
    )


@pytest.mark.parametrize("module", public_modules())
def test_public_modules_say_what_is_public(module):
    here, _ = importable([module])
    if not here:
        pytest.skip(f"{module} needs a package that is not installed")
    found = importlib.import_module(module)
    names = public_names(found)
    one_by_one = module.startswith(("steppe.errors", "steppe.integrations"))
    assert one_by_one or sorted(set(found.__all__)) == names
    for name in names:
        value = getattr(found, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"{module}.{name} has no docstring"


def test_the_listing_shows_what_a_change_breaks():
    """A stand-in for a public name in each of its guises, and what is said of it."""

    class Way(enum.Enum):
        UP = "up"

    @dataclasses.dataclass(frozen=True)
    class Record:
        size: "int"
        names: "tuple[str, ...]" = ()

        @property
        def half(self) -> "float":
            return self.size / 2

        def grow(self, by: "int" = 1, /, *, way: "Way" = Way.UP) -> "Record":
            return dataclasses.replace(self, size=self.size + by)

        def _hidden(self) -> "None": ...

    nothing = object()

    def function(
        first: "int", *rest: "str", key: "object" = len, other: "object" = nothing, **more: "int"
    ) -> "list[int]":
        return [first]

    for cls in (Way, Record):
        cls.__module__ = "steppe.stand_in"
    assert list(describe("s.Way", Way)) == ["class s.Way[Enum]", "s.Way.UP = 'up'"]
    assert list(describe("s.Record", Record)) == [
        "class s.Record(size: int, names: tuple[str, ...] = ())",
        "s.Record.grow(self, by: int = 1, /, *, way: Way = Way.UP) -> Record",
        "s.Record.half: float",
    ]
    assert list(describe("s.function", function)) == [
        "s.function(first: int, *rest: str, key: object = len, other: object = <object>, "
        "**more: int) -> list[int]"
    ]
    assert list(describe("s.LIMIT", 3)) == ["s.LIMIT = ..."]
    with pytest.raises(AssertionError, match="from __future__ import annotations"):
        annotation(list[int])


if __name__ == "__main__":
    found, unknown = importable(public_modules())
    if unknown:
        sys.exit(f"install what these need first: {', '.join(unknown)}")
    print("\n".join(listing(found)))
