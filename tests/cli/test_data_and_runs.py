"""The commands for data and for finished runs, from end to end."""

import csv
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from steppe.algorithms import algorithm_names
from steppe.averaging import averaging_names
from steppe.cli import app
from steppe.domains import load
from steppe.domains.batches import Batch
from steppe.errors import Interrupted, UserError
from steppe.optim import optimizer_names
from steppe.training.trainer import Trainer

SMALL = ["--backbone", "small-cnn", "--weights", "none", "--device", "cpu", "--steps", "3"]
SMALL += ["--set", "image_size=16", "--set", "batch_size=4"]

ALGORITHMS = algorithm_names()
"""Now, before an example of the guide adds one of its own."""


def steppe(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A folder of small images: two domains, two classes."""
    rng = np.random.default_rng(0)
    for domain in ("ink", "oil"):
        for name in ("cat", "dog"):
            folder = tmp_path / "pets" / domain / name
            folder.mkdir(parents=True)
            for i in range(8):
                pixels = rng.integers(256, size=(20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "pets"


def test_list_knows_what_is_built_in_and_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "PACS").mkdir()
    rows = json.loads(steppe("data", "list", "--root", tmp_path, "--json").stdout)
    found = {row["name"]: row["found"] for row in rows}
    assert found["RotatedDigits"] == found["Doodles"] == "in memory"
    assert found["PACS"] == str(tmp_path / "PACS")
    assert found["VLCS"] is None
    printed = steppe("data", "list", "--root", tmp_path).stdout
    assert all(name in printed for name in found)


def test_check_exits_with_1_when_something_is_wrong(pets: Path) -> None:
    assert steppe("data", "check", pets).exit_code == 0
    broken = pets / "ink/cat/3.png"
    broken.write_bytes(broken.read_bytes()[:50])
    result = steppe("data", "check", pets, "--json")
    assert result.exit_code == 1
    assert "ink/cat/3.png" in result.stdout
    assert json.loads(result.stdout[result.stdout.index("{") :])["ok"] is False
    assert "3.png" in steppe("data", "check", pets).stdout


def test_from_images_to_an_exported_model(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert steppe("data", "pack", "pets", "--size", 18).exit_code == 0
    with pytest.raises(UserError, match="--force"):
        steppe("data", "pack", "pets")
    assert steppe("data", "pack", "pets", "--force").exit_code == 0

    run = tmp_path / "run"
    result = steppe("train", "--dataset", "pets", "--target", "oil", *SMALL, "--out", run)
    assert result.exit_code == 0
    assert "pack in" in result.stderr  # it says what it reads
    assert "best by validation: step" in result.stdout
    again = steppe("train", "--resume", "--out", run, "--json")
    assert set(json.loads(again.stdout)["domains"]) == {"ink", "oil"}

    scores = json.loads(steppe("evaluate", run, "--data", pets / "oil", "--json").stdout)
    own = json.loads(steppe("evaluate", run, "--json").stdout)
    assert scores["oil"]["images"] == own["oil"]["images"] == 16
    assert scores["oil"] == pytest.approx(own["oil"])
    announced = json.loads(again.stdout)["step"]
    assert (own["oil"]["which"], own["oil"]["step"]) == ("best", announced)
    assert f"best weights (step {announced})" in steppe("evaluate", run).stdout
    assert "last weights (step 2)," in steppe("evaluate", run, "--which", "last").stdout
    chosen = steppe("evaluate", run, "--which", "step:2").stdout
    assert "weights after step 2" in chosen
    with pytest.raises(UserError, match="which='first': expected last, best, or step:N"):
        steppe("evaluate", run, "--which", "first")
    assert "accuracy" in steppe("evaluate", run, "--which", "best").stdout

    out = tmp_path / "out.safetensors"
    said = steppe("export", run, out).stdout
    assert f"small-cnn, 2 classes, best weights (step {announced})" in said
    assert load_file(out)["classifier.weight"].shape[0] == 2


def test_predict_from_files_to_csv_and_json(pets: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    steppe("train", "--dataset", pets, "--target", "oil", *SMALL, "--out", run)
    new = tmp_path / "new"
    (pets / "oil" / "cat").rename(new)
    result = steppe("predict", run, new)
    assert result.exit_code == 0
    rows = list(csv.DictReader(result.stdout.splitlines()))
    assert [row["file"] for row in rows] == [str(new / f"{i}.png") for i in range(8)]
    assert {row["class"] for row in rows} <= {"cat", "dog"}
    assert all(0.5 <= float(row["probability"]) <= 1 for row in rows)
    assert {row["trained_on"] for row in rows} == {"ink"}
    assert "best weights (step" in result.stderr
    assert "predicting: 8 of 8" in result.stderr

    (new / "9.png").write_text("words")
    (new / "a\x1b[31mb.png").write_bytes((new / "0.png").read_bytes())
    for out in (tmp_path / "p.csv", tmp_path / "p.json"):
        result = steppe("predict", run, new, "--out", out, "--batch-size", 4, "--which", "last")
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"image {new / '9.png'} cannot be read" in result.stderr
        assert "1 of 10 images could not be read" in result.stderr
        assert "last weights (step 2), trained on ink" in result.stderr
    names = [str(new / name) for name in [*(f"{i}.png" for i in range(8)), "a\x1b[31mb.png"]]
    with (tmp_path / "p.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    found = json.loads((tmp_path / "p.json").read_text())
    assert [row["file"] for row in written] == names
    assert [one["file"] for one in found["predictions"]] == names
    assert (found["which"], found["step"], found["trained_on"]) == ("last", 2, ["ink"])
    assert [one["file"] for one in found["unreadable"]] == [str(new / "9.png")]
    for row, one in zip(written, found["predictions"], strict=True):
        assert row["class"] == one["class"]
        assert float(row["probability"]) == pytest.approx(one["probability"], abs=1e-6)
    printed = steppe("predict", run, new, "--json")
    assert printed.exit_code == 1
    assert len(json.loads(printed.stdout)["predictions"]) == 9
    assert "\x1b" not in steppe("predict", run, new).stdout
    with pytest.raises(UserError, match=r"does not end in \.json"):
        steppe("predict", run, new, "--json", "--out", tmp_path / "p.csv")

    shutil.rmtree(run / "checkpoint" / "best")
    for words in (["predict", run, new / "0.png"], ["evaluate", run, "--data", pets / "ink"]):
        assert "last weights (step 2; no best)" in steppe(*words).output
    exported = steppe("export", run, tmp_path / "m.safetensors").stdout
    assert "last weights (step 2; no best)" in exported
    with pytest.raises(UserError, match="one of .safetensors, .pt2, .onnx"):
        steppe("export", run, tmp_path / "m.pth")


def test_overrides_reach_the_config(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["--dataset", "RotatedDigits", "--target", "75", "--target", "0", "--steps", "1"]
    arguments += ["--optimizer", "fad", "--set", "optimizer.rho=0.2", "--draw", "3"]
    assert steppe("train", *arguments, "--device", "cpu", "--out", run).exit_code == 0
    config = json.loads((run / "config.json").read_text())
    assert config["targets"] == ["75", "0"]
    assert config["optimizer"]["rho"] == 0.2  # what is said outright comes after what is drawn
    assert config["batch_size"] != 32
    with pytest.raises(UserError, match="did you mean 'steps'"):
        steppe("train", *arguments, "--set", "step=3", "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_pack_made_in_between_and_weights_that_are_gone(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on from files after a lossless pack, and without the file it began with."""
    first, weights, run = tmp_path / "first", tmp_path / "w.safetensors", tmp_path / "run"
    base = ["--dataset", pets, "--target", "oil", *SMALL]
    assert steppe("train", *base, "--out", first).exit_code == 0
    assert steppe("export", first, weights).exit_code == 0
    arguments = [a if a != "none" else weights for a in base]

    step = Trainer.step

    def interrupted(self: Trainer, batches: list[Batch]) -> None:
        step(self, batches)
        if self.done == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(Interrupted):
        steppe("train", *arguments, "--out", run)
    monkeypatch.undo()
    weights.unlink()
    assert steppe("data", "pack", pets, "--size", 20).exit_code == 0  # as large as the images
    result = steppe("train", "--resume", "--out", run)
    assert result.exit_code == 0
    assert "pack in" in result.stderr

    other = tmp_path / "other"
    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(Interrupted):
        steppe("train", *base, "--out", other)
    monkeypatch.undo()
    assert steppe("data", "pack", pets, "--size", 10, "--force").exit_code == 0
    with pytest.raises(UserError, match="packed=false"):
        steppe("train", "--resume", "--out", other)
    assert steppe("train", "--resume", "--out", other, "--set", "packed=false").exit_code == 0


def test_what_is_wrong_is_said_before_a_folder_is_made(tmp_path: Path) -> None:
    arguments = ["--dataset", "RotatedDigits", "--target", "75", "--out", tmp_path / "run"]
    for wrong, message in (
        (["--logger", "tensorbored"], "did you mean 'tensorboard'"),
        (["--space", "fed"], "did you mean 'fad'"),
        (["--averaging", "swat"], "unknown averaging 'swat'"),
        (["--algorithm", "CORALL"], "unknown algorithm 'CORALL', did you mean 'CORAL'"),
        (["--algorithm", "CORAL", "--set", "algorithm.gama=1"], "'gama'"),
        (["--algorithm", "CORAL", "--set", "batch_size=1"], "at least 2 images"),
    ):
        with pytest.raises(UserError, match=message):
            steppe("train", *arguments, *wrong)
    with pytest.raises(UserError, match="nothing to resume"):
        steppe("train", "--resume", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("run", "out"), [("run", "new/m.xyz"), ("nowhere", "new/m.onnx")])
def test_an_export_that_is_refused_makes_no_folder(tmp_path: Path, run: str, out: str) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="suffix|is not a run"):
        steppe("export", tmp_path / run, tmp_path / out)
    assert not (tmp_path / "new").exists()


def test_one_source_is_too_few_to_compare(tmp_path: Path) -> None:
    base = ["--dataset", "RotatedDigits", "--target", "75", "--out", tmp_path / "run"]
    with pytest.raises(UserError, match="at least 2 source domains, got 1: add a --source"):
        steppe("train", *base, "--source", "0", "--algorithm", "CORAL", "--steps", 3)
    with pytest.raises(UserError, match=r"the algorithm sets optimizer.betas itself"):
        steppe("train", *base, "--algorithm", "DANN", "--set", "optimizer.betas=[0.8,0.9]")
    assert not (tmp_path / "run/records.jsonl").exists()


def test_whole_axes_given_with_set_survive_a_draw(tmp_path: Path) -> None:
    base = ["--dataset", "RotatedDigits", "--target", "75", "--steps", 2, "--draw", 1]
    axes = ["optimizer=sgd", "algorithm=CORAL", "averaging=swad", "averaging.every=1"]
    options = [part for text in axes for part in ("--set", text)]
    assert steppe("train", *base, *options, "--out", tmp_path / "run").exit_code == 0
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert [config[axis]["name"] for axis in ("optimizer", "algorithm", "averaging")] == [
        "sgd",
        "CORAL",
        "swad",
    ]
    assert config["averaging"]["every"] == 1
    # A new run from an old file is of the new format.
    (tmp_path / "old.json").write_text(json.dumps({**config, "version": 1}))
    new = ["--config", tmp_path / "old.json", "--out", tmp_path / "new"]
    assert steppe("train", *new).exit_code == 0
    assert json.loads((tmp_path / "new/config.json").read_text())["version"] > 1


def test_the_options_asked_for_most_and_several_targets(tmp_path: Path) -> None:
    """--lr and --rho hold against a draw too; what --set also gives is refused."""
    base = ["--dataset", "RotatedDigits", "--optimizer", "fad", "--steps", 1, "--device", "cpu"]
    base += ["--target", "60,75", "--target", "45", "--lr", 0.01, "--rho", 0.3, "--batch-size", 8]
    for name, more in {"plain": [], "drawn": ["--draw", 1]}.items():
        assert steppe("train", *base, *more, "--out", tmp_path / name).exit_code == 0
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["targets"] == ["60", "75", "45"]
        assert config["optimizer"]["lr"] == 0.01
        assert config["optimizer"]["rho"] == 0.3
        assert config["batch_size"] == 8
    for option, key in {"rho": "optimizer.rho", "batch-size": "batch_size"}.items():
        with pytest.raises(UserError, match=f"--{option} and --set {key} are the same setting"):
            steppe("train", *base, "--set", f"{key}=4", "--out", tmp_path / "set")
    with pytest.raises(UserError, match=r"'adam': 'rho'.* Optimizers with 'rho': sam, .*fad"):
        steppe("train", *base, "--optimizer", "adam", "--out", tmp_path / "adam")
    plan = ["sweep", "plan", tmp_path / "sweep", "--datasets", "RotatedDigits", "--no-estimate"]
    plan += ["--optimizers", "fad", "--trials", 1, "--draws", 0, "--lr", 0.02, "--batch-size", 4]
    assert steppe(*plan, "--targets", "75").exit_code == 0
    (file,) = (tmp_path / "sweep/runs").glob("*/config.json")
    planned = json.loads(file.read_text())
    assert (planned["optimizer"]["lr"], planned["batch_size"]) == (0.02, 4)


def test_an_average_has_the_name_that_evaluate_gives_it(tmp_path: Path) -> None:
    options = ["--dataset", "RotatedDigits", "--target", "75", *SMALL[:-6], "--steps", "5"]
    options += ["--device", "cpu", "--averaging", "swad", "--set", "averaging.every=1"]
    said = steppe("train", *options, "--out", tmp_path / "run").stdout
    assert said.startswith("best weights, the average: step     4")
    assert "best weights (step 4)" in steppe("evaluate", tmp_path / "run").stdout


def test_help_shows_defaults() -> None:
    text = " ".join(steppe("train", "--help").stdout.replace("│", " ").split())
    for default in ("adam", "fair", "the dataset's, usually 32", "all others", "auto"):
        assert f"(default: {default})" in text


def test_help_knows_every_name() -> None:
    text = " ".join(steppe("train", "--help").stdout.split())
    for name in (*ALGORITHMS, *averaging_names(), *optimizer_names()):
        assert name in text


def test_ensemble(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in "ab"]
    base = ["--dataset", "RotatedDigits", "--target", "75", "--steps", 4, "--averaging", "sma"]
    for seed, run in enumerate(runs):
        assert steppe("train", *base, "--seed", seed, "--out", run).exit_code == 0
    shown = steppe("evaluate", "--ensemble", *runs).stdout
    assert "ensemble" in shown
    found = json.loads(steppe("evaluate", "--ensemble", *runs, "--json").stdout)["75"]
    assert [member["run"] for member in found["members"]] == [str(run) for run in runs]
    assert 0 <= found["ensemble"]["accuracy"] <= 1
    with pytest.raises(UserError, match="got 2 runs: add --ensemble"):
        steppe("evaluate", *runs)


def test_images_that_would_be_misread_are_named(pets: Path) -> None:
    deep = np.full((8, 8), 40000, dtype=np.uint16)
    Image.fromarray(deep).save(pets / "ink/cat/deep.png")
    result = steppe("data", "check", pets)
    assert result.exit_code == 1
    assert "deep.png cannot be read: its mode is 'I;16'" in result.stdout
    (pets / "ink/cat/deep.png").unlink()
    (pets / "ink/cat/loop").symlink_to(pets / "ink")
    with pytest.raises(UserError, match="loop is a link to one of its own parents"):
        load(pets)
