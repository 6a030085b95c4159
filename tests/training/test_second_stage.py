"""Runs of two stages: the second repeats the first's learning rates, and both survive kills."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from steppe.domains import load
from steppe.errors import UserError
from steppe.reports import load_runs
from steppe.reports.selection import train_validation
from steppe.sweeps.takeover import newest_step, take_over
from steppe.training import RunDirectory, configure, load_model, make_config, select, train
from tests import processes
from tests.training import killing
from tests.training.test_resume import assert_same_run
from tests.training.test_warm_start import DIGITS

TWO = {
    **DIGITS,
    "steps": 40,
    "checkpoint_every": 3,
    "linear_probe": True,
    "linear_steps": 4,
    "lr_schedule": "plateau",
    "averaging": {"name": "sma", "start": 5, "refresh": True},
    "freeze_bn": False,
    "second_stage": True,
    "evaluate_both": True,
}
ENDS = 15
"""The step of the third drop, if every look after the warm start but the first is a drop."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, once undisturbed and once killed: in the warm start, between two drops of the learning
    rate, and in the same places of the second stage."""
    folder = tmp_path_factory.mktemp("stages")
    processes.run(killing.kill_in_stages, TWO, folder, [(1, 2), (1, 11), (2, 3), (2, 11)])
    return folder


def test_killed_in_every_phase(killed: Path) -> None:
    assert_same_run(killed / "whole", killed / "broken")
    assert_same_run(killed / "whole/first-stage", killed / "broken/first-stage")


def test_the_second_stage_repeats_the_first_on_all_source_images(killed: Path) -> None:
    stages = [RunDirectory(killed / "whole/first-stage"), RunDirectory(killed / "whole")]
    first, second = (stage.records() for stage in stages)
    lrs = [record["lr"] for record in first]
    assert [record["lr"] for record in second] == lrs
    assert len(set(lrs)) == 4
    assert [r["step"] for r in second] == [r["step"] for r in first] == list(range(0, ENDS + 1, 3))
    sizes = [len(domain) for domain in load("RotatedDigits").domains]
    counts = [stage.data()["images"] for stage in stages]
    assert sum(counts[0]["0"].values()) == counts[1]["0"]["train"] == sizes[0]
    assert "val" not in counts[1]["0"]
    assert counts[0]["75"] == counts[1]["75"]  # so that its accuracy compares with other runs'
    assert second[0]["probe"] == {"C": first[0]["probe"]["C"]}
    assert select(second) is second[-1]


def test_both_weights_are_evaluated(killed: Path) -> None:
    records = RunDirectory(killed / "whole").records()
    assert all(record["averaged"] for record in records)
    # The average of one update is its weights.
    assert [r["raw"] == r["domains"] for r in records] == [True] * 2 + [False] * 4
    (run,) = load_runs(killed / "whole").runs
    raw = records[-1]["raw"]["75"]["test"]["accuracy"]
    assert train_validation([run], frozenset(["75"])).raw == raw


def test_the_model_is_the_second_stages(killed: Path) -> None:
    model = load_model(killed / "whole")
    assert (model.step, model.averaged) == (ENDS, True)


def test_reports_show_one_run_and_choose_by_the_first_stage(killed: Path, tmp_path: Path) -> None:
    found = load_runs(killed / "whole").runs
    assert [run.path for run in found] == [killed / "whole"]
    first = RunDirectory(killed / "whole/first-stage").records()[-1]
    values = [first["domains"][domain]["val"]["accuracy"] for domain in ("0", "30")]
    chosen = train_validation(found, frozenset(["75"]))
    assert chosen.validation == pytest.approx(sum(values) / 2)
    assert chosen.step == ENDS
    # The time of a run is that of both stages.
    stages = [load_runs(killed / "whole" / name).runs[0] for name in ("", "first-stage")]
    alone = tuple(record._replace(first_stage_seconds=None) for record in stages[0].records)
    own = replace(stages[0], records=alone)
    assert stages[0].seconds == pytest.approx(own.seconds + stages[1].seconds)
    # Of two draws, the one whose first stage was better.
    better, worse = (tmp_path / name for name in ("better", "worse"))
    for folder, validated in ((better, 0.9), (worse, 0.1)):
        folder.mkdir()
        config = json.loads((killed / "whole/config.json").read_text())
        config["draw"] = int(folder is worse)
        (folder / "config.json").write_text(json.dumps(config))
        lines = [
            json.dumps({**record, "first_stage_validation": validated})
            for record in RunDirectory(killed / "whole").records()
        ]
        (folder / "records.jsonl").write_text("\n".join(lines))
    picked = train_validation(load_runs(tmp_path).runs, frozenset(["75"]))
    assert picked.run.path == better


@pytest.mark.parametrize("gone", [False, True])
def test_a_worker_takes_over_both_stages(killed: Path, tmp_path: Path, gone: bool) -> None:
    old, new = tmp_path / "attempt-00001", tmp_path / "attempt-00002"
    shutil.copytree(killed / "whole", old)
    if not gone:
        (old / "first-stage/checkpoint/best/state.json").write_text("damaged")
    assert newest_step(old) == "step-000015"
    take_over(old, new, gone)
    assert RunDirectory(new / "first-stage").state == "done"
    assert (new / "first-stage/checkpoint/best").exists() == gone
    train(make_config(TWO), new, resume=True)
    assert_same_run(killed / "whole", new)
    shutil.rmtree(new / "checkpoint")
    assert newest_step(new) == "first stage, step-000015"
    (new / "first-stage").rename(tmp_path / "elsewhere")
    (new / "first-stage").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="first-stage is not a regular file or folder"):
        take_over(new, old, gone=True)


def test_swad_has_no_loss_to_follow() -> None:
    with pytest.raises(UserError, match="'swad' needs the validation loss, which a second stage"):
        make_config({**TWO, "averaging": "swad"})


def test_a_begun_first_stage_needs_resume(tmp_path: Path) -> None:
    config = make_config({**DIGITS, "second_stage": True, "steps": 2})
    train(make_config({**DIGITS, "steps": 2}), tmp_path / "first-stage")
    run = RunDirectory(tmp_path)
    run.create(config)
    run.set_state("failed")
    with pytest.raises(UserError, match="already holds a run: add --resume"):
        train(config, tmp_path)


def test_a_run_from_before_an_option_existed_goes_on(tmp_path: Path) -> None:
    config = make_config({**DIGITS, "averaging": "sma", "steps": 3})
    train(config, tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    assert values["averaging"].pop("refresh") is False
    values.pop("linear_steps")
    file.write_text(json.dumps(values))
    assert len(train(configure({}, resumed=RunDirectory(tmp_path).config()), tmp_path, resume=True))
