"""Tables as text: the JSON schema, marks for the best, and names that would break out."""

import csv
import io
import json

import pytest
from rich.console import Console

from steppe.errors import UserError
from steppe.reports import Column, Report, Row, build_report, load_runs, register_column, write
from steppe.reports.cells import Cell
from steppe.reports.columns import METHODS
from steppe.reports.differences import Paired
from steppe.reports.render import (
    accuracy_text,
    cost_text,
    matrix_text,
    paired_text,
    to_csv,
    to_latex,
    to_markdown,
    to_terminal,
)
from steppe.reports.tables import Matrix, Selected, StepCost, Table, TableRow
from tests.reports.trees import config, record, write_run

ADAM, FAD = Row("ERM", "adam", "none"), Row("ERM", "fad", "none")
HOSTILE = Row(r"A\input{x}%$&_#^~", "[bold]|*x*<b>", "swad\nnew")


class FakeRun:
    steps, space = 5001, "fad"
    records = ()


def table(*rows):
    return Table("PACS", "oracle", ("art_painting", "photo"), ("A", "P"), rows)


def row(name, first, second, overall=None):
    return TableRow(name, {"art_painting": first, "photo": second}, (FakeRun(),) * 12, overall)


TABLE = table(
    row(ADAM, Cell(80.03125, 1.23456789, 3), Cell(90.0, 0.0, 1)),
    row(FAD, Cell(79.96, 0.5, 3), None, overall=Cell(79.96, 0.5, 3, True)),
)


def printed(rich_table):
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(rich_table)
    return console.file.getvalue()


def test_json_is_the_schema():
    report = Report("", "", Selected((), "oracle", {}, {}), ())
    report.__dict__["tables"] = [TABLE]  # as if they had been made
    found = json.loads(json.dumps(report.to_json()["tables"]))
    assert found == [
        {
            "dataset": "PACS",
            "selection": "oracle",
            "columns": ["art_painting", "photo"],
            "labels": ["art_painting", "photo"],
            "rows": [
                {
                    "algorithm": "ERM",
                    "optimizer": "adam",
                    "averaging": "none",
                    "cells": {
                        "art_painting": {"mean": 80.03125, "err": 1.23456789, "n": 3},
                        "photo": {"mean": 90.0, "err": 0.0, "n": 1},
                    },
                    "avg": 85.015625,
                    "avg_partial": None,
                    "raw": None,
                    "steps": [5001],
                    "runs": 12,
                    "space": "fad",
                },
                {
                    "algorithm": "ERM",
                    "optimizer": "fad",
                    "averaging": "none",
                    "cells": {
                        "art_painting": {"mean": 79.96, "err": 0.5, "n": 3},
                        "photo": None,
                    },
                    "avg": None,
                    "avg_partial": 79.96,
                    "raw": None,
                    "steps": [5001],
                    "runs": 12,
                    "space": "fad",
                },
            ],
        }
    ]


def test_markdown_marks_all_that_look_best():
    lines = to_markdown(accuracy_text(TABLE)).splitlines()
    assert lines[2] == "| optimizer | A | P | Avg. | steps | space | runs |"
    assert lines[4] == "| adam | **80.0 ± 1.2** | **90.0** | **85.0** | 5001 | fad | 12 |"
    assert lines[5] == r"| fad | **80.0 ± 0.5** | – | 80.0\* | 5001 | fad | 12 |"


def test_latex_is_booktabs():
    text = to_latex(accuracy_text(TABLE))
    assert text.splitlines()[1:] == [
        "% * some targets are missing",
        r"\begin{tabular}{lrrrrrr}",
        r"\toprule",
        r"optimizer & A & P & Avg. & steps & space & runs \\",
        r"\midrule",
        r"adam & \textbf{80.0 $\pm$ 1.2} & \textbf{90.0} & \textbf{85.0} & 5001 & fad & 12 \\",
        r"fad & \textbf{80.0 $\pm$ 0.5} & -- & 80.0* & 5001 & fad & 12 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_names_cannot_break_out():
    odd = table(row(HOSTILE, Cell(1.0, 0.0, 1), Cell(1.0, 0.0, 1)))
    latex = to_latex(accuracy_text(odd)).splitlines()[5]
    assert latex.startswith(
        r"A\textbackslash{}input\{x\}\%\$\&\_\#\textasciicircum{}\textasciitilde{} & "
        r"[bold]\textbar{}*x*\textless{}b\textgreater{} & swad new & "
    )
    markdown = to_markdown(accuracy_text(odd)).splitlines()
    assert len(markdown) == 5
    assert r"| \[bold\]\|\*x\*\<b\> | swad new |" in markdown[4]
    assert "[bold]|*x*<b>" in printed(to_terminal(accuracy_text(odd)))


def test_the_terminal_shows_what_is_missing():
    text = printed(to_terminal(accuracy_text(TABLE)))
    assert "PACS, selected by validation on the test domain (oracle)" in text
    adam, fad = (
        next(n for n in text.splitlines() if n.split()[:1] == [o]) for o in ("adam", "fad")
    )
    assert adam.split() == ["adam", "80.0", "±", "1.2", "90.0", "85.0", "5001", "fad", "12"]
    assert fad.split() == ["fad", "80.0", "±", "0.5", "–", "80.0*", "5001", "fad", "12"]


def test_csv_has_a_line_per_cell():
    lines = list(csv.DictReader(io.StringIO(to_csv([TABLE]))))
    assert len(lines) == 6
    assert (lines[0]["target"], lines[0]["mean"], lines[0]["err"]) == (
        "art_painting",
        "80.03125",
        "1.23456789",
    )
    assert (lines[4]["optimizer"], lines[4]["target"], lines[4]["mean"]) == ("fad", "photo", "")
    assert (lines[2]["target"], lines[2]["mean"], lines[2]["runs"]) == ("Avg.", "85.015625", "12")


def test_a_partial_cell_is_marked_and_explained():
    partial, full = Cell(80.0, 1.0, 3, True), Cell(70.0, 1.0, 3)
    text = to_markdown(accuracy_text(table(row(ADAM, partial, full), row(FAD, full, full))))
    assert r"| adam | 80.0 ± 1.0\* | **70.0 ± 1.0** | 75.0\* |" in text
    assert "| fad | **70.0 ± 1.0** | **70.0 ± 1.0** | **70.0** |" in text
    cells = {ADAM: partial, FAD: full}
    matrix = matrix_text(Matrix("PACS", "oracle", (("ERM", "none"),), ("adam", "fad"), cells))
    assert r"| 80.0 ± 1.0\* | **70.0 ± 1.0** |" in to_markdown(matrix)
    cost = cost_text([StepCost("PACS", ADAM, (), 0.1, 1.0, cells[ADAM])])
    for shown in (text, to_markdown(matrix), to_markdown(cost)):
        assert shown.rstrip().endswith(r"\* some targets are missing")


def test_other_tables():
    cells = {ADAM: Cell(80.0, 1.0, 3), FAD: Cell(81.0, 1.0, 3)}
    matrix = Matrix(
        "all", "train-val", (("ERM", "none"), ("CORAL", "swad")), ("adam", "fad"), cells
    )
    lines = to_markdown(matrix_text(matrix)).splitlines()
    assert lines[4:] == ["| ERM | 80.0 ± 1.0 | **81.0 ± 1.0** |", "| CORAL + swad | – | – |"]
    cost = StepCost("PACS", FAD, (), 0.0526, 4.125, cells[FAD])
    assert to_markdown(cost_text([cost])).splitlines()[4] == (
        "| PACS | fad | 52.6 | 4.12 | 4.0 | – | – | 81.0 ± 1.0 |"
    )
    fewer = StepCost("PACS", Row("ERM", "looksam", "none"), (), 0.0526, 1.3, None)
    assert "| 1.2 |" in to_markdown(cost_text([fewer]))  # not 1, as for Adam
    compared = Paired("fad", "adam", 1.5, 0.5, 0.25, 2.75, 0.95, 12, 4, "targets", 4)
    line = to_markdown(paired_text([compared])).splitlines()[4]
    assert line == "| fad - adam | **+1.5** | +0.2 to +2.8 | 12 pairs; interval over 4 targets |"
    assert "fad - adam" in printed(to_terminal(paired_text([compared])))


@pytest.mark.parametrize("show", [to_markdown, to_latex, to_terminal])
def test_empty_tables_are_shown(show):
    assert show(accuracy_text(table()))


def test_a_column_is_declared_once_and_shown_everywhere(tmp_path):
    """From outside the package: one entry, and every format and the page has it."""
    before = len(METHODS)
    try:
        register_column(
            "methods",
            Column(
                "last_loss",
                "last loss",
                lambda row: row.runs[0].records[-1].loss["total"],
                digits=2,
                better="low",
            ),
        )
        for optimizer, loss in (("adam", 0.75), ("fad", 0.5)):
            records = [record(0, ("photo",), lambda d, p: 0.5, loss={"total": loss})]
            write_run(tmp_path / optimizer, config(("photo",), optimizer=optimizer), records)
        report = build_report(load_runs(tmp_path))
        assert "| last loss |" in write(report, "markdown")
        assert "| **0.50** |" in write(report, "markdown")
        assert r"& \textbf{0.50} \\" in write(report, "latex")
        assert "last loss" in write(report, "terminal")
        (_, second, *_) = csv.DictReader(io.StringIO(write(report, "csv")))
        assert second["last_loss"] == "0.75"
        data = json.loads(write(report, "json"))
        assert [row["last_loss"] for row in data["tables"][0]["rows"]] == [0.75, 0.5]
        assert report.page_data()["columns"]["methods"][-1]["heading"] == "last loss"
        with pytest.raises(UserError, match="cannot add a column with key 'last_loss'"):
            register_column("methods", METHODS[-1])
        for key in ("cells", "optimizer", "mean", "dataset", ""):  # what rows have already
            with pytest.raises(UserError, match=f"cannot add a column with key '{key}'"):
                register_column("methods", Column(key, "mine", len))
    finally:
        del METHODS[before:]
