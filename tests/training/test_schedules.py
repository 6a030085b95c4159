"""Learning rates that drop: against torch's scheduler, in a run, and replayed."""

import json
import random
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from steppe.errors import Interrupted, UserError
from steppe.training import make_config, train
from steppe.training.schedules import DROPS, Plateau, Replay, drop
from steppe.training.scoring import Scoring
from steppe.training.trainer import Trainer
from tests.training.test_resume import assert_same_run
from tests.training.test_warm_start import DIGITS


@pytest.mark.parametrize("seed", range(20))
def test_the_plateau_is_that_of_torch(seed: int) -> None:
    rng = random.Random(seed)
    losses = [round(1 / (1 + t) + rng.uniform(0, 0.3), rng.choice([1, 6])) for t in range(60)]
    parameter = torch.nn.Parameter(torch.zeros(1))
    ours, theirs = (torch.optim.SGD([parameter], lr=0.5) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, patience=1, eps=0)
    plateau = Plateau()
    for step, loss in enumerate(losses):
        if plateau.look(step, loss):
            drop(ours)
        scheduler.step(loss)
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12)
        assert plateau.ends(step) == (plateau.drops >= 3)
        # Its state is all that it remembers.
        kept, plateau = json.loads(json.dumps(plateau.state_dict())), Plateau()
        plateau.load_state_dict(kept)
    assert plateau.drops > 3


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look but the first is a drop."""
    monkeypatch.setattr("steppe.training.schedules.PATIENCE", 0)
    monkeypatch.setattr("steppe.training.schedules.THRESHOLD", 0.9)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("averaging", ["none", "sma", "swad"])
def test_a_run_ends_at_the_third_drop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, averaging: str
) -> None:
    looks, look = [], Plateau.look

    def seen(self: Plateau, step: int, loss: float) -> bool:
        looks.append(loss)
        return look(self, step, loss)

    monkeypatch.setattr(Plateau, "look", seen)
    own = {"name": "swad", "every": 3} if averaging == "swad" else averaging
    config = {**DIGITS, "steps": 30, "lr_schedule": "plateau", "averaging": own, "optimizer": "fad"}
    config["optimizer"] = {"name": "fad", "lr": 0.02}
    records = train(make_config({**config, "linear_steps": 2}), tmp_path)
    # The record at step 0 is in the warm start.
    assert [record["step"] for record in records] == [0, 2, 4, 6, 8]
    assert [record["drops"] for record in records] == [0, 0, 1, 2, 3]
    assert [record["lr"] for record in records] == [0.02 / 10**n for n in (0, 0, 1, 2, 3)]
    assert [record["averaged"] for record in records] == {
        "none": [False] * 5,
        "sma": [True] * 5,
        "swad": [False] * 4 + [True],
    }[averaging]
    # It is driven by the weights that are evaluated: the average's, where there is one.
    found = [
        sum(record["domains"][d]["val"]["cross_entropy"] for d in ("0", "30")) / 2
        for record in records[1:]
    ]
    assert looks[:3] == found[:3]
    if averaging != "swad":  # whose last record is of the average, decided on raw weights
        assert looks[3] == found[3]
    assert "the learning rate's schedule ends after step 8" in (tmp_path / "log.txt").read_text()


@pytest.mark.usefixtures("impatient")
def test_interrupted_between_a_look_and_its_record(tmp_path: Path) -> None:
    """The resumed run does not look again."""
    config = make_config({**DIGITS, "steps": 30, "lr_schedule": "plateau", "averaging": "sma"})
    train(config, tmp_path / "whole")
    everything = Scoring.everything

    def stopped(self: Scoring, done: int, averaged: bool) -> dict:
        if done == 5:
            raise Interrupted(15)
        return everything(self, done, averaged)

    with patch.object(Scoring, "everything", stopped), pytest.raises(Interrupted):
        train(config, tmp_path / "broken")
    train(config, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_a_replay_drops_and_ends_where_the_records_do() -> None:
    records = [{"step": 3 * n, "drops": drops} for n, drops in enumerate([0, 0, 1, 1, 3])]
    replay = Replay(records)
    dropped = [step for step in range(0, 12, 3) if replay.look(step)]
    assert (dropped, replay.drops) == ([6], 1)
    assert [replay.ends(step) for step in (9, 11, 12)] == [False, False, True]
    assert DROPS == 3


def test_the_learning_rates_of_all_groups_and_objectives_drop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = []
    monkeypatch.setattr(Plateau, "_look", lambda self, step, loss: setattr(self, "drops", 1))
    run = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self, *a: (last.append(self), run(self, *a)))
    config = {**DIGITS, "steps": 3, "algorithm": "DANN", "lr_schedule": "plateau"}
    train(make_config(config), tmp_path / "dropped")
    train(make_config({**config, "lr_schedule": "constant"}), tmp_path / "constant")
    dropped, constant = (
        [group["lr"] for o in trainer.optimizers.values() for group in o.param_groups]
        for trainer in last
    )
    assert len(constant) > 1
    assert dropped == [lr / 10 for lr in constant]


def test_a_plateau_needs_validation_images(tmp_path: Path) -> None:
    config = make_config({**DIGITS, "lr_schedule": "plateau"})
    with (
        patch.object(Scoring, "validates", False),
        pytest.raises(UserError, match="lr_schedule 'plateau' needs validation images"),
    ):
        train(config, tmp_path)
