"""Packages that import what they offer when it is first asked for, and commands without torch."""

import subprocess
import sys
import tarfile
from importlib import import_module
from pathlib import Path

import pytest

import steppe

SOURCE = Path(str(steppe.__file__)).parent
LAZY = sorted(
    f"steppe.{path.parent.name}"
    for path in SOURCE.glob("*/__init__.py")
    if "attach(__name__)" in path.read_text()
)


@pytest.mark.parametrize("name", LAZY)
def test_every_name_is_found_whatever_was_imported_before(name: str) -> None:
    package = import_module(name)
    folder = Path(str(package.__file__)).parent
    assert package.__all__
    assert set(package.__all__) <= set(dir(package))
    # A submodule of the same name would take its place once it is imported.
    assert not {path.stem for path in folder.glob("*.py")} & set(package.__all__)
    for offered in package.__all__:
        getattr(package, offered)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = package.nothing


def test_what_only_reads_or_plans_needs_no_torch(tmp_path: Path) -> None:
    """Importing it takes longer than all that these commands do."""
    with tarfile.open(Path(__file__).parent / "older/second.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    runs = list((tmp_path / "second/sweep").glob("runs/*"))
    commands = [
        ["sweep", "status", "second/sweep"],
        ["sweep", "plan", "planned", "--datasets", "PACS", "--trials", "1", "--no-estimate"],
        ["report", "second/sweep", "--format", "html", "--out", "page.html"],
        ["compare", *sorted(str(path) for path in runs[:2])],
        ["train", "--help"],
        ["data", "list"],
        ["list", "optimizers", "fad"],
        *(["list", kind] for kind in ("algorithms", "averaging", "datasets", "backbones")),
        ["list", "experiments"],
    ]
    code = f"""
import sys, {", ".join(LAZY)}
from typer.testing import CliRunner
from steppe.cli import app
for words in {commands}:
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert "<html" in (tmp_path / "page.html").read_text()
