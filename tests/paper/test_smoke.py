"""Every experiment, from beginning to end, at its smallest."""

import json
from pathlib import Path

import pytest

from steppe.paper import EXPERIMENTS, make_order, reproduce, write_results
from steppe.sweeps import Sweep, work
from tests.paper.test_reproduce import carry_out


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke(tmp_path: Path, name: str) -> None:
    # One table with several datasets is enough: those of the others are made alike.
    order = make_order(name, "smoke", datasets=() if name == "table1" else ("RotatedDigits",))
    found = reproduce(order, tmp_path, carry_out)
    assert not found.problems
    files = {path.name for path in write_results(found, tmp_path, {})}
    assert files >= {"results.json", "results.md", "report.html"}
    stored = json.loads((tmp_path / "results.json").read_text())
    cells = [cell for cell in stored["results"] if cell["column"] != "Avg."]
    wanted = {o for arm in order.arms for o in arm.optimizers}
    assert {cell["optimizer"] for cell in cells} == wanted
    assert all(0 <= cell["mean"] <= 100 for cell in cells)
    if EXPERIMENTS[name].figure:
        assert "figure.svg" in files
    if EXPERIMENTS[name].curvature:
        assert "spectra.svg" in files
        assert {m["optimizer"] for m in stored["curvature"]["methods"]} == wanted

    def nothing_left(sweep: Sweep) -> bool:
        assert work(sweep.path, "cpu", 1, 60.0, None) == 0
        return True

    assert reproduce(order, tmp_path, nothing_left).variants == found.variants


def test_flatness_is_measured_with_one_radius(tmp_path: Path) -> None:
    """Whatever the optimizers' own: that of FAD is drawn at full scale."""
    given = {"optimizers": ["sam", "fad"], "overrides": ["optimizer.rho=0.2"]}
    found = reproduce(make_order("figure-hessian", "smoke", **given), tmp_path, carry_out)
    assert found.curvature is not None
    assert found.curvature.rho == 0.05
