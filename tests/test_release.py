"""What is released: the archives, and what they are worth where only torch is installed."""

import ast
import email
import email.message
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

import steppe
from steppe.domains import dataset_names, dataset_spec
from steppe.domains.dataset import UnreadableImage, decode
from steppe.errors import UserError
from steppe.reports import build_report, load_runs
from steppe.training import load_model, make_config, train
from steppe.training.backbones import build_network
from tests.limits import seconds

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INFO = f"steppe-{steppe.__version__}.dist-info"
NOT_RELEASED = (".ci/", ".github/")
"""Tracked files that are of use in the repository only."""
RUBBISH = re.compile(r"(^|/)(__pycache__|\.[a-z]+_cache|\.venv|site|dist|runs)/|\.(pyc|pt|pth)$")


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        command,
        cwd=cwd,
        env=kept | env,
        capture_output=True,
        text=True,
        timeout=seconds(1500),
        check=False,
    )


@dataclass(frozen=True)
class Release:
    wheel: Path
    sdist: Path

    @property
    def in_wheel(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as file:
            return {name for name in file.namelist() if not name.endswith("/")}

    @property
    def in_sdist(self) -> set[str]:
        top = f"steppe-{steppe.__version__}/"
        with tarfile.open(self.sdist) as file:
            members = [member for member in file if member.isfile()]
        assert all(member.name.startswith(top) for member in members)
        return {member.name.removeprefix(top) for member in members}

    def text(self, name: str) -> str:
        with zipfile.ZipFile(self.wheel) as file:
            return file.read(f"{INFO}/{name}").decode()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The source distribution, and the wheel made from it, as `make build` makes them."""
    out = tmp_path_factory.mktemp("dist")
    # Without hatchling here, `build` fetches it into an environment of its own.
    options = ["--no-isolation"] if find_spec("hatchling") else []
    result = run(sys.executable, "-m", "build", *options, "--outdir", out, ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    assert wheel.name == f"steppe-{steppe.__version__}-py3-none-any.whl"
    assert sdist.name == f"steppe-{steppe.__version__}.tar.gz"
    return Release(wheel, sdist)


def test_the_wheel_is_the_package_and_nothing_else(release):
    package = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src/steppe").rglob("*")
        if path.is_file() and not RUBBISH.search(path.as_posix())
    }
    about = {f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
    assert release.in_wheel == package | about | {f"{INFO}/licenses/LICENSE"}


@pytest.mark.parametrize(
    "file",
    [
        "py.typed",
        "paper/paper.csv",
        "study/advice/table.json",
        *(f"reports/page/page.{kind}" for kind in ("html", "css")),
    ],
)
def test_the_wheel_has_the_files_that_are_no_code(release, file):
    assert f"steppe/{file}" in release.in_wheel


def test_the_metadata_asks_for_torch_alone(release):
    found: email.message.Message = email.message_from_string(release.text("METADATA"))
    assert (found["Name"], found["Version"]) == ("steppe", steppe.__version__)
    assert found["License-Expression"] == "MIT"
    assert set(found["Requires-Python"].split(",")) == set(PROJECT["requires-python"].split(","))
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    assert set(found.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    required = [Requirement(text) for text in found.get_all("Requires-Dist", [])]
    always = [str(need) for need in required if need.marker is None]
    assert always == PROJECT["dependencies"]
    assert [Requirement(need).name for need in always] == ["torch"]


def test_the_entry_points(release):
    entries = metadata.EntryPoints(
        metadata.EntryPoints._from_text(release.text("entry_points.txt"))
    )
    assert {(entry.group, entry.name, entry.value) for entry in entries} == {
        ("console_scripts", "steppe", "steppe.cli:main"),
    }


def repository(*options: str) -> set[str]:
    """The files that the repository keeps, and with ``--others`` those it might."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git repository: nothing to compare with")
    result = run("git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", *options)
    assert result.returncode == 0, result.stderr
    return {name for name in result.stdout.split("\0") if name and (ROOT / name).is_file()}


def test_the_sdist_is_the_repository(release):
    """Its tests read pins, docs and records, and whoever packages it runs them."""
    expected = {name for name in repository() if not name.startswith(NOT_RELEASED)}
    assert sorted(expected - release.in_sdist) == []
    known = repository("--cached", "--others", "--exclude-standard")
    assert release.in_sdist - known == {"PKG-INFO"}
    assert sorted(name for name in release.in_sdist if RUBBISH.search(name)) == []


def closure(name: str) -> dict[str, metadata.Distribution]:
    """An installed distribution and what it requires, by canonical name."""
    found: dict[str, metadata.Distribution] = {}
    ask = [Requirement(name)]
    while ask:
        need = ask.pop()
        if canonicalize_name(need.name) in found:
            continue
        distribution = metadata.distribution(need.name)
        found[canonicalize_name(need.name)] = distribution
        required = map(Requirement, distribution.requires or ())
        extras = need.extras or {""}
        ask += [
            more
            for more in required
            if more.marker is None or any(more.marker.evaluate({"extra": e}) for e in extras)
        ]
    return found


def top_levels(distribution: metadata.Distribution) -> set[str]:
    """What a distribution has put into site-packages: packages, modules and its own record."""
    files = distribution.files
    assert files is not None, distribution
    return {file.parts[0] for file in files if file.parts[0] not in {"..", "__pycache__"}}


SMOKE = textwrap.dedent(
    '''
    import torch

    import steppe
    from steppe.curvature import HessianOperator, top_eigenvalues
    from steppe.optim import FAD

    A = torch.diag(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
    rho, alpha, beta, lr = 0.05, 0.5, 0.5, 0.1


    class Bowl(torch.nn.Module):
        """The loss 0.5 theta' A theta: its gradient is A theta and its Hessian is A."""

        def __init__(self):
            super().__init__()
            self.theta = torch.nn.Parameter(torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64))

        def forward(self):
            return 0.5 * self.theta @ A @ self.theta


    model = Bowl()
    theta = model.theta.detach().clone()
    optimizer = FAD(torch.optim.SGD(model.parameters(), lr=lr), rho, alpha, beta, model=model)


    def closure():
        loss = model()
        loss.backward()
        return loss


    optimizer.step(closure)


    def unit(vector):
        return vector / vector.norm()


    # Algorithm 1 of the paper, line by line.
    g0 = A @ theta
    g1 = A @ (theta + rho * unit(g0))
    h0 = g1 - g0
    g2 = A @ (theta + rho * unit(h0))
    g3 = A @ (theta + rho * unit(h0) + rho * unit(g2))
    expected = theta - lr * (g0 + beta * (alpha * h0 + (1 - alpha) * (g3 - g2)))
    # The step also adds xi = 1e-12 to norms: a relative change of 1e-12 in terms of size rho.
    torch.testing.assert_close(model.theta.detach(), expected, rtol=0, atol=1e-12)

    hessian = HessianOperator(model, lambda model, batch: model(), [torch.zeros(1)])
    values = top_eigenvalues(hessian, k=1).values
    torch.testing.assert_close(values, torch.tensor([5.0], dtype=torch.float64))
    print(steppe.__version__, steppe.__file__)
    '''
)
"""A program for a plain `pip install steppe`: a step and an eigenvalue, against equations."""

ALONE = textwrap.dedent(
    """
    import sys
    import sysconfig
    from importlib.machinery import PathFinder

    ALLOWED, ABSENT = {allowed}, {absent}
    SITE = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))


    class Only(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            spec = super().find_spec(name, path, target)
            if spec is None or name.partition(".")[0] in ALLOWED:
                return spec
            places = [spec.origin, *(spec.submodule_search_locations or ())]
            installed = any(place is not None and place.startswith(SITE) for place in places)
            return None if installed else spec


    sys.meta_path = [Only if finder is PathFinder else finder for finder in sys.meta_path]
    for name in ABSENT:
        try:
            __import__(name)
        except ModuleNotFoundError:
            continue
        raise SystemExit(f"{{name}} is still there")
    """
)
ABSENT = ("numpy", "pydantic", "pytest", "rich", "safetensors", "scipy", "typer")


def test_the_library_works_with_nothing_but_torch():
    """As in an environment with torch and what torch requires: no other package is found."""
    wanted = {name.removesuffix(".py") for d in closure("torch").values() for name in top_levels(d)}
    assert not wanted & set(ABSENT)
    program = ALONE.format(allowed=wanted | {"steppe"}, absent=ABSENT) + SMOKE
    ours = str(Path(steppe.__file__).parents[1])
    result = run(sys.executable, "-c", program, PYTHONPATH=ours)
    assert result.returncode == 0, result.stderr
    assert "steppe" not in result.stderr  # torch may miss numpy aloud, steppe does not


@pytest.fixture(scope="module")
def installed(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel, torch and what torch requires."""
    home = tmp_path_factory.mktemp("clean") / "env"
    result = run(sys.executable, "-m", "venv", "--without-pip", home)
    assert result.returncode == 0, result.stderr
    python = home / "bin" / "python"
    (packages,) = home.glob("lib/python*/site-packages")
    for distribution in closure("torch").values():  # links, where copies would be gigabytes
        for name in top_levels(distribution):
            place = packages / name
            if not place.exists():
                place.symlink_to(distribution.locate_file(name))
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    # With its requirements, of which none may be missing: there is no index to take one from.
    result = run(*pip, "install", "--no-index", release.wheel, PIP_FIND_LINKS="")
    assert result.returncode == 0, result.stdout + result.stderr
    return python


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(installed, tmp_path):
    assert run(installed, "-c", "import numpy", cwd=tmp_path).returncode == 1
    result = run(installed, "-c", SMOKE, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    version, file = result.stdout.split()
    assert version == steppe.__version__
    assert Path(file).is_relative_to(installed.parents[1])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], []])
def test_the_command_without_its_extra_says_what_to_install(installed, tmp_path, arguments):
    result = run(installed.with_name("steppe"), *arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "steppe: this command needs rich: pip install 'steppe[dg]'\n"


TYPED = """
import torch
from steppe.optim import FAD

model = torch.nn.Linear(3, 1)
base = torch.optim.SGD(model.parameters(), lr=0.1)
reveal_type(FAD(base, rho=0.05, model=model))
FAD(base, rho="wide")
"""


@pytest.mark.slow
def test_the_types_are_shipped(installed, tmp_path):
    """A type checker that sees the installed wheel only, on a user's right line and wrong line."""
    (tmp_path / "user.py").write_text(TYPED)
    result = run(
        *(sys.executable, "-m", "mypy", "--python-executable", installed),
        *("--cache-dir", tmp_path / "cache", "--config-file", os.devnull, "user.py"),
        cwd=tmp_path,
    )
    assert 'user.py:7: note: Revealed type is "steppe.optim.fad.FAD"' in result.stdout
    assert 'user.py:8: error: Argument "rho" to "FAD" has incompatible type' in result.stdout
    assert "Found 1 error in 1 file" in result.stdout, result.stdout


def test_the_tests_that_security_md_names_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) >= 20
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


ONLY_IN = {
    "eval": {"options.py"},
    "exec": {"axes.py"},
    "import_module": {
        "__init__.py",
        "axes.py",
        "domains/catalog.py",
        "lazy.py",
        "optim/frameworks.py",
        "sweeps/copies.py",
    },
    "subprocess": {"sweeps/copies.py", "sweeps/mps.py", "sweeps/slurm.py"},
    "torch.load": {"training/weights.py"},
    "urlopen": {"domains/fetch.py"},
}
"""What may run a program or read one, and the files that were looked at for it."""
MODULES = {"dill", "joblib", "marshal", "pickle", "shelve", "yaml"}
FORBIDDEN = {
    *MODULES,
    *("__import__", "eval", "exec", "extract", "extractall", "mktemp", "os.popen", "os.system"),
    *("torch.hub", "urlretrieve"),
    *("np.load without allow_pickle=False", "torch.load without weights_only=True", "shell=True"),
}


def uses(source: str) -> set[str]:
    """Those of `ONLY_IN` and `FORBIDDEN` that a file has."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {part for name in node.names for part in (name.name, name.name.split(".")[0])}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {str(node.module), str(node.module).split(".")[0]}
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.Attribute):
            found |= {f"{ast.unparse(node.value)}.{node.attr}"}
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            # A method that merely has such a name, `model.eval()`, is none.
            plain = isinstance(node.func, ast.Name) or called.startswith("builtins.")
            last = called.rpartition(".")[2]
            if plain or last not in {"eval", "exec", *MODULES}:
                found |= {called, last}
            given = {key.arg: ast.unparse(key.value) for key in node.keywords if key.arg}
            if called in {"np.load", "numpy.load"} and given.get("allow_pickle") != "False":
                found.add("np.load without allow_pickle=False")
            if called == "torch.load" and given.get("weights_only") != "True":
                found.add("torch.load without weights_only=True")
            if given.get("shell", "False") != "False":
                found.add("shell=True")
    return found & (FORBIDDEN | set(ONLY_IN))


def test_the_source_reads_and_runs_nothing_else():
    package = ROOT / "src/steppe"
    found: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        for use in uses(file.read_text(encoding="utf-8")):
            found.setdefault(use, set()).add(file.relative_to(package).as_posix())
    assert found == ONLY_IN, "a new way to read or run things: look at it, then at SECURITY.md"


def test_a_report_imports_nothing_that_a_run_names(tmp_path, monkeypatch):
    train(make_config({"dataset": "RotatedDigits", "targets": "75", "steps": 2}), tmp_path / "run")
    config = tmp_path / "run" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"plugins": ["a_strangers"]}))
    (tmp_path / "a_strangers.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    loaded = load_runs(tmp_path / "run")
    assert len(loaded.runs) == 1
    assert build_report(loaded).tables
    assert "a_strangers" not in sys.modules
    load_model(tmp_path / "run")  # which does import it: the check above could have failed
    assert sys.modules.pop("a_strangers").__file__ == str(tmp_path / "a_strangers.py")


def test_plain_http_is_only_used_with_a_checksum():
    mirrors = [
        mirror
        for name in dataset_names()
        if (source := dataset_spec(name).source) is not None
        for item in source.downloads
        for mirror in item.mirrors
    ]
    assert {mirror.url.partition(":")[0] for mirror in mirrors} == {"http", "https"}
    unchecked = [mirror.url for mirror in mirrors if mirror.checksum is None]
    assert all(url.startswith("https:") for url in unchecked)
    assert len(unchecked) == 2  # as SECURITY.md counts them


@pytest.mark.parametrize("name", ["hf-hub:someone/model", "hf_hub:someone/model", "local-dir:/tmp"])
def test_backbones_come_from_timms_own_list(name):
    with pytest.raises(UserError, match="unknown backbone"):
        build_network(name, n_classes=2, image_size=32, channels=3)


def test_an_image_that_would_fill_the_memory_is_unreadable(tmp_path):
    path = tmp_path / "bomb.png"
    Image.new("1", (20_000, 10_000)).save(path)
    assert path.stat().st_size < 100_000
    with pytest.raises(UnreadableImage, match="exceeds limit"):
        decode(path)
