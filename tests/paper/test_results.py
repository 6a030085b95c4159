"""What an experiment gave, with the paper's numbers beside ours."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from steppe.paper import lookup, make_order, printed, write_results
from steppe.paper.order import Case, Order, Rate, default_rates, grids as planned
from steppe.paper.results import (
    Results,
    Variant,
    comparisons,
    costs,
    gather,
    lines,
    to_json,
)
from steppe.paper.tables import rates_table, tables
from steppe.reports import Row, select_runs
from steppe.sweeps import read_plan, write_plan
from tests.reports.trees import DOMAINS, config, record, write_run

OURS = {"adam": 0.80, "fad": 0.82, "sgd": 0.70}


def carried_out(tmp_path: Path, order: Order) -> Results:
    """As if all runs had been made: accuracies are known, sketch of trial 1 is 2 points up."""
    sweep = write_plan(planned(order, default_rates(order)), tmp_path / "sweep")
    for name, axes in sweep.axes.items():
        target, trial, optimizer = axes["targets"], axes["trial"], axes["optimizer"]
        extra = 0.02 if (target, trial) == ("sketch", 1) else 0.0
        named = {key: {"name": axes[key]} for key in ("algorithm", "optimizer", "averaging")}
        about = config([target], trial, steps=axes["steps"], **named)

        def accuracy(domain: str, part: str, value: float = OURS[optimizer] + extra) -> float:
            return value

        seconds = 0.04 if optimizer == "fad" else 0.01
        records = [
            record(step, [target], accuracy, seconds_per_step=seconds)
            for step in (0, axes["steps"] - 1)
        ]
        write_run(sweep.folder(name) / "result", about, records)
    return gather(order, sweep, default_rates(order))


@pytest.fixture
def table1(tmp_path: Path) -> Results:
    changes = {"trials": 2, "factors": ()}
    order = make_order("table1", "small", optimizers=["adam", "sgd", "fad"], changes=changes)
    return carried_out(tmp_path, order)


def test_every_cell_has_the_papers_number_beside_it(table1: Results) -> None:
    found = {
        (column, line.method.optimizer): cell
        for line in lines(table1)
        for column, cell in line.cells.items()
    }
    assert len(found) == 3 * (len(DOMAINS) + 1)
    by_cell = {
        (n.target or "Avg.", n.method.optimizer): (n.value, n.line)
        for n in printed()
        if n.table == "table1-pacs"
    }
    for (column, optimizer), (ours, paper) in found.items():
        assert ours is not None
        assert paper is not None
        trials = 0.01 if column == "sketch" else 0.0025 if column == "Avg." else 0.0
        assert ours.mean == pytest.approx(100 * (OURS[optimizer] + trials))
        value, number = by_cell[column, optimizer]
        if (
            column == "Avg."
        ):  # Table 1 itself comes first; it has Adam at 84.2, the appendix at 84.3
            assert paper.lines[0] < 340
        else:
            assert (paper.value, paper.lines) == (value, (number,))
    assert found["sketch", "fad"].ours.err == pytest.approx(1 / 2**0.5)  # type: ignore[union-attr]
    assert found["Avg.", "fad"].ours.err == pytest.approx(0.25 / 2**0.5)  # type: ignore[union-attr]


def test_the_tables_say_so(table1: Results, tmp_path: Path) -> None:
    table, paired = tables(table1)
    assert table.headings == ("method", *DOMAINS, "Avg.")
    assert [line[0].text for line in table.lines] == ["adam", "sgd", "fad"]  # the paper's order
    assert table.lines[2][-1] == ("82.2 ± 0.2 (88.2)", True)
    assert "in parentheses: the paper's" in table.note
    twice = ["fad - adam", "fad - adam", "fad - sgd", "fad - sgd"]  # over targets, over trials
    assert [line[0].text for line in paired.lines] == twice
    compared = comparisons(table1)
    assert [c.unit for c in compared] == ["targets", "trials"] * 2
    assert [c.difference for c in compared] == pytest.approx([2.0, 2.0, 12.0, 12.0])
    write_results(table1, tmp_path, {"gpu": "none"}, "steppe reproduce table1")
    text = (tmp_path / "results.md").read_text()
    assert "| fad | 82.0 ± 0.0 (88.5) |" in text.replace("**", "")
    assert "steppe reproduce table1" in text
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["environment"] == {"gpu": "none"}
    assert stored["results"] == json.loads(json.dumps(to_json(table1)["results"]))
    cell = next(r for r in stored["results"] if (r["column"], r["optimizer"]) == ("photo", "fad"))
    assert (cell["mean"], cell["paper"], cell["paper's lines"]) == (pytest.approx(82), 98.4, [801])


def test_over_trials_only_where_all_are_there(table1: Results) -> None:
    ((arm, selected),) = table1.variants
    rest = [
        run
        for run in selected.runs
        if (run.row.optimizer, run.trial, run.targets) != ("adam", 1, ("photo",))
    ]
    assert len(rest) == len(selected.runs) - 1
    short = replace(table1, variants=(Variant(arm, select_runs(rest, "train-val")),))
    named = [(c.b, c.unit) for c in comparisons(short)]
    assert named == [("adam", "targets"), ("sgd", "targets"), ("sgd", "trials")]


def test_times(tmp_path: Path) -> None:
    changes = {"trials": 1, "factors": ()}
    order = make_order("table3", "small", optimizers=["sgd", "fad"], changes=changes)
    found = carried_out(tmp_path, order)
    spent = {
        arm.steps: cost
        for (dataset, arm, row), cost in costs(found).items()
        if (dataset, row.optimizer) == ("PACS", "fad")
    }
    assert spent[10_000].seconds == pytest.approx(0.04 * 500)
    assert spent[10_000].relative == pytest.approx(4)
    assert spent[10_000].paper is None, "the paper's is of more updates, and a mean over datasets"
    table, compared = tables(found)
    assert table.headings[:2] == ("method", "setting")
    assert [line[1].text for line in table.lines[::2]] == [
        "250 steps, for 5,000",
        "500 steps, for 10,000",
        "750 steps, for 15,000",
    ]
    assert table.lines[1][-2].text == "10"
    assert compared.lines[0][0].text == "fad, 250 steps, for 5,000 - sgd, 250 steps, for 5,000"
    facts = to_json(found)
    assert (facts["steps"], facts["overrides"]) == ([251, 501, 751], [])


def test_domainbeds_numbers_are_beside_nothing() -> None:
    """DomainBed's RSC stands in Table 2 above the paper's own."""
    found = lookup(["table2"], Row("RSC", "adam", "none"), "PACS")
    assert found is not None
    assert (found.value, found.copied) == (84.5, False)
    keys = Counter(
        (n.table, n.dataset, n.target, n.method, n.steps, n.quantity)
        for n in printed()
        if n.source != "DomainBed"
    )
    assert set(keys.values()) == {1}


def test_copied_numbers_are_marked(tmp_path: Path) -> None:
    changes = {"trials": 1, "factors": ()}
    order = make_order("table2", "small", optimizers=["adam"], changes=changes)
    found = carried_out(tmp_path, order)
    (table,) = tables(found)
    by_method = {line[0].text: line[-1].text for line in table.lines}
    assert by_method["DMG adam"].endswith(" (83.4*)")
    assert by_method["CORAL adam"].endswith(")")
    assert "*" not in by_method["CORAL adam"]
    assert "* copied by the paper from the method's own, which used another protocol" in table.note
    copied = {row["algorithm"] for row in to_json(found)["results"] if "copied by the paper" in row}
    assert copied == {"MASF", "DMG", "MetaReg", "ER", "pAdaIN", "EISNet", "DSON"}


def test_a_ratio_is_compared_with_the_other_optimizers(tmp_path: Path) -> None:
    changes = {"trials": 2, "factors": ()}
    order = make_order("figure-ratio", "small", optimizers=["adam", "sgd", "fad"], changes=changes)
    named = [(c.a, c.b, c.unit) for c in comparisons(carried_out(tmp_path, order))]
    ratios = (f"fad, ratio {r}" for r in ("0.05", "0.1", "0.5", "1"))
    expected = itertools.product(ratios, ("adam", "sgd"), ("targets", "trials"))
    assert sorted(named) == sorted(expected)


def test_other_runs_in_the_folder_take_no_part(tmp_path: Path) -> None:
    """What an earlier command left there, with other trials or draws."""
    changes = {"trials": 2, "factors": ()}
    order = make_order("convergence", "small", optimizers=["adam", "fad"], changes=changes)
    carried_out(tmp_path, order)
    fewer = make_order("convergence", "small", optimizers=["fad"], changes={**changes, "trials": 1})
    found = gather(fewer, read_plan(tmp_path / "sweep"), default_rates(fewer))
    assert not found.problems
    assert {line.method.optimizer for line in lines(found)} == {"fad"}
    assert {cell.ours.n for line in lines(found) for cell in line.cells.values()} == {1}


def test_the_papers_mean_is_only_beside_the_same_datasets(tmp_path: Path) -> None:
    order = make_order("table1", "smoke")
    found = Results(order, {}, ())
    from steppe.paper.results import ALL, _paper

    fad = Row("ERM", "fad", "none")
    assert _paper(found, order.arms[0], ALL, "Avg.", fad) is None
    full = Results(make_order("table1", "full"), {}, ())
    beside = _paper(full, order.arms[0], ALL, "Avg.", fad)
    assert beside is not None
    assert beside.value == 67.6


def test_runs_without_a_result_are_counted(tmp_path: Path) -> None:
    order = make_order("convergence", "small", changes={"factors": ()})
    sweep = write_plan(planned(order, default_rates(order)), tmp_path / "sweep")
    found = gather(order, sweep, default_rates(order))
    (problem,) = found.problems
    assert problem.startswith("20 of 20 runs have no result: see: steppe sweep status")
    assert not tables(found)


def test_rates_at_the_edge_of_what_was_tried_are_counted() -> None:
    order = make_order("table1", "small", optimizers=["sgd"])
    tried = {0.1: 50.0, 0.3: 60.0, 1.0: 70.0}

    def note(*chosen: float) -> str:
        rates = {
            Case("PACS", str(i), Row("ERM", "sgd", "none")): Rate(lr, tried)
            for i, lr in enumerate(chosen)
        }
        return rates_table(Results(order, rates, ())).note

    assert note(0.3, 0.3).endswith("of the first trial")
    assert note(0.1, 0.3, 0.1).endswith(
        "; 2 of 3 are the lowest tried (use --factors to try others)"
    )
    both = (
        "; 1 of 2 are the lowest tried; 1 of 2 are the highest tried (use --factors to try others)"
    )
    assert note(0.1, 1.0).endswith(both)
