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
    for name in made - {"figure.svg", "spectra.svg", "results.json"}:
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
    assert {r["trials"] for r in stored["results"]} == {6}
    assert len(stored["results"]) == 5 * (4 + 1)
    measured = stored["curvature"]["methods"]
    assert [len(method["runs"]) for method in measured] == [3] * 5
    for method in measured:
        assert [run["run"][-8:-7] for run in method["runs"]] == ["3", "4", "5"]
    assert stored["curvature"]["notes"] == []  # they have converged, and differ in nothing else


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


def _difference(
    stored: dict[str, Any], a: str, b: str, over: str, trials: str = "all"
) -> tuple[str, str]:
    """The points and the interval, as pages write them."""
    (pair,) = [
        p
        for p in stored["all pairs"]
        if (p["a"], p["b"], p["trials"]) == (a, b, trials)
        and ("trials" in p["over"]) == (over == "trials")
    ]
    low, high = pair["interval"]
    return f"{pair['points']:+.1f}", f"{low:+.1f} to {high:+.1f}"


def test_averages_that_the_evidence_quotes(means: dict[tuple[str, str], float]) -> None:
    averages = ", ".join(f"{shown} {means[name, 'Avg.']:.1f}" for shown, name in NAMES.items())
    assert averages in (DOCS / "explanation/evidence.md").read_text()


def _claims() -> dict[str, str]:
    """The rows of the table of claims, by the claim."""
    page = (DOCS / "results/pacs.md").read_text()
    rows = page.split("## The paper's claims")[1].split("## ")[0].splitlines()
    return {row.split("|")[1].strip(): row for row in rows if row.startswith("| ")}


def _row(words: str) -> str:
    (found,) = [row for claim, row in _claims().items() if words in claim]
    return found


def test_what_the_page_says_of_accuracy(
    stored: dict[str, Any], means: dict[tuple[str, str], float]
) -> None:
    page = (DOCS / "results/pacs.md").read_text()
    ahead = {name: means["fad", "Avg."] - means[name, "Avg."] for name in NAMES.values()}
    best = _row("best average")
    assert f"FAD is first with {means['fad', 'Avg.']:.1f}" in best
    assert f"by {ahead['gam']:.1f} and {ahead['sam']:.1f} points over GAM and SAM" in best
    assert f"by {ahead['sam']:.1f} points over SAM and {ahead['adam']:.1f} over Adam" in page
    low = _difference(stored, "fad", "sam", "trials")[1].split()[0]
    assert f"against SAM it reaches {low}" in best

    targets = ("art_painting", "cartoon", "photo", "sketch")
    gains = [means["fad", t] - means["adam", t] for t in targets]
    adam = _row("better than Adam")
    assert f"({', '.join(f'{g:+.1f}' for g in gains)})" in adam
    assert min(gains) > 0
    sgd = _row("FAD is better than SGD")
    for row, rival in ((adam, "adam"), (sgd, "sgd")):
        for over in ("targets", "trials"):
            points, interval = _difference(stored, "fad", rival, over)
            assert points in row
            assert interval in row
    assert _difference(stored, "fad", "sgd", "trials", "later")[1] in sgd
    points, interval = _difference(stored, "sgd", "adam", "targets")
    assert f"SGD - Adam is {points} ({interval} over the targets)" in _row("Adam is better than")

    ranked = {t: sorted(NAMES, key=lambda n: -means[NAMES[n], t]) for t in targets}
    assert [ranked[t][0] for t in targets[:3]] == ["FAD", "GAM", "FAD"]
    assert ranked["cartoon"][1] == "FAD"
    assert set(ranked["sketch"][:2]) == {"FAD", "GAM"}
    every = _row("every target")
    named = ", ".join(f"{n} {means[NAMES[n], 'cartoon']:.1f}" for n in ("GAM", "FAD"))
    assert f"on cartoon it is second ({named})" in every
    level = {f"{means[name, 'sketch']:.1f}" for name in ("gam", "fad")}
    assert f"level with GAM at {level.pop()}" in every
    assert not level

    lowest = [
        r["lr"] == min(map(float, r["validation"]))
        for r in stored["learning rates"]
        if r["optimizer"] != "adam"
    ]
    assert f"{sum(lowest)} of {len(lowest)} cases" in page


def test_which_differences_exclude_zero(stored: dict[str, Any]) -> None:
    clear = [
        (p["b"], p["trials"], p["over"].split("over ")[1].split(" of")[0])
        for p in stored["all pairs"]
        if (p["interval"][0] > 0 or p["interval"][1] < 0) and p["a"] == "fad"
    ]
    assert sorted(clear) == [
        ("adam", "all", "4 targets"),
        ("adam", "all", "6 trials"),
        ("gam", "all", "6 trials"),
        ("gam", "later", "3 trials"),
        ("sgd", "all", "6 trials"),
        ("sgd", "later", "3 trials"),
    ]
    others = [p for p in stored["all pairs"] if p["a"] != "fad"]
    assert len(others) == 18
    assert all(p["interval"][0] < 0 < p["interval"][1] for p in others)


def test_what_the_page_says_of_flatness(stored: dict[str, Any]) -> None:
    page = (DOCS / "results/pacs.md").read_text()
    by_name = {m["optimizer"]: m for m in stored["curvature"]["methods"]}
    largest = {shown: by_name[name]["lambda_max"]["mean"] for shown, name in NAMES.items()}
    ascending = sorted(largest, key=largest.__getitem__)
    shown = ", ".join(f"{n} {largest[n]:.3g}" for n in ascending)
    assert shown in _row("lower spectra")
    assert sorted(by_name, key=lambda n: by_name[n]["loss"]["mean"])[-2:] == ["fad", "sam"]

    ratios = {(r["rival"], r["quantity"]): r for r in stored["ratios"]}
    clear = {key for key, r in ratios.items() if r["high"] < 1 or r["low"] > 1}
    flat = {(rival, q) for rival in ("adam", "sgd", "gam") for q in ("zeroth", "first")}
    assert clear == flat | {("sgd", "lambda_max")}
    factors = [r["factor"] for key, r in ratios.items() if key in flat and key[0] != "gam"]
    said = f"{min(factors):.2f} to {max(factors):.2f} times those of SGD and Adam"
    assert said in _row("lower spectra")
    lowest = _row("lowest trace")
    for key in (("sam", "lambda_max"), ("sam", "trace"), ("adam", "trace")):
        r = ratios[key]
        owner = "" if key == ("sam", "trace") else f"{key[0].capitalize()}'s ".replace("Sam", "SAM")
        times = f"{r['factor']:.2f} times {owner}({r['low']:.2f} to {r['high']:.2f})"
        assert times in lowest, times

    together = stored["accuracy and curvature"]
    said = {q: f"{r['rank correlation']:.2f}" for q, r in together.items() if q != "accuracy"}
    expected = (
        f"is {said['lambda_max']} for $\\lambda_{{\\max}}$, {said['trace']} for the trace, "
        f"{said['zeroth']} for $R^0$ and {said['first']} for $R^1$"
    )
    assert expected in page
    evidence = (DOCS / "explanation/evidence.md").read_text()
    assert f"(Spearman's {said['zeroth']} and {said['first']})" in evidence
    assert f"nor is $\\lambda_{{\\max}}$ ({said['lambda_max']})" in evidence
    assert all(r["p"] > 0.2 for q, r in together.items() if q != "accuracy")
    held_out = {shown: fmean(together["accuracy"][name]) for shown, name in NAMES.items()}
    ordered = sorted(held_out, key=lambda n: -held_out[n])
    first, *rest = (f"{n} {held_out[n]:.1f}" for n in ordered)
    assert ordered[0] == "SGD"
    assert f"({first.split()[1]}; {', '.join(rest)})" in page


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
    assert set(now) - set(then) == {"--factors", "1,3,10", "--trials", "6"}
