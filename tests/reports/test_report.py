"""What the page is given."""

import itertools
import json

import pytest

from steppe.reports import SELECTIONS, build_report, load_runs, write
from steppe.reports.page import render_page
from steppe.reports.runs import Loaded
from steppe.reports.values import dumps
from tests.reports.trees import DOMAINS, config, record, some_sweep, write_run

KEYS = {
    "title": str,
    "command": str,
    "made": str,
    "versions": dict,
    "selection": str,
    "problems": list,
    "tables": list,
    "across": (dict, type(None)),
    "matrices": list,
    "comparisons": list,
    "answer": list,
    "multiplicity": dict,
    "hours": dict,
    "cost": list,
    "curves": list,
    "sensitivity": list,
    "flatness": list,
    "columns": dict,
    "figures": dict,
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_page_data_has_the_agreed_shape(tmp_path, selection):
    for number, (one, records) in enumerate(some_sweep(0, optimizers=("adam", "fad"))):
        write_run(tmp_path / str(number), one, records)
    report = build_report(load_runs(tmp_path), selection, "steppe report x", "Sweep")
    data = json.loads(json.dumps(report.page_data(), allow_nan=False))
    assert {key: isinstance(data[key], kind) for key, kind in KEYS.items()} == dict.fromkeys(
        KEYS, True
    )
    assert (data["selection"], data["across"]) == (selection, None)
    assert set(data["versions"]) == {"steppe", "torch", "python"}
    (table,) = data["tables"]
    assert table["rows"][0].keys() >= {"cells", "avg", "steps", "runs", "space"}
    (comparison,) = data["comparisons"]
    assert ({comparison["a"], comparison["b"]}, comparison["n"]) == ({"fad", "adam"}, 8)
    assert comparison["low"] < comparison["difference"] < comparison["high"]
    assert [c["name"] for c in data["cost"]] == ["adam", "fad"]
    assert data["cost"][0].keys() == {
        *("dataset", "name", "seconds_per_step", "relative", "passes", "memory_gb"),
        *("accuracy", "err", "trials", "partial", "hours"),
    }
    assert [c["target"] for c in data["curves"]] == list(DOMAINS)
    assert list(table["rows"][1]["cells"]) == list(DOMAINS)
    points = data["sensitivity"][0]["points"]
    assert len(points) == 3 * 2 * 4  # draws, trials, targets: not the runs that hold out two
    assert {p["hparams"]["lr"] for p in points} == {1.0, 0.1, 0.01}
    assert render_page(data).startswith("<!")


def test_curves_are_means_over_the_chosen_runs(tmp_path):
    for trial, draw in itertools.product((0, 1), (0, 1)):
        records = [
            record(s, ("sketch",), lambda d, p, s=s, t=trial, d_=draw: 0.1 * s + 0.2 * t + 0.3 * d_)
            for s in ((0, 1, 2) if trial else (0, 1))
        ]
        for one in records:
            one["loss"] = {"total": 3.0 - trial} if one["step"] else {}
        write_run(tmp_path / f"{trial}{draw}", config(("sketch",), trial, draw), records)
    data = build_report(load_runs(tmp_path)).page_data()
    (curve,) = data["curves"]
    (series,) = curve["series"]
    assert (series["name"], series["steps"], series["runs"]) == ("adam", [0, 1, 2], 2)
    assert series["val"] == pytest.approx([40, 50, 70])  # draw 1 of both trials, then one alone
    assert series["test"] == pytest.approx([40, 50, 70])
    assert series["loss"] == [None, 2.5, 2.0]
    (sensitivity,) = data["sensitivity"]
    points = {(p["trial"], p["choice"]): p for p in sensitivity["points"]}
    assert points.keys() == set(itertools.product((0, 1), ("draw 0", "draw 1")))
    point = points[1, "draw 0"]
    assert point["target"] == "sketch"
    assert (point["accuracy"], point["validation"]) == pytest.approx((40, 40))


def test_no_runs_at_all_make_an_empty_report():
    data = build_report(Loaded((), ())).page_data()
    assert (data["tables"], data["across"], data["comparisons"], data["curves"]) == (
        [],
        None,
        [],
        [],
    )
    assert render_page(data)


def test_what_a_reader_should_know_is_said(tmp_path):
    records = [record(0, ("photo",), lambda d, p: 0.5)]
    write_run(tmp_path / "a", config(("photo",), backbone="resnet18"), records, state="running")
    write_run(tmp_path / "b", config(("photo",), backbone="resnet50"), records)
    write_run(tmp_path / "c", config(("photo",), backbone="resnet50", seed=3), records)
    write_run(tmp_path / "d", config(("photo",), split="appendix"), b"{\n")
    problems = build_report(load_runs(tmp_path)).problems
    wanted = (
        "1 unreadable line (1)",
        "1 run is not finished",
        "1 run is repeated",
        "backbones",
    )
    for text in wanted:
        assert sum(text in problem for problem in problems) == 1, text
    assert len(problems) == 4


def test_what_is_not_in_the_tables_is_said(tmp_path):
    raw = [record(0, ("photo",), lambda d, p: 0.5)]
    for name in ("x", "y"):
        write_run(tmp_path / name, config(("photo",), averaging="swad"), raw)
        write_run(tmp_path / f"{name}-planned", config(("photo",)), b"")
    done = write_run(tmp_path / "sweep" / "result", config(("photo",)), raw)
    (done.parent / "config.json").write_text((done / "config.json").read_text())
    report = build_report(load_runs(tmp_path), "leave-one-out")
    assert [p for p in report.problems if "repeated" not in p] == [
        "2 of 5 runs have no result yet (x-planned, ...); the tables cover the others",
        f"2 runs have no averaged record yet and are left out ({tmp_path / 'x'}, ...)",
        "PACS: 2 of 2 results are missing, because leave-one-out validation needs every run with "
        "one more domain held out; plan them with 'steppe sweep plan ... --targets pairs'",
    ]
    assert not build_report(load_runs(done.parent)).problems


def test_json_has_every_table_and_no_nan(tmp_path):
    """What a strict reader takes, whatever the hyperparameters were."""
    optimizers = ({"name": "adam", "lr": float("nan")}, {"name": "fad", "lr": float("inf")})
    axes = itertools.product(("PACS", "VLCS"), ("ERM", "CORAL"), optimizers)
    for number, (dataset, algorithm, optimizer) in enumerate(axes):
        one = config(("photo",), 0, 1, dataset, algorithm=algorithm, optimizer=optimizer)
        write_run(tmp_path / str(number), one, [record(0, ("photo",), lambda d, p: 0.5)])
    report = build_report(load_runs(tmp_path))

    def refuse(word):
        raise AssertionError(word)

    data = json.loads(write(report, "json"), parse_constant=refuse)
    assert data["selection"] == data["across"]["selection"] == "train-val"
    assert data["across"]["rows"][0]["cells"].keys() == {"PACS", "VLCS"}
    assert [m["dataset"] for m in data["matrices"]] == ["PACS", "VLCS", "all"]
    matrix = data["matrices"][0]
    assert [m["algorithm"] for m in matrix["methods"]] == ["ERM", "CORAL"]
    assert set(matrix["optimizers"]) == {"adam", "fad"}
    assert matrix["cells"][1][1] == {"mean": 50.0, "err": 0.0, "n": 1}
    (best, *_) = json.loads(dumps(report.best), parse_constant=refuse)
    assert (best["hparams"]["lr"], best["config"]["optimizer"]["lr"]) == (None, None)
    assert "\nall,train-val,ERM,adam,none,VLCS,50.0," in write(report, "csv")


def test_the_terminal_cuts_no_number_off(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    names = [f"a-domain-with-a-long-name-{i}" for i in range(12)]
    for trial, target in itertools.product((0, 1), names):
        records = [record(0, (target,), lambda d, p, t=trial: 0.5 + t / 10, names)]
        write_run(tmp_path / f"{trial}{target}", config((target,), trial, 0, "Mine"), records)
    report = build_report(load_runs(tmp_path), "oracle")
    text = write(report, "terminal")
    (line,) = [line for line in text.splitlines() if line.split()[:1] == ["adam"] and "±" in line]
    assert line.count("55.0 ± 3.5") == 12
    assert not any(cut in text for cut in ("…", "..."))
    assert "Cost of a step, selected by validation on the test domain (oracle)" in " ".join(
        text.split()
    )
