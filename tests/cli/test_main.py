"""The command line as a whole: how it starts, what it refuses, and how it ends."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

import steppe as package
from steppe import cli
from steppe.errors import UserError
from tests.limits import seconds


def python(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds(600))


def test_version_option(steppe):
    """Of the module in a process of its own, and of what the installed script calls."""
    expected = f"steppe {package.__version__}\n"
    result = python("-m", "steppe", "--version")
    assert (result.returncode, result.stdout) == (0, expected)
    assert steppe("--version") == (0, expected, "")


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_the_command_says_what_to_install(package):
    code = f"import sys; sys.modules[{package!r}] = None; from steppe.cli import main; main()"
    result = python("-c", code)
    assert result.returncode == 1
    assert result.stderr == (f"steppe: this command needs {package}: pip install 'steppe[dg]'\n")


@pytest.fixture
def failing() -> Iterator[dict[str, BaseException]]:
    """A command of its own, which raises what is put here."""
    raised: dict[str, BaseException] = {}
    before = list(cli.app.registered_commands)

    @cli.app.command()
    def fail() -> None:
        raise raised["error"]

    yield raised
    cli.app.registered_commands[:] = before


def not_there(module: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {module!r}", name=module)


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (UserError("no such\n  dataset"), 2, "steppe: no such\n  dataset\n"),
        (
            FileNotFoundError(2, "No such file or directory", "missing.toml"),
            2,
            "steppe: missing.toml: No such file or directory\n",
        ),
        (
            not_there("sklearn_not_here"),
            "steppe: this command needs sklearn_not_here: pip install 'steppe[dg]'",
            "",
        ),
        (
            not_there("ray"),
            "steppe: this command needs ray: pip install 'steppe[ray]'",  # Python prints it
            "",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_failures_are_one_line_and_an_exit_code(steppe, failing, error, code, stderr):
    failing["error"] = error
    ended, _, said = steppe("fail")
    assert (ended, said.lstrip("\n")) == (code, stderr)


@pytest.mark.parametrize("error", [ValueError("a bug"), not_there("steppe.not_here")])
def test_a_bug_keeps_its_traceback(steppe, failing, error):
    failing["error"] = error
    with pytest.raises(type(error)):  # for Python to print, with an exit code of 1
        steppe("fail")


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("trian", "'steppe train'"),
        ("exprot", "'steppe export'"),
        ("algorithms", "'steppe list algorithms'"),
        ("optimizer", "'steppe list optimizers'"),
        ("status", "'steppe sweep status' or 'steppe study status'"),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(steppe, typed, nearest):
    code, _, err = steppe(typed)
    assert code == 2
    said = " ".join(err.replace("│", " ").split())  # wrapped, in a box
    assert f"No such command '{typed}'. Did you mean {nearest}?" in said


def test_a_command_unlike_any_other_has_no_suggestion(steppe):
    code, _, err = steppe("xyzzy")
    assert code == 2
    assert "No such command 'xyzzy'. See 'steppe --help'." in err


def test_unknown_option_is_refused(steppe):
    code, _, err = steppe("--nonsense")
    assert code == 2
    assert "No such option" in err


@pytest.mark.filterwarnings("always:only='norm'")
def test_the_librarys_warnings_reach_the_runs_log_without_a_place_in_the_code(steppe, tmp_path):
    run = ["train", "--dataset", "RotatedDigits", "--target", "75", "--steps", "1"]
    _, _, err = steppe(*run, "--freeze", "all", "--optimizer", "sam-on", "--out", tmp_path / "run")
    assert "its steps are those of SGD" in err
    assert "UserWarning" not in err
    assert "its steps are those of SGD" in (tmp_path / "run" / "log.txt").read_text()
