"""The default learning rates hold against the grids that were measured, and the page shows them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import defaults
import pytest

from steppe.optim import optimizer_spec


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """The script that makes the tables of the docs."""
    path = Path(__file__).parents[2] / "docs" / "defaults.py"
    spec = importlib.util.spec_from_file_location("docs_defaults", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_every_default_is_within_two_points_of_the_best_of_its_grid(page):
    found = page.stored()
    assert set(found) == set(defaults.STUDIES)
    for name, study in defaults.STUDIES.items():
        if study.radius:
            continue
        rows = found[name]
        assert tuple(rows) == study.optimizers
        for optimizer, row in rows.items():
            pretrained = bool(study.backbone)
            default = optimizer_spec(optimizer).defaults(pretrained=pretrained)["lr"]
            expected = [float(f"{default * factor:.4g}") for factor in defaults.FACTORS]
            assert list(map(float, row)) == expected, (name, optimizer)
            assert all(len(values) == defaults.SEEDS for values in row.values())
            _, lead, noise = page.verdict(row)
            assert lead <= max(2.0, noise), (name, optimizer)


def test_the_page_has_the_tables_of_what_is_stored(page):
    text = page.PAGE.read_text()
    for name, found in page.stored().items():
        assert page.write_tables(text, {name: "gone"}) != text
        assert page.write_tables(text, {name: page.table(name, found)}) == text
