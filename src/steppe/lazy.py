"""Packages that import their names on first use, so that reading records does not import torch."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a lazy package's ``__getattr__``, ``__dir__`` and ``__all__``.

    Its names are those that its file imports under ``if TYPE_CHECKING:``, where type checkers and
    readers find them. No name may equal a submodule's, because importing the submodule would
    replace it.

    Examples:
        >>> import sys
        >>> get, _, names = attach("steppe.averaging")
        >>> "SWAD" in names, get("SWAD").__name__
        (True, 'SWAD')
    """
    source = sys.modules[package].__file__
    assert source is not None
    blocks = (
        node for node in ast.parse(Path(source).read_bytes()).body if isinstance(node, ast.If)
    )
    modules = {
        alias.name: f"{package}.{node.module}" if node.level else f"{node.module}"
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *modules}), sorted(modules)
