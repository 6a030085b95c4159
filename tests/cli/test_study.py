"""`steppe study`, as a newcomer would type it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from steppe.cli import app
from steppe.errors import UserError

TINY = ("--steps", 3, "--batch-size", 4, "--checkpoint-every", 2, "--set", "sources=0,30")
PLAN = ("--dataset", "RotatedDigits", "--targets", "75", "--claim", "adamw:sgd", "--twins", 0)


def steppe(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "study"
    said = steppe("study", "plan", path, *PLAN, *TINY, "--max-seeds", 7, "--spread", 0.5)
    assert "14 first runs planned, for a first look at 7 seeds" in said.stdout
    assert "adamw - sgd" in said.stdout
    assert steppe("sweep", "work", path / "sweep", "--device", "cpu").exit_code == 0
    return path


def test_the_first_screen_has_the_verdict(study: Path) -> None:
    said = steppe("study", "status", study).stdout
    assert said.startswith("0 of 1 claims decided on one target of RotatedDigits.\n")
    assert "adamw against sgd is undecided: 7 seeds did not decide it (" in said
    found = json.loads(steppe("study", "status", study, "--json").stdout)
    assert (found["over"], found["outcomes"], found["sweep"]["done"]) == (True, 14, 14)


def test_every_form_of_the_report(study: Path, tmp_path: Path) -> None:
    found = json.loads(steppe("study", "report", study, "--format", "json").stdout)
    (claim,) = found["claims"]
    (last,) = claim["looks"]
    assert last["low"] < last["mean"] < last["high"]
    markdown = steppe("study", "report", study, "--format", "markdown").stdout
    assert f"| adamw - sgd | undecided | {last['mean']:+.2f} |" in markdown
    assert f"| {last['mean']:+.2f} |" in markdown
    page = tmp_path / "page.html"
    assert steppe("study", "report", study, "--format", "html", "--out", page).exit_code == 0
    text = page.read_text()
    assert "<svg" in text
    assert "<script" not in text
    assert "adamw - sgd: undecided" in text


def test_an_exploratory_claim_is_added(study: Path) -> None:
    with pytest.raises(UserError, match="two claims compare"):
        steppe("study", "plan", study, "--extend", "--explore", "sgd:adamw")
    with pytest.raises(UserError, match="--extend adds exploratory claims only"):
        steppe("study", "plan", study, "--extend", "--claim", "sgd:adamw")


def test_a_plan_says_what_it_cannot_do(tmp_path: Path) -> None:
    """Two seeds decide nothing, and the first runs exceed the budget."""
    path = tmp_path / "study"
    small = (*TINY, "--max-seeds", 2, "--budget", 1e-9)
    said = " ".join(steppe("study", "plan", path, *PLAN, *small).stdout.split())
    assert "2 seeds can hardly decide a claim: this is a pilot" in said
    assert "more than the budget of 1e-09, and are not stopped" in said
    assert json.loads((path / "study.json").read_text())["steppe"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--claim", "fad"), "claim 'fad': expected two methods, such as fad:adamw"),
        (("--claim", "a:sgd", "--method", "a"), "expected NAME=OPTIMIZER and settings"),
        (("--claim", "a:sgd", "--method", "a=fad,3"), "'3' is not KEY=VALUE"),
        (("--claim", "fad:sgd", "--tune", "optimizer.lr=1"), "at least two numbers"),
        (("--claim", "fad:sgd", "--spread", 0), "--spread 0: expected points"),
        ((), "a study needs --dataset and at least one --claim A:B"),
    ],
)
def test_errors_say_what_to_write(tmp_path: Path, options: tuple[object, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        steppe("study", "plan", tmp_path / "s", "--dataset", "RotatedDigits", *options, *TINY)
    assert not list(tmp_path.iterdir())
