"""Studies with real runs: killed and continued, moved, tuned, reported."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steppe.errors import UserError
from steppe.study import Method, Study, extend_study, load_study, plan_study, run_study
from steppe.study.decide import differences
from steppe.study.design import Plan
from steppe.study.outcomes import Outcome, Slot, write_outcomes
from steppe.study.rounds import needs, spread_of
from steppe.sweeps import read_plan, retry, work
from steppe.training import read_config
from tests import processes

TINY = ("steps=3", "checkpoint_every=2", "batch_size=4", "sources=0,30")
DIGITS: dict[str, Any] = {
    "dataset": "RotatedDigits",
    "targets": "60,75",
    "claims": [("adamw", "sgd")],
    "first_seeds": 2,
    "max_seeds": 3,
    "twins": 1,
    "overrides": TINY,
}


def executed(sweep: Path) -> bool:
    work(sweep, "cpu")
    return True


def without_times(study: Study) -> dict[Slot, Outcome]:
    return {slot: replace(outcome, seconds=0.0) for slot, outcome in study.outcomes.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A study that ran without interruption."""
    path = tmp_path_factory.mktemp("studies") / "whole"
    plan_study(path, **DIGITS)
    assert run_study(path, executed)
    return load_study(path)


def test_a_study_runs_to_its_end(whole: Study) -> None:
    """Three seeds cannot decide anything; the runs are paired, and twins differ by rounding."""
    (ruling,) = whole.state.rulings
    assert (ruling.verdict, ruling.reason) == ("undecided", "3 seeds did not decide it")
    kinds = [slot.kind for slot in whole.outcomes]
    assert (kinds.count("run"), kinds.count("twin")) == (2 * 2 * 3, 2)
    sweep = read_plan(whole.path / "sweep")
    configs = [read_config(sweep.folder(name) / "config.json") for name in sweep.names]
    seeds = {(c.targets, c.trial_seed, c.seed) for c in configs}
    assert len(seeds) == 2 * 3, "methods share their seeds, and twins those of the runs"
    assert {c.twin for c in configs} == {0, 1}
    assert all(c.averaging.name == "sma" and c.evaluate_both for c in configs)
    assert {c.averaging.options["start"] for c in configs} == {1}, "not after the last update"
    assert all(o.other is not None and o.seconds > 0 for o in whole.outcomes.values())


def test_killed_again_and_again_it_ends_the_same(whole: Study, tmp_path: Path) -> None:
    path = tmp_path / "killed"
    plan_study(path, **DIGITS)
    known, kills = -1, 0
    while not (study := load_study(path)).state.over and kills < 40:
        assert len(study.outcomes) >= known
        known = len(study.outcomes)
        words = ("study", "run", path, "--workers", 1, "--stale", 1)
        process = processes.Steppe(*words, folder=tmp_path)
        time.sleep(0.4 + 0.4 * kills)
        process.kill()
        kills += 1
    assert kills > 2
    assert without_times(study) == without_times(whole)
    assert study.state == whole.state
    assert study.plan.digest == whole.plan.digest


def test_a_study_goes_on_without_its_runs(whole: Study, tmp_path: Path) -> None:
    """On another machine, where only the plan and the ledger have arrived."""
    path = tmp_path / "moved"
    path.mkdir()
    for name in ("study.json", "outcomes.json"):
        shutil.copy(whole.path / name, path)
    ledger = json.loads((path / "outcomes.json").read_text())
    ledger["outcomes"] = [row for row in ledger["outcomes"] if row[0][2] < 2]
    ledger.pop("crc32")
    (path / "outcomes.json").write_text(json.dumps(ledger))
    assert len(load_study(path).state.todo) == 2 * 2
    assert run_study(path, executed)
    assert without_times(load_study(path)) == without_times(whole)
    assert len(read_plan(path / "sweep").names) == 2 * 2


def test_tuning_tries_what_each_method_has(tmp_path: Path) -> None:
    """Multiples of each method's own default, on seeds of their own."""
    study = plan_study(
        tmp_path / "tuned",
        **{**DIGITS, "claims": [("half", "adamw")], "max_seeds": 2, "twins": 0},
        methods=[Method(name="half", optimizer="sam", overrides=("steps=2",))],
        tune={
            "optimizer.lr": [(1.0, True), (3.0, True)],
            "optimizer.rho": [(0.1, False), (0.2, False)],
        },
    )
    half, adamw = study.plan.design.methods
    assert [len(method.tries) for method in (half, adamw)] == [4, 2]
    assert half.tries[1] == ("optimizer.lr=0.02", "optimizer.rho=0.2")
    assert adamw.tries == (("optimizer.lr=0.003",), ("optimizer.lr=0.009",))
    assert run_study(study.path, executed)
    sweep = read_plan(study.path / "sweep")
    configs = {name: read_config(sweep.folder(name) / "config.json") for name in sweep.names}
    trials = {name: config.trial_seed for name, config in configs.items()}
    assert {trial for name, trial in trials.items() if "tune" in name} == {1000}
    assert {trial for name, trial in trials.items() if "tune" not in name} == {0, 1}
    assert {c.steps for c in configs.values() if c.optimizer.name == "sam"} == {2}
    chosen = {c.optimizer.options["lr"] for n, c in configs.items() if "tune" not in n}
    assert chosen <= {0.02, 0.06, 0.003, 0.009}


def test_claims_may_be_added_but_not_changed(whole: Study, tmp_path: Path) -> None:
    path = shutil.copytree(whole.path, tmp_path / "study")
    with pytest.raises(UserError, match="already contains a study, whose design is fixed"):
        plan_study(path, **DIGITS)
    with pytest.raises(UserError, match="two claims compare 'sgd' and 'adamw'"):
        extend_study(path, [("sgd", "adamw")])
    file = path / "study.json"
    file.write_text(file.read_text().replace('"smallest_effect": 1.0', '"smallest_effect": 2.0'))
    with pytest.raises(UserError, match="does not match its checksum"):
        load_study(path)


def test_a_damaged_ledger_is_named(whole: Study, tmp_path: Path) -> None:
    path = tmp_path / "study"
    path.mkdir()
    shutil.copy(whole.path / "study.json", path)

    def ledger(slot: list[object], accuracy: float | None) -> str:
        rows = [[slot, {"accuracy": accuracy}]]
        return json.dumps({"study": whole.plan.digest, "outcomes": rows})

    text = (whole.path / "outcomes.json").read_text()
    for damage, words in (
        (text.replace('"seconds"', '"sekonds"'), "does not match its checksum"),
        (text[: len(text) // 2], "outcomes.json is damaged"),
        ('{"study": "another"}', "belongs to a study with another design"),
        (json.dumps({"study": whole.plan.digest, "outcomes": [[["run"], {}]]}), "is damaged"),
        (json.dumps({"study": whole.plan.digest, "outcomes": [3]}), "is damaged"),
        (ledger(["run", "sgd", 0, "60"], float("nan")), "row 1, 1.accuracy=nan"),
        (ledger(["run", "sgd", 0, "60"], 500.0), "less than or equal to 100"),
        (ledger(["run", "sgd", 0, "61"], None), "no run of this study is"),
        (ledger(["run", "fad", 0, "60"], None), "no run of this study is"),
    ):
        (path / "outcomes.json").write_text(damage)
        with pytest.raises(UserError, match=words):
            load_study(path)


def test_a_study_is_read_where_nothing_can_be_written(
    whole: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(whole.path, tmp_path / "study")
    (path / "outcomes.json").unlink()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert without_times(load_study(path)) == without_times(whole)
    assert not (path / "outcomes.json").exists()


def test_a_run_that_succeeds_later_counts(whole: Study, tmp_path: Path) -> None:
    path = shutil.copytree(whole.path, tmp_path / "study")
    study = load_study(path)
    slot = next(slot for slot in study.outcomes if slot.kind == "run" and slot.seed == 1)
    failed = {**study.outcomes, slot: Outcome(None, error="diverged")}
    write_outcomes(path, study.plan.digest, failed)
    assert without_times(load_study(path)) == without_times(whole)


def test_a_failed_run_is_run_again_after_a_retry(tmp_path: Path) -> None:
    """It had ended the study's only claim; all other results were kept."""
    path = tmp_path / "study"
    settings = {**DIGITS, "targets": "75", "claims": [("bad", "sgd")], "twins": 0}
    bad = Method(name="bad", optimizer="sgd", overrides=("optimizer.lr=1e30",))
    plan_study(path, **settings, methods=[bad])
    assert run_study(path, executed)
    study = load_study(path)
    assert len(study.outcomes) == 2 * 2
    assert study.state.rulings[0].reason.startswith("failed: bad")
    assert len(retry(read_plan(path / "sweep"))) == 2
    assert [slot.method for slot in load_study(path).state.todo] == ["bad", "bad"]


def test_errors_before_anything_is_written(tmp_path: Path) -> None:
    for changes, words in (
        ({"claims": [("fadd", "sgd")]}, "unknown optimizer 'fadd', did you mean 'fad'"),
        ({"targets": "76"}, "unknown target of RotatedDigits: '76'"),
        ({"smallest_effect": -1.0}, "smallest_effect=-1.0: Input should be greater than 0"),
        ({"overrides": ("stepps=3",)}, "stepps"),
        ({"overrides": ("optimizer=adam",)}, "a study sets 'optimizer' itself"),
        ({"alpha": 2.0}, "alpha=2.0: Input should be less than 1"),
        ({"tune": {"optimzer.lr": [(1.0, True), (3.0, True)]}}, "no method has a number 'optimzer"),
        ({"tune": {"optimizer.rho": [(0.1, False)]}}, "no method has a number 'optimizer.rho'"),
        ({"tune": {"seed": [(1.0, False), (2.0, False)]}}, "a study sets 'seed' itself"),
        ({"claims": [("AdamW", "sgd"), ("adamw", "sgd")]}, "two claims compare"),
        (
            {"methods": [Method(name="mine", optimizer="sgd")]},
            "no claim compares the method 'mine'",
        ),
    ):
        with pytest.raises(UserError, match=words):
            plan_study(tmp_path / "study", **{**DIGITS, **changes})
    assert not list(tmp_path.iterdir())


def test_a_forecast_counts_seeds_and_hours(whole: Study) -> None:
    (need,) = needs(whole, {"": 0.4}, {"adamw": 9.0, "sgd": 9.0})
    assert need.apart.power < 0.2, "three seeds are too few"
    assert need.hours == pytest.approx(3 * 2 * 18 / 3600)
    assert not needs(whole, {}, {})


def test_an_average_starts_where_the_user_says(tmp_path: Path) -> None:
    settings = {**DIGITS, "overrides": (*TINY, "averaging.start=2")}
    study = plan_study(tmp_path / "study", **settings)
    assert not any(method.overrides for method in study.plan.design.methods)


def test_a_pilot_has_few_seeds(whole: Study) -> None:
    values = differences(whole.plan.design, whole.outcomes, whole.plan.claims[0])
    assert spread_of(whole) == {"adamw - sgd": pytest.approx(np.std(values, ddof=1))}
    design = whole.plan.design.model_copy(update={"first_seeds": 7, "max_seeds": 60})
    early = replace(whole, plan=Plan(design=design, digest=design.digest()))
    assert spread_of(early) == spread_of(whole), "before the first look, too"
