"""The package as it is installed: what imports bring, and what is pinned."""

import subprocess
import sys
import textwrap
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import steppe
from tests.limits import seconds

ROOT = Path(__file__).parents[1]


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds(600), cwd=ROOT)


def test_version_is_the_installed_one():
    assert metadata.version("steppe") == steppe.__version__


def test_import_steppe_is_instant_and_leaves_torch_alone():
    result = python(
        """
        import sys
        before = len(sys.modules)
        import steppe
        print(len(sys.modules) - before, "torch" in sys.modules, "numpy" in sys.modules)
        """
    )
    imported, torch_imported, numpy_imported = result.stdout.split()
    assert (torch_imported, numpy_imported) == ("False", "False")
    assert int(imported) < 50  # torch brings 1,000


def test_submodules_are_attributes():
    assert steppe.optim.__name__ == "steppe.optim"
    with pytest.raises(AttributeError, match="no attribute 'optimm'"):
        _ = steppe.optimm


def test_the_library_brings_only_torch():
    heavy = {
        "curvlinops",
        "matplotlib",
        "pydantic",
        "pytorch_optimizer",
        "rich",
        "safetensors",
        "scipy",
        "sklearn",
        "timm",
        "torchvision",
        "typer",
    }
    result = python(
        """
        import sys, torch
        before = set(sys.modules)
        import steppe.curvature, steppe.optim
        print(*set(sys.modules) - before)
        """
    )
    assert result.returncode == 0, result.stderr
    brought = {name.partition(".")[0] for name in result.stdout.split()}
    assert "steppe" in brought
    assert not brought & heavy


def test_constraints_are_plain_versions():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    for pin in pins:
        name, _, version = pin.partition("==")
        assert name.replace("-", "").replace("_", "").isalnum(), pin
        assert version.partition(";")[0].strip().replace(".", "").isalnum(), pin


def test_constraints_pin_every_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = project["dependencies"] + extras["dg"] + extras["dev"]
    names = {r.partition(">=")[0].partition("[")[0].lower().replace("_", "-") for r in required}
    pinned = {
        line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert names <= pinned
