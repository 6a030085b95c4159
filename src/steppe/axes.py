"""The entries of an axis, such as algorithms or optimizers: one file each.

A file registers its class with a decorator, such as ``@register_algorithm("IRM", citation=...)``.
Importing the file needs torch, which commands that only list names or read records should not wait
for. So steppe parses its own files instead, and declarations may only use distributions and
constants from modules that do not import torch. Plugin classes are registered on import.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from steppe.errors import UserError, unknown
from steppe.options import Option, declared_options, evaluate, further_options
from steppe.registry import Registry


@dataclass(frozen=True, kw_only=True)
class AxisSpec:
    """The facts that every entry has.

    Attributes:
        name: what users type.
        target: the class, or ``module:class``, imported when needed.
        citation: its paper.
        summary: the first line of the class's docstring.
        options: the options that its constructor declares.
        further: other plain constructor arguments; a config contains them only if they are set.
    """

    kind: ClassVar[str] = ""

    name: str
    target: str | type
    citation: str = ""
    summary: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    further: Mapping[str, Option] = field(default_factory=dict)

    @classmethod
    def of(cls, target: type, name: str, **facts: Any) -> Self:
        summary = (inspect.getdoc(target) or "").partition("\n")[0]
        options = {"options": declared_options(target), "further": further_options(target)}
        return cls(**{"name": name, "target": target, "summary": summary, **options, **facts})

    @property
    def cls(self) -> Any:
        if isinstance(self.target, type):
            return self.target
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)

    @property
    def default_options(self) -> dict[str, Any]:
        return {name: option.default for name, option in self.options.items()}

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise an error for unknown options and invalid values."""
        for key, value in given.items():
            if not self.options:
                raise UserError(f"{self.kind} {self.name!r} has no options: remove {key!r}")
            if key not in self.options:
                raise UserError(
                    unknown(f"option for {self.kind} {self.name!r}:", key, self.options)
                )
            self.options[key].check(f"{self.kind} {self.name!r}: {key}", value)


S = TypeVar("S", bound=AxisSpec)
C = TypeVar("C", bound=type)


def registrar(registry: Registry[S], spec: type[S], name: str, **facts: Any) -> Callable[[C], C]:
    """A decorator that registers a plugin's class; `declared` finds steppe's own."""

    def decorate(cls: C) -> C:
        # A module of steppe that is still being imported does not have this class yet. If it has
        # it, the user is registering the class again, under another name.
        own = cls.__module__.startswith("steppe.")
        if not own or getattr(sys.modules[cls.__module__], cls.__name__, None) is cls:
            registry.add(spec.of(cls, name, **facts))
        return cls

    return decorate


def declared(spec: type[S], package: str, decorator: str, first: Iterable[str] = ()) -> Iterator[S]:
    """The entries that a package's files declare: those in `first`, then the others by name.

    Args:
        spec: the type of the entries.
        package: the package.
        decorator: the decorator of their classes, called with a name and the entry's facts.
        first: names that come first, in this order.
    """
    classes: _Classes = {}
    for path in sorted(Path(inspect.getfile(importlib.import_module(package))).parent.glob("*.py")):
        tree = ast.parse(path.read_bytes())
        names = _Names(package, path.stem, tree)
        classes |= {
            node.name: (node, names) for node in tree.body if isinstance(node, ast.ClassDef)
        }
    found = {}
    stubs: dict[str, type] = {}
    for node, names in classes.values():
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == decorator:
                (name,) = (evaluate(value, names) for value in call.args)
                facts = {key.arg or "": evaluate(key.value, names) for key in call.keywords}
                entry = spec.of(_stub(node.name, classes, stubs), name, **facts)
                found[name] = replace(entry, target=f"{names['__name__']}:{node.name}")
    order = [name for name in first if name in found]
    yield from (found[name] for name in [*order, *sorted(found.keys() - set(order))])


def _stub(name: str, classes: _Classes, made: dict[str, type]) -> type:
    """A class with the docstring and constructor signature of one that is not imported."""
    if name in made:  # one class, so that parents who share it have a common order
        return made[name]
    node, names = classes[name]
    members: dict[str, Any] = {"__doc__": ast.get_docstring(node)}
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            method.body = [ast.Pass()]
            _run(method, names)
            members["__init__"] = names.pop("__init__")
    known = (base for base in map(ast.unparse, node.bases) if base in classes)
    made[name] = type(name, tuple(_stub(base, classes, made) for base in known), members)
    return made[name]


class _Names(dict[str, Any]):
    """The globals of a module that is not imported, each evaluated on first use."""

    def __init__(self, package: str, stem: str, tree: ast.Module) -> None:
        super().__init__(__name__=f"{package}.{stem}", __package__=package)
        self._makers: dict[str, ast.stmt] = {}
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._makers |= {alias.asname or alias.name: node for alias in node.names}
            elif isinstance(node, ast.Assign):
                self._makers |= {ast.unparse(target): node for target in node.targets}

    def __missing__(self, name: str) -> Any:
        _run(self._makers[name], self)  # KeyError for a builtin
        return self[name]


_Classes = dict[str, tuple[ast.ClassDef, _Names]]


def _run(node: ast.stmt, names: _Names) -> None:
    """Execute a statement; annotations stay strings, because they may need torch."""
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), "<file>", "exec"), names)
