"""Packages that import what they offer when it is first asked for."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

PACKAGES = ["steppe.curvature", "steppe.measure", "steppe.training"]


def test_importing_them_imports_no_torch() -> None:
    light = [*PACKAGES, "steppe.curvature.results", "steppe.measure.stored"]
    light += [f"steppe.training.{name}" for name in ("interrupts", "loggers", "which")]
    code = f"import sys, {', '.join(light)}; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize("name", PACKAGES)
def test_what_they_say_they_import_is_what_they_offer(name: str) -> None:
    package = import_module(name)
    assert set(package.__all__) <= set(dir(package))
    source = ast.parse(Path(str(package.__file__)).read_text())
    (checked,) = (node for node in source.body if isinstance(node, ast.If))
    declared = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(declared) == set(package.__all__) - {"Interrupted", "RunError"}
    for offered, module in declared.items():
        found = getattr(import_module(f"{name}.{module}"), offered)
        assert getattr(package, offered) is found
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = package.nothing


def test_a_name_is_found_whatever_was_imported_before() -> None:
    """None is that of a submodule, which would take its place."""
    for name in PACKAGES:
        package = import_module(name)
        folder = Path(str(package.__file__)).parent
        assert not {path.stem for path in folder.glob("*.py")} & set(package.__all__)
