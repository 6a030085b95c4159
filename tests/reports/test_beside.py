"""Runs and sweeps beside each other."""

import itertools
import json

import pytest
from typer.testing import CliRunner

from steppe.cli import app
from steppe.errors import UserError
from steppe.reports import build_report, load_runs
from steppe.reports.beside import compare_runs
from tests.reports.trees import DOMAINS, config, record, write_run


def run(folder, value, target="photo", trial=0, optimizer="sgd", **more):
    options = {"name": optimizer, "lr": 0.1} | more
    found = [record(s, (target,), lambda d, p: value if p == "test" else 0.5) for s in (0, 1)]
    return write_run(folder, config((target,), trial, optimizer=options), found)


def test_two_runs(tmp_path):
    a = run(tmp_path / "a", 0.5)
    b = run(tmp_path / "b", 0.625, optimizer="sam", rho=0.05)
    found = compare_runs([b, a])
    assert found.answer == [
        "a (sgd) is 12.5 points below b (sam); one target and one seed give no interval, so it may "
        "be chance."
    ]
    data = found.to_json()
    assert [row["name"] for row in data["rows"]] == ["b (sam)", "a (sgd)"]
    assert [row["avg"] for row in data["rows"]] == [62.5, 50.0]
    assert data["settings"] == {
        "optimizer.name": {"b (sam)": "sam", "a (sgd)": "sgd"},
        "optimizer.rho": {"b (sam)": "0.05", "a (sgd)": "–"},
    }
    (pair,) = data["comparisons"]
    assert (pair["difference"], pair["low"], pair["verdict"]) == (-12.5, None, "no interval")


def test_equal_differences_give_no_interval(tmp_path):
    for trial in range(3):
        run(tmp_path / f"old/{trial}", 0.5, trial=trial)
        run(tmp_path / f"new/{trial}", 0.6, trial=trial)
    assert compare_runs([tmp_path / "old", tmp_path / "new"]).answer == [
        "new (sgd) is 10.0 points above old (sgd); the differences do not vary, so there is no "
        "interval, and it may be chance."
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.5, "b (sgd) and a (sgd) are equally accurate;"),
        (0.5004, "b (sgd) is less than 0.1 points above a (sgd);"),
        (0.4996, "b (sgd) is less than 0.1 points below a (sgd);"),
    ],
)
def test_a_difference_that_rounds_to_zero_is_in_words(tmp_path, value, said):
    (sentence,) = compare_runs([run(tmp_path / "a", 0.5), run(tmp_path / "b", value)]).answer
    assert sentence.startswith(said)


def test_methods_without_a_counterpart_are_named(tmp_path):
    for side, names in {"old": ("sgd", "adam"), "new": ("adam", "sam")}.items():
        for name in names:
            run(tmp_path / side / name, 0.5, optimizer=name)
    first, *rest = compare_runs([tmp_path / "old", tmp_path / "new"]).answer
    assert first.startswith("new: adam and old: adam")
    assert rest == [
        "old: sgd has no counterpart, so it is not compared.",
        "new: sam has no counterpart, so it is not compared.",
    ]


def test_runs_that_do_not_pair_are_shown_without_a_difference(tmp_path):
    a, b = run(tmp_path / "a", 0.5), run(tmp_path / "b", 0.6, trial=1)
    found = compare_runs([a, b])
    assert found.to_json()["comparisons"] == []
    assert found.answer == [
        "b (sgd) and a (sgd) share no target and trial seed, so there is no paired difference."
    ]
    assert "60.0" in found.to_terminal()


def test_sweeps_are_paired_method_by_method(tmp_path):
    gains = {"sgd": 0.0, "sam": 0.05}
    for (name, gain), target, trial in itertools.product(gains.items(), DOMAINS, range(3)):
        noise = 0.002 * (trial - 0.9)
        run(tmp_path / f"old/{name}-{target}-{trial}", 0.5, target, trial, name)
        run(tmp_path / f"new/{name}-{target}-{trial}", 0.5 + gain + noise, target, trial, name)
    data = compare_runs([tmp_path / "old", tmp_path / "new"]).to_json()
    named = [(pair["a"], pair["b"]) for pair in data["comparisons"]]
    assert named == [("new: sam", "old: sam"), ("new: sgd", "old: sgd")]
    sam, sgd = data["comparisons"]
    assert (sam["verdict"], sam["seeds"], sam["n"]) == ("significant", 3, 12)
    assert sgd["verdict"] == "statistically tied"
    assert data["multiplicity"]["tests"] == 2
    # A single run is compared with every method, where it pairs.
    one = tmp_path / "old/sgd-photo-0"
    named = [pair["a"] for pair in compare_runs([one, tmp_path / "new"]).to_json()["comparisons"]]
    assert named == ["new: sam", "new: sgd"]


def test_settings_of_a_search_fit_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for draw in range(20):
        more = {"lr": 0.01 / (draw + 3), "nesterov": draw > 9, "betas": [0.9, draw]}
        run(tmp_path / f"search/{draw}", 0.5, trial=draw, **more)
    found = compare_runs([tmp_path / "search", run(tmp_path / "one", 0.6)])
    lines = found.to_terminal().partition("Settings")[2].splitlines()
    assert max(map(len, lines)) <= 80
    (rate,) = [line for line in lines if "optimizer.lr" in line]
    assert "0.000455 to 0.00333 (20 values)" in rate
    assert any("20 values" in line for line in lines if "optimizer.betas" in line)
    assert any("false, true" in line for line in lines if "optimizer.nesterov" in line)
    told = found.to_json()["settings"]["optimizer.lr"]
    assert str(0.01 / 3) in told["search (sgd)"]
    assert told["one (sgd)"] == "0.1"


def test_names_are_as_short_as_they_can_be(tmp_path):
    found = compare_runs([run(tmp_path / "x/run", 0.5), run(tmp_path / "y/run", 0.6)])
    assert [row["name"] for row in found.to_json()["rows"]] == ["x/run (sgd)", "y/run (sgd)"]


def test_too_little_to_compare_is_refused(tmp_path):
    a = run(tmp_path / "a", 0.5)
    with pytest.raises(UserError, match="two or more"):
        compare_runs([a])
    with pytest.raises(UserError, match="named twice"):
        compare_runs([a, tmp_path / "x" / ".." / "a"])
    write_run(tmp_path / "b", config(("photo",)), b"")
    with pytest.raises(UserError, match="none of the runs has a record yet"):
        compare_runs([a, tmp_path / "b"])


def test_the_command(tmp_path):
    paths = [str(run(tmp_path / "a", 0.5)), str(run(tmp_path / "b", 0.6))]
    shown = CliRunner().invoke(app, ["compare", *paths], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "b (sgd) is 10.0 points above a (sgd)" in shown.stdout
    data = json.loads(CliRunner().invoke(app, ["compare", *paths, "--json"]).stdout)
    assert data["comparisons"][0]["difference"] == pytest.approx(10)


def test_a_step_takes_as_long_as_in_the_report(tmp_path):
    for trial, seconds in enumerate((0.010, 0.020)):
        records = [
            record(s, ("photo",), lambda d, p: 0.5, seconds_per_step=seconds) for s in (0, 1)
        ]
        one = config(("photo",), trial, optimizer={"name": "sgd", "lr": 0.1})
        write_run(tmp_path / "many" / str(trial), one, records)
    data = compare_runs([tmp_path / "many", run(tmp_path / "a", 0.5)]).to_json()
    (cost,) = build_report(load_runs(tmp_path / "many")).cost
    assert data["rows"][0]["seconds_per_step"] == cost.seconds_per_step == pytest.approx(0.015)
