"""Packages whose names are imported when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: dict[str, Any], where: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package (PEP 562), whose `__dir__` it sets too.

    The package imports the same names under ``if TYPE_CHECKING:``, for whoever reads it without
    running it. A name must not be that of a submodule: importing the submodule would hide it.

    Args:
        package: its `globals()`.
        where: for each module of the package, the names that come from it, with spaces between.
    """
    modules = {name: module for module, names in where.items() for name in names.split()}
    package["__dir__"] = lambda: sorted({*package, *modules})

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        module = import_module(f".{modules[name]}", package["__name__"])
        package[name] = getattr(module, name)
        return package[name]

    return get
