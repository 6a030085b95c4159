"""The tables of the pages on algorithms are what the registry and the records say."""

from pathlib import Path

from pages import fill

from tests.scripts import load_script

ROOT = Path(__file__).parents[2]
SCRIPT = load_script(ROOT / "docs/algorithms.py")
TABLES = SCRIPT.tables()
"""Now, before the guide's own example adds an algorithm."""


def test_the_pages_have_the_tables() -> None:
    texts = [page.read_text() for page in SCRIPT.PAGES]
    for name, table in TABLES.items():
        (text,) = (t for t in texts if fill(t, {name: "gone"}, "algorithms.py") != t)
        assert fill(text, {name: table}, "algorithms.py") == text, "run 'make results'"


def test_the_registrys_costs_are_those_of_the_record() -> None:
    found = SCRIPT.measured("algorithms-cpu.json")
    costs = {name: SCRIPT.algorithm_spec(name).cost for name in found}
    assert costs == {name: round(ratio, 2) for name, ratio in found.items()}
    # CLIPood's backbone is not the ResNet-18 that the others are timed on.
    assert costs.keys() == set(SCRIPT.algorithm_names()) - {"CLIPood"}
