"""What the pages say of published runs is what their records give."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACS = DOCS / "results/pacs"
NAMES = {"Adam": "adam", "SGD": "sgd", "SAM": "sam", "GAM": "gam", "FAD": "fad"}


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("publish", DOCS / "results/publish.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PACS / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def means(stored: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(r["optimizer"], r["column"]): r["mean"] for r in stored["results"]}


def test_the_records_give_what_is_stored(tmp_path: Path, stored: dict[str, Any]) -> None:
    _script().publish(tmp_path, stored["environment"])
    made = {file.name for file in tmp_path.iterdir()}
    assert made == {file.name for file in PACS.iterdir()} - {"records.tar.xz"}
    for name in made - {"figure.svg", "results.json"}:
        assert (tmp_path / name).read_text() == (PACS / name).read_text()
    again = json.loads((tmp_path / "results.json").read_text())
    assert again.keys() == stored.keys()
    for key, value in again.items():
        assert _rounded(value) == _rounded(stored[key]), key


def _rounded(value: Any) -> Any:
    """Sums may be taken in another order by another version of numpy."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-9, abs=1e-9)
    if isinstance(value, dict):
        return {key: _rounded(own) for key, own in value.items()}
    return [_rounded(own) for own in value] if isinstance(value, list) else value


def test_all_runs_are_there(stored: dict[str, Any]) -> None:
    assert stored["problems"] == []
    assert {r["trials"] for r in stored["results"]} == {3}
    assert len(stored["results"]) == 5 * (4 + 1)


def test_the_home_page_has_the_averages(stored: dict[str, Any]) -> None:
    home = (DOCS / "index.md").read_text()
    for shown, name in NAMES.items():
        (r,) = [r for r in stored["results"] if (r["optimizer"], r["column"]) == (name, "Avg.")]
        assert f"| {shown} | {r['mean']:.1f} ± {r['err']:.1f} |" in home


@pytest.mark.parametrize(
    "page",
    ["docs/index.md", "docs/results/index.md", "docs/explanation/evidence.md", "README.md"],
)
def test_fad_beside_adam(page: str, stored: dict[str, Any]) -> None:
    (pair,) = [
        p for p in stored["all pairs"] if (p["a"], p["b"]) == ("fad", "adam") and _over(p, 4)
    ]
    low, high = pair["interval"]
    text = " ".join((ROOT / page).read_text().split())
    assert re.search(rf"FAD - Adam (is )?\+{pair['points']:.1f}", text)
    assert f"{low:.1f} to {high:+.1f}" in text


def _over(pair: dict[str, Any], units: int) -> bool:
    return f"interval over {units} " in pair["over"]


def test_what_the_page_says_in_words(
    stored: dict[str, Any], means: dict[tuple[str, str], float]
) -> None:
    page = (DOCS / "results/pacs.md").read_text()
    targets = ("art_painting", "cartoon", "photo", "sketch")
    gains = [means["fad", t] - means["adam", t] for t in targets]
    assert f"({', '.join(f'{g:+.1f}' for g in gains)})" in page
    behind = [means["gam", t] - means["fad", t] for t in targets]
    assert [b > 0 for b in behind] == [False, True, False, True]
    assert f"by {behind[1]:.1f} and {behind[3]:.1f} points" in page
    assert len(stored["all pairs"]) == 20
    clear = [p for p in stored["all pairs"] if p["interval"][0] > 0 or p["interval"][1] < 0]
    assert [(p["a"], p["b"]) for p in clear] == [("fad", "sgd"), ("gam", "sgd")]
    assert all(_over(p, 3) for p in clear)
    lowest = [
        r["lr"] == min(map(float, r["validation"]))
        for r in stored["learning rates"]
        if r["optimizer"] != "adam"
    ]
    assert f"{sum(lowest)} of {len(lowest)} cases" in page
