"""The package as it is installed: imports, command line, and the machinery of the tests."""

import shutil
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


def run(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *args]
    limit = seconds(600)
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=cwd)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return run("-c", textwrap.dedent(code))


def modules_after(statement: str) -> set[str]:
    result = python(f"import sys; {statement}; print(*sys.modules)")
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in result.stdout.split()}


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
    assert python("import steppe; print(steppe.optim.__name__)").stdout == "steppe.optim\n"
    with pytest.raises(AttributeError, match="no attribute 'optimm'"):
        _ = steppe.optimm


@pytest.mark.parametrize("part", ["optim", "curvature"])
def test_the_library_brings_only_torch(part):
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
    brought = modules_after(f"import steppe.{part}") - modules_after("import torch")
    assert "steppe" in brought
    assert not brought & heavy


@pytest.mark.parametrize(
    "command", [["-m", "steppe"], ["-c", "from steppe.cli import main; main()"]]
)
def test_version_option(command):
    result = run(*command, "--version")
    assert (result.returncode, result.stdout) == (0, f"steppe {steppe.__version__}\n")


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_the_command_says_what_to_install(package):
    result = python(
        f"import sys; sys.modules[{package!r}] = None; from steppe.cli import main; main()"
    )
    assert result.returncode == 1
    assert result.stderr == (f"steppe: this command needs {package}: pip install 'steppe[dg]'\n")


RAISING_COMMAND = """
    import sys
    from steppe import cli
    from steppe.errors import UserError

    @cli.app.command()
    def fail():
        {statement}

    sys.argv = ["steppe", "fail"]
    cli.main()
"""


@pytest.mark.parametrize(
    ("statement", "code", "stderr"),
    [
        ("raise UserError('no such\\n  dataset')", 2, "steppe: no such\n  dataset\n"),
        ("open('missing.toml')", 2, "steppe: missing.toml: No such file or directory\n"),
        (
            "import sklearn_not_here",
            1,
            "steppe: this command needs sklearn_not_here: pip install 'steppe[dg]'\n",
        ),
        (
            "sys.modules['ray'] = None; import ray",
            1,
            "steppe: this command needs ray: pip install 'steppe[ray]'\n",
        ),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_failures_are_one_line_and_an_exit_code(statement, code, stderr):
    result = python(RAISING_COMMAND.format(statement=statement))
    assert (result.returncode, result.stderr.lstrip("\n")) == (code, stderr)


@pytest.mark.parametrize("statement", ["raise ValueError('a bug')", "import steppe.not_here"])
def test_a_bug_keeps_its_traceback(statement):
    result = python(RAISING_COMMAND.format(statement=statement))
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_unknown_option_is_refused():
    result = run("-m", "steppe", "--nonsense")
    assert result.returncode == 2
    assert "No such option" in result.stderr


DOCSTRING = '''
"""A module.

Example:
    >>> 1 + 1
    {answer}
"""
'''
MARKDOWN = """
```python
x = 2
```

Later examples know the names of earlier ones.

```python
assert x == {answer}
```
"""


EXAMPLES = {
    "README.md": MARKDOWN,
    "docs/index.md": MARKDOWN,
    "docs/guide/part/page.md": MARKDOWN,
    "src/steppe/module.py": DOCSTRING,
    "src/steppe/sub/module.py": DOCSTRING,
}


@pytest.mark.parametrize(
    ("answer", "outcome", "code"), [(2, "8 passed", 0), (7, "5 failed, 3 passed", 1)]
)
def test_examples_are_run(tmp_path, monkeypatch, answer, outcome, code):
    """The root conftest.py, in a project of its own whose examples are right or broken."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    for path, template in EXAMPLES.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(template.format(answer=answer))
    for package in ("src/steppe", "src/steppe/sub"):
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))

    result = run("-m", "pytest", "-p", "no:cacheprovider", "-n2", "--dist=loadfile", cwd=tmp_path)

    assert outcome in result.stdout, result.stdout
    assert result.returncode == code


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
