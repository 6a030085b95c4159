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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from steppe.errors import UserError, unknown
from steppe.options import Option, declared_options, evaluate, read
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
    """

    kind: ClassVar[str] = ""

    name: str
    target: str | type
    citation: str = ""
    summary: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)

    @classmethod
    def of(cls, target: type, name: str, **facts: Any) -> Self:
        """The entry of a class that was imported."""
        summary = (inspect.getdoc(target) or "").partition("\n")[0]
        return cls(
            name=name, target=target, summary=summary, options=declared_options(target), **facts
        )

    @property
    def cls(self) -> Any:
        """The class."""
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
    """A decorator that registers a class; steppe's own are read by `declared`."""

    def decorate(cls: C) -> C:
        if not cls.__module__.startswith("steppe."):
            registry.add(spec.of(cls, name, **facts))
        return cls

    return decorate


def declared(spec: type[S], package: str, decorator: str, first: Iterable[str] = ()) -> Iterator[S]:
    """The entries that the files of a package declare, by name.

    Args:
        spec: their type.
        package: whose files are read.
        decorator: what marks a class, called with its name and the facts of its entry.
        first: names that come before the others, in this order.
    """
    classes: dict[str, tuple[ast.ClassDef, _Names]] = {}
    for path in sorted(_folder(package).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        names = _Names(f"{package}.{path.stem}", tree)
        classes |= {
            node.name: (node, names) for node in tree.body if isinstance(node, ast.ClassDef)
        }
    found = {}
    for node, names in classes.values():
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == decorator:
                (name,) = (evaluate(value, names) for value in call.args)
                facts = {key.arg or "": evaluate(key.value, names) for key in call.keywords}
                found[name] = spec(
                    name=name,
                    target=f"{names.module}:{node.name}",
                    summary=(ast.get_docstring(node) or "").partition("\n")[0],
                    options=dict(_options(node.name, classes)),
                    **facts,
                )
    order = [name for name in first if name in found]
    yield from (found[name] for name in [*order, *sorted(found.keys() - set(order))])


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _options(
    name: str, classes: Mapping[str, tuple[ast.ClassDef, _Names]]
) -> Iterator[tuple[str, Option]]:
    """As `options.declared_options`, of a class that is not imported."""
    if name not in classes:
        return
    node, names = classes[name]
    functions = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    init = next((n for n in functions if n.name == "__init__"), None)
    if init is None or init.args.kwarg is not None:
        for base in node.bases:
            yield from _options(ast.unparse(base), classes)
    if init is not None:  # last: what a child declares again is the child's
        yield from read(_parameters(init, names), names, ast.get_docstring(node) or "")


def _parameters(init: ast.FunctionDef, names: _Names) -> Iterator[tuple[str, Any, Any]]:
    positional = [*init.args.posonlyargs, *init.args.args]
    pairs = [
        *zip(reversed(positional), reversed(init.args.defaults), strict=False),
        *zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True),
    ]
    defaults = {argument.arg: default for argument, default in pairs}
    for argument in (*positional, *init.args.kwonlyargs):
        annotation = ast.unparse(argument.annotation) if argument.annotation else ""
        default = defaults.get(argument.arg)
        if "Annotated" in annotation:
            assert default is not None, f"{names.module}: option {argument.arg} has no default"
            yield argument.arg, annotation, evaluate(default, names)


class _Names(dict[str, Any]):
    """The names of a module that is not imported; each is found when it is asked for."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        super().__init__()
        self.module = module
        self._imports = {
            alias.asname or alias.name: (node, alias.name)
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        self._assigned = {
            ast.unparse(target): node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
        }

    def __missing__(self, name: str) -> Any:
        if name in self._imports:
            node, original = self._imports[name]
            if isinstance(node, ast.Import):
                value: Any = importlib.import_module(original)
            else:
                source = "." * node.level + (node.module or "")
                package = self.module.rpartition(".")[0]
                value = getattr(importlib.import_module(source, package), original)
        elif name in self._assigned:
            value = evaluate(self._assigned[name], self)
        else:
            raise KeyError(name)  # one of Python's own
        self[name] = value
        return value
