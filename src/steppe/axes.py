"""The entries of an axis: one file each, which says everything about its method.

A file declares a class with a decorator, such as ``@register_algorithm("IRM", citation=...)``.
steppe's own files are read without being imported: they need torch, and commands that only list
names or read records do not. What a declaration uses (distributions, constants) must therefore come
from modules that do without torch. A plugin's classes are registered when they are imported.
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
    """What every entry has.

    Attributes:
        name: what users call it.
        target: the class, or ``module:class``, which is imported when it is needed.
        citation: the paper it comes from.
        summary: the first line of the class's docstring.
        options: what its constructor declares.
        further: other plain values that it takes, which a config has only where they are given.
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
        facts |= {"options": declared_options(target), "further": further_options(target)}
        return cls(name=name, target=target, summary=summary, **facts)

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
        """Refuses options that it does not have, or values that make no sense."""
        for key, value in given.items():
            if not self.options:
                raise UserError(f"{self.kind} {self.name!r} has no options: leave out {key!r}")
            if key not in self.options:
                raise UserError(
                    unknown(f"option for {self.kind} {self.name!r}:", key, self.options)
                )
            self.options[key].check(f"{self.kind} {self.name!r}: {key}", value)


S = TypeVar("S", bound=AxisSpec)
C = TypeVar("C", bound=type)


def registrar(registry: Registry[S], spec: type[S], name: str, **facts: Any) -> Callable[[C], C]:
    """A decorator that registers a class; steppe's own files are read by `declared`."""

    def decorate(cls: C) -> C:
        # While a module of steppe's is imported or reloaded, it does not have this class yet. Once
        # it has, somebody registers the class again: under another name, with other facts.
        own = cls.__module__.startswith("steppe.")
        if not own or getattr(sys.modules[cls.__module__], cls.__name__, None) is cls:
            registry.add(spec.of(cls, name, **facts))
        return cls

    return decorate


def declared(spec: type[S], package: str, decorator: str, first: Iterable[str] = ()) -> Iterator[S]:
    """The entries that the files of a package declare: those named `first`, then others by name.

    Args:
        spec: their type.
        package: whose files are read.
        decorator: what marks a class, called with its name and the facts of its entry.
        first: names that come before the others, in this order.
    """
    classes: _Classes = {}
    for path in sorted(Path(inspect.getfile(importlib.import_module(package))).parent.glob("*.py")):
        tree = ast.parse(path.read_bytes())
        names = _Names(package, path.stem, tree)
        classes |= {
            node.name: (node, names) for node in tree.body if isinstance(node, ast.ClassDef)
        }
    found = {}
    for node, names in classes.values():
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == decorator:
                (name,) = (evaluate(value, names) for value in call.args)
                facts = {key.arg or "": evaluate(key.value, names) for key in call.keywords}
                entry = spec.of(_stub(node.name, classes), name, **facts)
                found[name] = replace(entry, target=f"{names['__name__']}:{node.name}")
    order = [name for name in first if name in found]
    yield from (found[name] for name in [*order, *sorted(found.keys() - set(order))])


def _stub(name: str, classes: _Classes) -> type:
    """A class with the docstring and the constructor's signature of one that is not imported."""
    node, names = classes[name]
    members: dict[str, Any] = {"__doc__": ast.get_docstring(node)}
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            method.body = [ast.Pass()]
            _run(method, names)
            members["__init__"] = names.pop("__init__")
    known = (base for base in map(ast.unparse, node.bases) if base in classes)
    return type(name, tuple(_stub(base, classes) for base in known), members)


class _Names(dict[str, Any]):
    """The names of a module that is not imported; each is made when it is asked for."""

    def __init__(self, package: str, stem: str, tree: ast.Module) -> None:
        super().__init__(__name__=f"{package}.{stem}", __package__=package)
        self._makers: dict[str, ast.stmt] = {}
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._makers |= {alias.asname or alias.name: node for alias in node.names}
            elif isinstance(node, ast.Assign):
                self._makers |= {ast.unparse(target): node for target in node.targets}

    def __missing__(self, name: str) -> Any:
        _run(self._makers[name], self)  # a KeyError: one of Python's own names
        return self[name]


_Classes = dict[str, tuple[ast.ClassDef, _Names]]


def _run(node: ast.stmt, names: _Names) -> None:
    """Carries a statement out; as in this file, annotations stay texts: they may need torch."""
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), "<file>", "exec"), names)
