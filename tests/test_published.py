"""What the pages say of published runs is what their records give."""

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import scipy.stats

from tests.scripts import load_script

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACS = DOCS / "results/pacs"
NAMES = {"Adam": "adam", "SGD": "sgd", "SAM": "sam", "GAM": "gam", "FAD": "fad"}


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PACS / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def means(stored: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(r["optimizer"], r["column"]): r["mean"] for r in stored["results"]}


def test_the_records_give_what_is_stored(tmp_path: Path, stored: dict[str, Any]) -> None:
    load_script(DOCS / "results/publish.py").publish(tmp_path, stored["environment"])
    made = {file.name for file in tmp_path.iterdir()}
    assert made == {file.name for file in PACS.iterdir()} - {"records.tar.xz", "first-try.tar.xz"}
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
    ("page", "pairs"),
    {
        "README.md": ["adam"],
        "docs/index.md": ["adam"],
        "docs/results/index.md": ["adam", "sgd"],
        "docs/explanation/evidence.md": ["adam"],
    }.items(),
)
def test_differences_that_pages_quote(page: str, pairs: list[str], stored: dict[str, Any]) -> None:
    text = " ".join((ROOT / page).read_text().split())
    for rival in pairs:
        points, interval = _difference(stored, "fad", rival, "targets")
        shown = {name: label for label, name in NAMES.items()}[rival]
        quoted = rf"FAD - {shown}( is)? {re.escape(points)}.{{0,40}}{re.escape(interval)}"
        assert re.search(quoted, text), quoted


def _difference(stored: dict[str, Any], a: str, b: str, over: str) -> tuple[str, str]:
    """The points and the interval, as pages write them."""
    (pair,) = [
        p
        for p in stored["all pairs"]
        if (p["a"], p["b"]) == (a, b) and ("trials" in p["over"]) == (over == "trials")
    ]
    low, high = pair["interval"]
    return f"{pair['points']:+.1f}", f"{low:+.1f} to {high:+.1f}"


def test_averages_that_the_evidence_quotes(means: dict[tuple[str, str], float]) -> None:
    averages = ", ".join(f"{shown} {means[name, 'Avg.']:.1f}" for shown, name in NAMES.items())
    assert averages in (DOCS / "explanation/evidence.md").read_text()


def test_what_the_page_says_in_words(
    stored: dict[str, Any], means: dict[tuple[str, str], float]
) -> None:
    page = (DOCS / "results/pacs.md").read_text()
    claims = {line.split("|")[1].strip(): line for line in page.splitlines() if "| FAD " in line}

    best = next(line for claim, line in claims.items() if "best average" in claim)
    ahead = [means["fad", "Avg."] - means[name, "Avg."] for name in ("gam", "sam")]
    assert f"FAD is first with {means['fad', 'Avg.']:.1f}" in best
    assert f"by {ahead[0]:.1f} and {ahead[1]:.1f} points" in best
    for rival in ("Adam", "SGD"):
        line = next(line for claim, line in claims.items() if f"better than {rival}" in claim)
        points, over_targets = _difference(stored, "fad", rival.lower(), "targets")
        assert points in line
        if rival == "SGD":
            assert over_targets in line
            assert _difference(stored, "fad", "sgd", "trials")[1] in line
    targets = ("art_painting", "cartoon", "photo", "sketch")
    gains = [means["fad", t] - means["adam", t] for t in targets]
    assert f"({', '.join(f'{g:+.1f}' for g in gains)})" in page

    every = next(line for claim, line in claims.items() if "every target" in claim)
    ranked = {t: sorted(NAMES, key=lambda n: -means[NAMES[n], t]) for t in targets}
    assert [ranked[t].index("FAD") for t in targets] == [0, 3, 0, 1]
    named = ", ".join(f"{n} {means[NAMES[n], 'cartoon']:.1f}" for n in ranked["cartoon"][:4])
    assert f"on cartoon it is fourth ({named})" in every
    assert f"second to GAM by {means['gam', 'sketch'] - means['fad', 'sketch']:.1f}" in every

    assert len(stored["all pairs"]) == 20
    clear = [p for p in stored["all pairs"] if p["interval"][0] > 0 or p["interval"][1] < 0]
    assert [(p["a"], p["b"]) for p in clear] == [("fad", "sgd"), ("gam", "sgd")]
    assert all("3 trials" in p["over"] for p in clear)
    lowest = [
        r["lr"] == min(map(float, r["validation"]))
        for r in stored["learning rates"]
        if r["optimizer"] != "adam"
    ]
    assert f"{sum(lowest)} of {len(lowest)} cases" in page


def test_two_draws_and_twenty_of_the_tutorial() -> None:
    """By the paired t-test over targets, from the numbers that were kept."""
    kept = json.loads((DOCS / "results/digits.json").read_text())
    assert "--draws 20 --space fair --steps 101" in kept["environment"]["command"]
    evidence = _rows("explanation/evidence.md")
    tutorial = _rows("tutorial.md")
    for column, (draws, found) in enumerate(kept["draws"].items()):
        by_place = {(a["optimizer"], a["target"], a["trial"]): a for a in found["accuracy"]}
        targets = sorted({target for _, target, _ in by_place})
        assert (found["runs"], len(by_place)) == (36 * int(draws), 36)
        assert {a["draw"] for a in found["accuracy"]} <= set(range(int(draws)))
        for rival in ("Adam", "SGD"):
            fad, other = (
                [fmean(by_place[name, t, trial]["accuracy"] for trial in (0, 1)) for t in targets]
                for name in ("fad", rival.lower())
            )
            interval = scipy.stats.ttest_rel(fad, other).confidence_interval(0.95)
            # To a digit: one of them is half way between two.
            expected = pytest.approx([fmean(fad) - fmean(other), *interval], abs=0.05 + 1e-9)
            assert evidence[f"FAD - {rival}"][3 * column :][:3] == expected
            if draws == "2":
                assert tutorial[f"fad - {rival.lower()}"] == expected
            elif rival == "Adam":
                prose = (DOCS / "tutorial.md").read_text()
                assert f"({interval.low:+.1f} to {interval.high:+.1f})" in prose


def _rows(page: str) -> dict[str, list[float]]:
    """The numbers of the rows of a page's tables, by the first cell."""
    cells = re.findall(r"^\| (.+?) \|(.*)\|$", (DOCS / page).read_text(), re.MULTILINE)
    return {name: [float(n) for n in re.findall(r"[+-]\d+\.\d", rest)] for name, rest in cells}


def test_the_command_is_the_one_that_made_them(stored: dict[str, Any]) -> None:
    page = " ".join((DOCS / "results/pacs.md").read_text().replace("\\\n", " ").split())
    assert stored["command now"] in page
    then, now = stored["environment"]["command"].split(), stored["command now"].split()
    assert set(now) - set(then) == {"--factors", "1,3,10"}
