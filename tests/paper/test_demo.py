"""The demo, and an experiment from outside: entries like the others."""

import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steppe.cli import app
from steppe.errors import UserError
from steppe.optim import optimizer_spec
from steppe.paper import EXPERIMENTS, make_order, register_experiment, reproduce, write_results
from steppe.paper.catalog import DEMO
from steppe.paper.tables import tables
from steppe.sweeps import Job, read_plan
from steppe.training import RunDirectory, select
from tests.paper.test_reproduce import carry_out

ROOT = Path(__file__).parents[2]


def test_the_demo_from_end_to_end(tmp_path: Path) -> None:
    """Real runs of every optimizer, whose numbers are those of the table and the page."""
    changes = {"share": 0.01, "only": 2}
    order = make_order("demo", "small", datasets=["RotatedDigits"], changes=changes)
    found = reproduce(order, tmp_path, carry_out)
    write_results(found, tmp_path, {})
    table = tables(found)[0]
    assert table.headings == ("method", "0", "15", "Avg.", "passes", "ms/step")
    lines = {line[0].text: [cell.text for cell in line] for line in table.lines}
    assert list(lines) == list(DEMO)
    sweep = read_plan(tmp_path)
    for name, line in lines.items():
        runs = [
            RunDirectory(Job(sweep.folder(run)).result)
            for run, axes in sweep.axes.items()
            if (axes["optimizer"], axes["targets"]) == (name, "0")
        ]
        assert [run.state for run in runs] == ["done"] * 2
        best = [select(run.records()) for run in runs]
        accuracies = [100 * record["domains"]["0"]["test"]["accuracy"] for record in best]
        error = statistics.pstdev(accuracies) / 2**0.5
        assert line[1] == f"{statistics.mean(accuracies):.1f} ± {error:.1f}"
        assert line[-2] == f"{optimizer_spec(name).passes:.1f}"
        config = runs[0].config()
        assert {key: config.optimizer.options[key] for key in DEMO[name]} == DEMO[name]
    page = (tmp_path / "report.html").read_text()
    assert '"figures":{"accuracy of the optimizers on built-in drawings' in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    reproduce(order, tmp_path, None)  # type: ignore[arg-type]  # nothing is left to be carried out


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def reached(order: object, folder: Path, *_: object, **__: object) -> None:
        given.append((order, folder))
        raise RuntimeError("run")

    monkeypatch.setattr("steppe.paper.reproduce", reached)
    with pytest.raises(RuntimeError, match="run"):
        CliRunner().invoke(app, ["demo", "--out", str(tmp_path)], catch_exceptions=False)
    ((order, folder),) = given
    assert folder == tmp_path
    assert (order.datasets, order.scale.trials) == (("Doodles",), 2)
    assert order.steps(order.arms[0], "Doodles") == 201


def test_an_experiment_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the guide, as a plugin: planned, carried out and shown by its name."""
    guide = (ROOT / "docs/guide/reproduce.md").read_text()
    code = guide.split("## An experiment of your own")[1].split("```python\n")[1].split("```")[0]
    (tmp_path / "my_experiments.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    smoke = ("reproduce", "radius", "--plugin", "my_experiments", "--scale", "smoke")
    try:
        result = CliRunner().invoke(app, [*smoke, "--plan"], catch_exceptions=False)
        assert "3 runs planned" in result.stdout
        order = make_order("radius", "smoke", options={"plugins": ["my_experiments"]})
        found = reproduce(order, Path("reproduce/radius-smoke"), carry_out)
        table = tables(found)[0]
        assert [line[1].text for line in table.lines] == ["rho 0.01", "rho 0.05", "rho 0.1"]
        assert table.headings[-1] == "ms/step"
        register_experiment(EXPERIMENTS["radius"])  # as when a notebook's cell runs again
        with pytest.raises(UserError, match="experiment 'table1' already exists"):
            register_experiment(EXPERIMENTS["Table1"])
    finally:
        EXPERIMENTS._table.pop("radius", None)
