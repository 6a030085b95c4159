"""Sweeps and reports from the command line, as a newcomer would type them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steppe.cli import app
from steppe.errors import UserError


def steppe(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "sweep"
    plan = ["--datasets", "RotatedDigits", "--optimizers", "sgd,fad", "--trials", 2, "--draws", 1]
    planned = steppe("sweep", "plan", folder, *plan, "--steps", 4, "--set", "batch_size=4")
    assert "24 runs planned" in planned
    assert "12 runs planned" not in planned
    steppe("sweep", "work", folder, "--device", "cpu")
    return folder


def test_plan_as_json_and_status(sweep: Path, tmp_path: Path) -> None:
    plan = ["--datasets", "RotatedDigits", "--trials", 1, "--draws", 2, "--steps", 3]
    cost = json.loads(steppe("sweep", "plan", tmp_path / "other", *plan, "--json"))
    assert (cost["runs"], cost["passes"]) == (12, 36)
    assert cost["seconds"] > 0
    assert "24 of 24 runs done" in steppe("sweep", "status", sweep)
    assert json.loads(steppe("sweep", "status", sweep, "--json"))["counts"]["done"] == 24
    assert "24 of 24" in steppe("sweep", "status", sweep, "--watch")


def test_every_format(sweep: Path, tmp_path: Path) -> None:
    found = json.loads(steppe("report", sweep, "--format", "json"))
    (table,) = found["tables"]
    assert (table["dataset"], table["selection"]) == ("RotatedDigits", "train-val")
    assert table["columns"] == ["0", "15", "30", "45", "60", "75"]
    for row in table["rows"]:
        assert {"algorithm", "optimizer", "averaging", "cells", "avg"} <= row.keys()
        assert all(set(row["cells"][c]) >= {"mean", "err", "n"} for c in table["columns"])
        assert {row["cells"][c]["n"] for c in table["columns"]} == {2}
    assert "fad" in steppe("report", sweep)
    assert "| fad |" in steppe("report", sweep, "--format", "markdown")
    assert "\\toprule" in steppe("report", sweep, "--format", "latex")
    assert "RotatedDigits" in steppe("report", sweep, "--format", "csv")
    steppe("report", sweep, "--format", "html", "--out", tmp_path / "page.html")
    assert "<!doctype html>" in (tmp_path / "page.html").read_text().lower()
    with pytest.raises(UserError, match="no run"):
        steppe("report", tmp_path / "page.html")


def test_a_chosen_config_can_be_run_again(sweep: Path, tmp_path: Path) -> None:
    steppe("report", sweep, "--format", "json", "--best", tmp_path / "best.json")
    chosen = json.loads((tmp_path / "best.json").read_text())
    assert len(chosen) == 24
    (tmp_path / "config.json").write_text(json.dumps(chosen[0]["config"]))
    with pytest.raises(UserError, match="such as a list entry's 'config'"):
        steppe("train", "--config", tmp_path / "best.json", "--out", tmp_path / "no")
    steppe("train", "--config", tmp_path / "config.json", "--out", tmp_path / "again")


def test_ensemble_and_cancelled_runs(sweep: Path) -> None:
    found = json.loads(steppe("sweep", "ensemble", sweep, "--device", "cpu", "--json"))
    assert len(found) == 12
    assert len(found[0]["runs"]) == 2
    assert "models" in steppe("sweep", "ensemble", sweep, "--device", "cpu")
    assert "0 runs cancelled" in steppe("sweep", "cancel", sweep)
    assert "0 runs can be retried" in steppe("sweep", "retry", sweep)


def test_domainbeds_results(tmp_path: Path) -> None:
    for trial in range(2):
        for env in range(4):
            folder = tmp_path / f"src/{trial}{env}"
            folder.mkdir(parents=True)
            args = {"dataset": "PACS", "algorithm": "ERM", "test_envs": [env], "hparams_seed": 0}
            args |= {"trial_seed": trial, "steps": 301, "seed": 0}
            lines = []
            for step in (0, 300):
                accuracy = {
                    f"env{i}_{part}_acc": 0.5 + 0.01 * (i + trial + step / 100)
                    for i in range(4)
                    for part in ("in", "out")
                }
                values = {"step": step, "loss": 1.0, "args": args, "hparams": {"lr": 5e-5}}
                lines.append(json.dumps({**values, **accuracy}))
            (folder / "results.jsonl").write_text("\n".join([*lines, "broken"]) + "\n")
            (folder / "done").touch()
    assert "8 runs" in steppe("import", "domainbed", tmp_path / "src", tmp_path / "dst")
    (table,) = json.loads(steppe("report", tmp_path / "dst", "--format", "json"))["tables"]
    (row,) = table["rows"]
    cells = [row["cells"][name]["mean"] for name in table["columns"]]
    assert cells == pytest.approx([53.5, 54.5, 55.5, 56.5])
    assert row["cells"]["photo"]["err"] == pytest.approx(0.5 / 2**0.5)
    assert row["avg"] == pytest.approx(55.0)
