"""The default learning rates hold against the grids that were measured, and the page shows them."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from steppe.optim import optimizer_names, optimizer_spec

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    """`benchmarks/defaults.py` and `radius.py`, which imports the first by that name."""
    found: dict[str, ModuleType] = {}
    for name in ("defaults", "radius"):
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        found[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    yield found
    for name in found:
        del sys.modules[name]


def test_every_default_is_within_two_points_of_the_best_of_its_grid(scripts):
    defaults = scripts["defaults"]
    found = defaults.stored()
    assert list(found) == list(defaults.STUDIES)
    for name, rows in found.items():
        study = defaults.STUDIES[name]
        assert tuple(rows) == (study.optimizers or optimizer_names())
        for optimizer, row in rows.items():
            pretrained = name in defaults.BACKBONES
            default = optimizer_spec(optimizer).defaults(pretrained=pretrained)["lr"]
            expected = [float(f"{default * factor:.4g}") for factor in defaults.FACTORS]
            assert list(map(float, row)) == expected, (name, optimizer)
            assert all(len(values) == defaults.SEEDS for values in row.values())
            _, lead, noise = defaults.verdict(row)
            assert lead <= max(2.0, noise), (name, optimizer)


def test_the_page_has_the_tables_of_what_is_stored(scripts):
    defaults, radius = scripts["defaults"], scripts["radius"]
    page = defaults.PAGE.read_text()
    studies = json.loads(radius.STORED.read_text())["studies"]
    tables = {name: defaults.table(rows) for name, rows in defaults.stored().items()}
    tables |= {f"radius-{name}": radius.table(found) for name, found in studies.items()}
    for name, table in tables.items():
        assert defaults.write_tables(page, {name: "gone"}) != page
        assert defaults.write_tables(page, {name: table}) == page
