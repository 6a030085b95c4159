"""`steppe merge`, as a newcomer would type it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from steppe.cli import app
from steppe.errors import UserError

DIGITS = ("--datasets", "RotatedDigits", "--targets", "75", "--trials", 1, "--steps", 4)


def steppe(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two optimizers with two draws each."""
    folder = tmp_path_factory.mktemp("cli") / "sweep"
    plan = ("--optimizers", "sgd,adam", "--draws", 2, "--init-seed", 0, "--batch-size", 4)
    steppe("sweep", "plan", folder, *DIGITS, *plan, "--no-estimate", "--set", "sources=0,30")
    assert steppe("sweep", "work", folder, "--device", "cpu").exit_code == 0
    return folder


def test_a_sweep_becomes_a_run_per_method(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    said = steppe("merge", sweep, "--how", "uniform", "--out", out, "--device", "cpu")
    names = [f"RotatedDigits-75-ERM-{optimizer}-none-trial0" for optimizer in ("sgd", "adam")]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    for name in names:
        assert f"{out / name}: uniform, 2 of 2 runs: step     3" in said.stdout
    config = json.loads((out / names[0] / "config.json").read_text())
    assert (config["draw"], config["averaging"]) == (None, {"name": "soup"})
    draws = [sweep / f"runs/{names[0]}-draw{draw}/result" for draw in (0, 1)]
    assert config["merged_from"] == [str(path.resolve()) for path in draws]
    report = steppe("report", sweep, out, "--format", "json").stdout
    rows = json.loads(report)["tables"][0]["rows"]
    assert {(row["optimizer"], row["averaging"]) for row in rows} == {
        (optimizer, averaging) for optimizer in ("sgd", "adam") for averaging in ("none", "soup")
    }
    assert steppe("evaluate", out / names[0]).exit_code == 0


def test_runs_of_a_sweep_become_one_run(sweep: Path, tmp_path: Path) -> None:
    runs = sorted(sweep.glob("runs/*-draw0/result"))
    said = steppe("merge", *runs, "--out", tmp_path / "out", "--device", "cpu", "--json")
    (merged,) = json.loads(said.stdout)
    assert merged["of"] == 2
    assert set(merged["runs"]) <= set(map(str, runs))
    assert merged["record"]["averaged"]
    assert "validation" in said.stderr  # what each run does to it


def test_errors_before_anything_is_merged(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (run, *_) = sweep.glob("runs/*/result")
    with pytest.raises(UserError, match="pass only runs, or only sweeps"):
        steppe("merge", sweep, run, "--out", out)
    with pytest.raises(UserError, match="has no initial weights that predict"):
        steppe("merge", sweep, "--how", "wise", "--out", out)
    with pytest.raises(UserError, match=r"two sweeps have a run named"):
        steppe("merge", sweep, sweep, "--how", "wise", "--out", out)
    single = tmp_path / "single"
    steppe("sweep", "plan", single, *DIGITS, "--draws", 1, "--no-estimate")
    with pytest.raises(UserError, match="no finished runs in"):
        steppe("merge", single, "--out", out)
    (job,) = (single / "runs").iterdir()
    (job / "result").symlink_to(run)
    with pytest.raises(UserError, match="only one finished run .*--draws N --init-seed 0"):
        steppe("merge", single, "--out", out)
    assert not out.exists()
