"""Advice from start to end: on a tiny budget, resumed, and in words."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steppe.cli import app
from steppe.errors import RunError, UserError
from steppe.study import Advice, advise
from steppe.study.advice import advising
from steppe.study.advice.advising import fitted, ranked
from steppe.study.advice.extent import EXTENTS, FULL
from steppe.study.advice.indicators import INDICATORS
from steppe.study.advice.ranking import fit
from steppe.study.advice.table import SHIPPED, Table, read_table
from steppe.sweeps import Crew, Status, Sweep, Worker, look
from tests.study.advice.simulated import table as simulated

pytestmark = pytest.mark.usefixtures("plugin")

TASK, PLUGIN = "rotations-few", {"plugins": ("steppe.domains.tasks",)}
SMALL = ("--plugin", *PLUGIN["plugins"], "--set", "batch_size=4")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run sweeps in this process; returns how many runs each sweep had left."""
    counts: list[int] = []

    def run(sweep: Sweep, *, crew: Crew, show: Callable[[Status], None]) -> Status:
        counts.append(look(sweep).counts["planned"])
        Worker(sweep, "cpu").work()
        show(look(sweep))
        return look(sweep)

    monkeypatch.setattr(advising, "run_sweep", run)
    # As in the real ones, the smallest extent's short runs are as long as a warm-up.
    monkeypatch.setattr(advising, "FULL", replace(FULL, warm_up=3))
    least = replace(EXTENTS[-1], steps=3, warm_up=3)
    monkeypatch.setattr(advising, "EXTENTS", (FULL, least))
    return counts


def test_advice_on_a_tiny_budget_and_resumed(tmp_path: Path, in_process: list[int]) -> None:
    phases: list[tuple[str, int, int]] = []
    out = tmp_path / "runs"
    found = advise(
        TASK,
        target="60",
        budget=1.0,
        options=PLUGIN,
        overrides=("batch_size=4",),
        crew=Crew(workers=1),
        out=out,
        show=lambda *progress: phases.append(progress),
    )
    assert in_process == [3, 8]  # a warm-up per source; four optimizers on two left-out domains
    assert [phase for phase, *_ in dict.fromkeys((p[0],) for p in phases)] == [
        "warm-up", "short runs", "indicators",
    ]  # fmt: skip
    assert set(found.indicators) == {one.name for one in INDICATORS}
    assert sum(row.probability for row in found.ranking) == pytest.approx(1)
    assert [row.gain for row in found.ranking] == sorted(r.gain for r in found.ranking)[::-1]
    assert {row.gain for row in found.ranking if row.optimizer == found.baseline} == {0.0}
    assert {row.optimizer: row.rate for row in found.ranking}["fad"] == 1.0
    assert any(
        "the budget allows 3 updates, 1 learning rate and 1 seed, with 2" in n
        for n in found.notes()
    )
    again = advise(
        TASK, target="60", budget=1.0, options=PLUGIN, overrides=("batch_size=4",), out=out
    )
    assert in_process == [3, 8, 0, 0]
    assert (again.indicators, again.ranking) == (found.indicators, found.ranking)
    json.dumps(found.to_json(), allow_nan=False)


def test_an_interrupted_run_resumes_with_the_extent_it_had(
    tmp_path: Path, in_process: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the short runs must not run, and take the budget, as a warm-up."""
    monkeypatch.setattr(advising, "fitting", lambda *args: advising.EXTENTS[-1])
    run = advising.run_sweep

    def interrupted(sweep: Sweep, **rest: Any) -> Status:
        if len(in_process) == 1:
            raise KeyboardInterrupt
        return run(sweep, **rest)

    monkeypatch.setattr(advising, "run_sweep", interrupted)
    again = partial(
        advise, TASK, target="60", options=PLUGIN, overrides=("batch_size=4",), out=tmp_path / "o"
    )
    with pytest.raises(KeyboardInterrupt):
        again()
    monkeypatch.setattr(advising, "run_sweep", run)
    again()
    assert in_process == [3, 0, 8]


def test_runs_that_all_diverge_end_after_the_warm_up(tmp_path: Path, in_process: list[int]) -> None:
    wild = ("batch_size=4", "optimizer.weight_decay=1e30")
    with pytest.raises(RunError, match="every warm-up run diverged"):
        advise(TASK, target="60", budget=9.0, options=PLUGIN, overrides=wild, out=tmp_path / "o")
    assert in_process == [3]


def test_the_command_prints_a_table_and_a_sentence(in_process: list[int], tmp_path: Path) -> None:
    words = ["advise", TASK, "--target", "60", "--budget", "1s", *SMALL]
    words += ["--out", str(tmp_path / "runs")]
    said = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert "Take " in said
    assert "P(best)" in said
    assert "┃ optimizer ┃ P(best) ┃" in said  # not broken in 80 columns
    assert "note: the budget allows 3 updates" in said
    again = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout
    found = json.loads(again)
    assert found["advice"] in said
    assert found["advice"].startswith(f"Take {found['ranking'][0]['optimizer']}: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("RotatedDigits", "--budget", "soon"), "--budget soon: expected a time, such as 90s"),
        (("RotatedDigits", "--budget", "0s"), "budget must be more than 0 seconds, got 0"),
        (("RotatedDigits", "--target", "90"), "unknown target of RotatedDigits: '90'"),
        (("RotatedDigit",), "unknown dataset 'RotatedDigit', did you mean 'RotatedDigits'?"),
        (("RotatedDigits", "--set", "steps=5"), "the short runs set steps themselves"),
        (("RotatedDigits", "--set", "optimizer.lr=1"), "the short runs set optimizer.lr"),
        (("RotatedDigits", "--set", "optimizer.name=sgd"), "the short runs set optimizer.name"),
        (("RotatedDigits", "--set", "sources=75,60"), "the short runs set sources themselves"),
        (("RotatedDigits", "--target", "75", "--target", "60"), "takes one domain, got 75, 60"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, ["advise", *words], catch_exceptions=False)


def test_an_option_that_the_runs_set_is_refused_in_python() -> None:
    with pytest.raises(UserError, match="the short runs set steps themselves"):
        advise("RotatedDigits", options={"steps": 5})


def test_a_large_network_is_refused_before_it_starts(tmp_path: Path) -> None:
    """ResNet-50 on photographs takes a CPU hours: the error names smaller runs."""
    for domain, name in product("abc", "xy"):
        folder = tmp_path / "photos" / domain / name
        folder.mkdir(parents=True)
        (folder / "1.png").touch()
    words = (
        str(tmp_path / "photos"),
        "--weights",
        "none",
        "--budget",
        "1s",
        "--out",
        str(tmp_path / "o"),
    )
    with pytest.raises(UserError, match=r"warm-up runs alone .* budget is 0:00:01: .*small-cnn"):
        CliRunner().invoke(app, ["advise", *words], catch_exceptions=False)
    assert not (tmp_path / "o").exists()


def advice(**values: object) -> Advice:
    """Advice on a simulated table."""
    examples = simulated(2.0, seed=0)
    model = fit(examples, baseline="adamw")
    forecast = model.predict(examples[0].indicators)
    facts = {advising.TRUST: "the regret is 1.0 points"}
    rest = {"outside": (), "slope": 0.5, "informed": True, "extent": FULL, "facts": facts, **values}
    rows = ranked(forecast, {"sam": 3.0})
    return Advice("D", "t", rows, examples[0].indicators, baseline="adamw", seconds=1.0, **rest)  # type: ignore[arg-type]


def test_the_sentence_and_its_notes() -> None:
    found = advice()
    first = found.ranking[0]
    assert found.sentence().startswith(f"Take {first.optimizer}: ")
    assert f"{100 * first.probability:.0f}% likely to be the best of {len(found.ranking)}" in (
        found.sentence()
    )
    assert found.notes() == (f"{advising.TRUST}: the regret is 1.0 points",)
    assert "leads in short runs, of which 50% are" in advice(informed=False).notes()[0]
    uninformed = advice(slope=0.0, informed=False, outside=("trace",)).notes()
    assert uninformed[0].startswith("no indicator predicts reliably")
    assert uninformed[1].startswith("trace: outside the range of the fitted tasks")


def test_a_gain_of_nothing_is_said_with_its_price() -> None:
    found = advice()
    rows = (replace(row, gain=0.04 if row.optimizer == "fad" else 0.0) for row in found.ranking)
    tied = replace(found, ranking=tuple(sorted(rows, key=lambda row: -row.gain)))
    assert tied.notes()[0] == (
        "fad is expected to gain less than 0.1 points, at 4 passes per step: adamw will do"
    )
    assert not any("will do" in note for note in found.notes())


def test_the_shipped_table_is_what_the_command_measures() -> None:
    """Tasks of the plugin, all indicators, ten seeds, and a fit that says how good it is."""
    table: Table = read_table(SHIPPED)
    assert len(table.examples) >= 40
    assert len({one.family for one in table.examples}) >= 10
    for one in table.examples:
        assert set(one.indicators) == {indicator.name for indicator in INDICATORS}
        assert len(one.scores) == 9
        assert {len(scores) for scores in one.scores.values()} == {10}
    assert advising.TRUST in table.facts
    model = fit([fitted(one) for one in table.examples])
    assert model.baseline in model.optimizers
