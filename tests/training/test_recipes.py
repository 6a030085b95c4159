"""Recipes: what they set, what overrides them, and where they show."""

import json
from pathlib import Path

import pytest

from steppe.errors import UserError
from steppe.reports import load_runs
from steppe.sweeps import Grid, cost, write_plan
from steppe.sweeps.plan import jobs
from steppe.training import configure, make_config
from steppe.training.recipes import recipes

PACS = {"dataset": "PACS", "targets": "sketch"}
DIGITS = {"dataset": "RotatedDigits", "targets": "75"}


def test_erm_plus_plus_is_domainbeds() -> None:
    """Its defaults, of `algorithms.py`, `hparams_registry.py` and `misc.py` there."""
    config = make_config({**PACS, "recipe": "ERM++"})
    assert config.recipe == "erm++"
    assert (config.backbone, config.weights, config.freeze_bn) == (
        "resnet50.ram_in1k",
        "imagenet",
        False,
    )
    assert (config.linear_steps, config.linear_lr, config.lr_schedule) == (500, 5e-5, "plateau")
    assert (config.averaging.name, config.averaging.options) == (
        "sma",
        {"start": 600, "refresh": True},
    )
    assert config.second_stage
    assert (config.optimizer.name, config.optimizer.options["lr"]) == ("adam", 5e-5)
    assert (config.steps, config.checkpoint_every, config.batch_size) == (5001, 300, 32)


@pytest.mark.parametrize("name", list(recipes))
def test_every_recipe_makes_a_config_and_goes_with_anything(name: str) -> None:
    axes = {"algorithm": "CORAL", "optimizer": "fad", "averaging": "sma"}
    config = make_config({**PACS, **axes, "recipe": name})
    for axis, own in axes.items():
        assert getattr(config, axis).name == own
    for key, value in recipes[name].settings.items():
        assert key in ("averaging",) or getattr(config, key) == value
    assert make_config(config.model_dump()) == config
    assert recipes[name].citation
    assert recipes[name].summary


def test_what_is_given_overrides_it() -> None:
    config = configure(
        {**PACS, "recipe": "erm++", "backbone": "resnet18"},
        ["linear_steps=7", "averaging.start=9", "second_stage=false"],
    )
    assert (config.backbone, config.linear_steps, config.second_stage) == ("resnet18", 7, False)
    assert config.averaging.options == {"start": 9, "refresh": True}
    other = make_config({**PACS, "recipe": "erm++", "averaging": "none", "linear_steps": 0})
    assert (other.averaging.name, other.averaging.options) == ("none", {})


def test_small_images_keep_their_network() -> None:
    config = make_config({**DIGITS, "recipe": "erm++", "linear_steps": 10})
    assert (config.backbone, config.weights) == ("small-cnn", "none")
    with pytest.raises(UserError, match="linear_steps=500 leaves none of steps=301"):
        make_config({**DIGITS, "recipe": "erm++"})


def test_wrong_uses(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown recipe 'erm\+', did you mean 'erm\+\+'"):
        make_config({**PACS, "recipe": "erm+"})
    file = tmp_path / "config.json"
    file.write_text(make_config(PACS).to_json())
    with pytest.raises(UserError, match="is for recipe=None, which determines other settings"):
        configure({"recipe": "erm++"}, file=file)


@pytest.mark.parametrize(
    "given", [{"options": {"recipe": "erm++"}}, {"overrides": ("recipe=erm++",)}]
)
def test_a_sweep_takes_its_averaging(given: dict) -> None:
    ((_, config),) = jobs(Grid(("PACS",), trials=1, draws=0, targets="sketch", **given))
    assert (config.averaging.name, config.averaging.options["start"]) == ("sma", 600)
    ((_, drawn),) = jobs(Grid(("PACS",), trials=1, draws=1, targets="sketch", **given))
    assert (drawn.averaging, drawn.linear_steps, drawn.freeze_bn) == (config.averaging, 500, False)


def test_a_second_stage_counts_in_the_estimate(tmp_path: Path) -> None:
    grid = Grid(("PACS",), trials=1, draws=0, targets="sketch", options={"recipe": "erm++"})
    assert cost.estimate(write_plan(grid, tmp_path), measured=False).passes == 2 * 5001


def test_it_is_a_row_of_its_own_in_reports(tmp_path: Path) -> None:
    record = {"step": 0, "loss": {}, "domains": {"sketch": {"test": {"accuracy": 0.5}}}}
    for number, values in enumerate(
        [{}, {"recipe": "lp-ft"}, {"recipe": "lp-ft", "algorithm": "CORAL"}]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(make_config({**PACS, **values}).to_json())
        (folder / "records.jsonl").write_text(json.dumps(record) + "\n")
    names = [run.row.name for run in load_runs(tmp_path).runs]
    assert names == ["adam", "lp-ft adam", "CORAL lp-ft adam"]
