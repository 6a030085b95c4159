"""The default learning rates hold against the grids that were measured, and the pages show them."""

from pathlib import Path
from types import ModuleType

import defaults
import pytest
from pages import fill

from steppe.optim import optimizer_spec
from tests.scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that makes the tables of the docs."""
    return load_script(Path(__file__).parents[2] / "docs/defaults.py")


def test_every_default_is_within_two_points_of_the_best_of_its_grid(script):
    found = script.stored()
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
            _, lead, noise = script.verdict(row)
            assert lead <= max(2.0, noise), (name, optimizer)


def test_the_pages_have_the_tables_of_what_is_stored(script):
    texts = [page.read_text() for page in script.PAGES]
    for name, found in script.stored().items():
        (text,) = (text for text in texts if fill(text, {name: "gone"}, "defaults.py") != text)
        assert fill(text, {name: script.table(name, found)}, "defaults.py") == text
