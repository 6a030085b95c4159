"""What the pages say of published runs is what their records give."""

import json
import re
import tarfile
from datetime import UTC, datetime
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import scipy.stats
import torch

from tests.paper.test_order import PASSES, PRODUCTS
from tests.scripts import load_script

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACS = DOCS / "results/pacs"
LATER = "later seeds alone"
NAMES = {
    "Adam": "adam",
    "AdamW": "adamw",
    "SGD": "sgd",
    "SAM": "sam",
    "GAM": "gam",
    "FAD": "fad",
}
MEASURED = {shown: name for shown, name in NAMES.items() if name != "adamw"}
TARGETS = ("art_painting", "cartoon", "photo", "sketch")
FIGURES = {"figure.svg", "spectra.svg", "effort.svg", "ablation.svg"}


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
    for name in made - FIGURES - {"results.json"}:
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
    assert len(stored["results"]) == len(NAMES) * (4 + 1)
    measured = stored["curvature"]["methods"]
    assert [len(method["runs"]) for method in measured] == [3] * 5
    for method in measured:
        trials = [run["run"].removesuffix("/result")[-1] for run in method["runs"]]
        assert trials == ["3", "4", "5"]
    assert stored["curvature"]["notes"] == []  # they have converged, and differ in nothing else


def test_the_home_page_has_the_averages(stored: dict[str, Any]) -> None:
    home = (DOCS / "index.md").read_text()
    for shown, name in NAMES.items():
        (r,) = [r for r in stored["results"] if (r["optimizer"], r["column"]) == (name, "Avg.")]
        assert f"| {shown} | {r['mean']:.1f} ± {r['err']:.1f} |" in home


@pytest.mark.parametrize(
    ("page", "pairs"),
    {
        "README.md": ["adam", "adamw"],
        "docs/index.md": ["adam", "adamw"],
        "docs/results/index.md": ["adam", "sgd", "adamw"],
        "docs/explanation/evidence.md": ["adam", "adamw"],
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
    stored: dict[str, Any], a: str, b: str, over: str, seeds: str = "all pairs"
) -> tuple[str, str]:
    """The points and the interval, as pages write them."""
    (pair,) = [
        p
        for p in stored[seeds]
        if (p["a"], p["b"]) == (a, b) and ("trials" in p["what"]) == (over == "trials")
    ]
    return f"{pair['difference']:+.1f}", f"{pair['low']:+.1f} to {pair['high']:+.1f}"


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
    assert sorted(ahead, key=ahead.__getitem__)[:2] == ["adamw", "fad"]
    assert f"AdamW is first with {means['adamw', 'Avg.']:.1f}" in best
    assert f"FAD is second with {means['fad', 'Avg.']:.1f}" in best
    assert f"by {ahead['gam']:.1f} and {ahead['sam']:.1f} points over GAM and SAM" in best
    others = [means[name, "Avg."] for name in NAMES.values() if name not in ("adamw", "fad")]
    both = f"AdamW has {means['adamw', 'Avg.']:.1f} ({stored['adamw with both runs']['mean']:.1f} "
    rest = f"count too), FAD {means['fad', 'Avg.']:.1f}, the others {min(others):.1f} to "
    assert both in page
    assert f"{rest}{max(others):.1f}." in page
    adam, sgd = _row("better than Adam,"), _row("FAD is better than SGD by")
    gains = {
        rival: [means["fad", t] - means[rival, t] for t in TARGETS] for rival in NAMES.values()
    }
    for row, rival in ((best, "gam"), (adam, "adam")):
        assert f"({', '.join(f'{g:+.1f}' for g in gains[rival])})" in row
    assert min(gains["adam"]) > 0
    assert gains["sgd"][0] > 0.5 * sum(gains["sgd"])
    assert f"without which it is {fmean(gains['sgd'][1:]):+.1f}" in sgd
    for row, rival in ((adam, "adam"), (sgd, "sgd")):
        for over in ("targets", "trials"):
            points, interval = _difference(stored, "fad", rival, over)
            assert points in row
            assert interval in row
    for row, rival, over in (
        (adam, "adam", "targets"),
        (adam, "adam", "trials"),
        (sgd, "sgd", "trials"),
    ):
        assert _difference(stored, "fad", rival, over, LATER)[1] in row
    for other in ("README.md", "docs/index.md", "docs/results/index.md"):
        later = _difference(stored, "fad", "adam", "targets", LATER)[1]
        assert f"{later} with the" in (ROOT / other).read_text()
    points, interval = _difference(stored, "sgd", "adam", "targets")
    assert f"SGD - Adam is {points} ({interval} over the targets)" in _row("Adam is better than")

    ranked = {t: sorted(NAMES, key=lambda n: -means[NAMES[n], t]) for t in TARGETS}
    assert [ranked[t][0] for t in TARGETS] == ["FAD", "GAM", "AdamW", "AdamW"]
    assert ranked["cartoon"][1] == "FAD"
    every = _row("every target")
    named = ", ".join(f"{n} {means[NAMES[n], 'cartoon']:.1f}" for n in ("GAM", "FAD"))
    assert f"on art_painting; on cartoon it is second ({named})" in every
    both = [[f"{means[n, t]:.1f}" for t in ("photo", "sketch")] for n in ("adamw", "fad")]
    assert f"AdamW is first ({' and '.join(both[0])}; FAD {' and '.join(both[1])})" in every

    lowest = [
        r["lr"] == min(map(float, r["validation"]))
        for r in stored["learning rates"]
        if r["optimizer"] in ("sgd", "sam", "gam", "fad")
    ]
    assert f"{sum(lowest)} of {len(lowest)} cases" in page


def test_which_differences_exclude_zero(stored: dict[str, Any]) -> None:
    page = (DOCS / "results/pacs.md").read_text()

    def clear(seeds: str) -> set[tuple[str, str, str]]:
        return {
            (p["a"], p["b"], "trials" if "trials" in p["what"] else "targets")
            for p in stored[seeds]
            if p["low"] > 0 or p["high"] < 0
        }

    assert clear("all pairs") == {
        ("fad", "adam", "targets"),
        ("fad", "adam", "trials"),
        ("fad", "gam", "trials"),
        ("fad", "sgd", "trials"),
        ("adamw", "adam", "targets"),
        *(("adamw", name, "trials") for name in ("adam", "gam", "sam", "sgd")),
    }
    assert len(stored["all pairs"]) == 30
    assert "nine of the thirty on the left" in page
    assert clear(LATER) == {
        ("fad", "sam", "targets"),
        ("fad", "gam", "trials"),
        ("fad", "sgd", "trials"),
    }
    p = stored["p after Holm"]["over trials"]
    tenth = [f"{p[pair]:.2f}" for pair in ("adamw - sgd", "fad - adam", "adamw - adam")]
    assert tenth == ["0.10"] * 3
    assert (
        f"corrected over the fifteen pairs (Holm's method), p over seeds is {p['fad - sgd']:.3f} "
        f"for FAD - SGD, {p['adamw - gam']:.2f} for AdamW - GAM, 0.10 for AdamW - SGD, FAD - Adam "
        "and AdamW - Adam, 0.2 and more for the others"
    ) in page
    assert len(p) == 15
    assert sorted(p.values())[5] > 0.2
    assert min(stored["p after Holm"]["over targets"].values()) > 0.3
    assert "over targets none is below 0.3" in page
    assert [pair for pair, value in p.items() if value < 0.05] == ["fad - sgd", "adamw - gam"]
    for rival, sign, said in (
        ("fad", -1, "AdamW's lead over FAD, {} points in the first three seeds, is {} in the"),
        ("adam", 1, "its lead over Adam goes from {} to {}"),
    ):
        pair = ("fad", "adamw") if rival == "fad" else ("adamw", "adam")
        leads = [
            sign * float(_difference(stored, *pair, "trials", seeds)[0])
            for seeds in ("first seeds alone", LATER)
        ]
        assert said.format(*leads) in page
    points, interval = _difference(stored, "gam", "sgd", "trials", "first seeds alone")
    assert f"GAM - SGD was {points} in the first three" in page
    assert f"excluded zero ({interval})" in page
    assert f"is {_difference(stored, 'gam', 'sgd', 'trials', LATER)[0]} in the later three" in page


def test_sentences_that_follow_from_the_records(
    stored: dict[str, Any], means: dict[tuple[str, str], float]
) -> None:
    """A sentence has no number to be compared: here stands what makes it true."""
    p = stored["p after Holm"]["over trials"]
    ratios = {(r["a"], r["b"], r["quantity"]): r for r in stored["ratios"]}
    half = [ratios[a, "adam", q]["factor"] for a in ("fad", "sam") for q in ("zeroth", "first")]
    less = [
        ratios[a, b, q]["factor"]
        for a, b, q in product(("fad", "sam"), ("sgd", "gam"), ("zeroth", "first"))
    ]
    seen = {key for key, r in ratios.items() if not r["low"] < 1 < r["high"]}
    losses = {m["optimizer"]: m["loss"]["mean"] for m in stored["curvature"]["methods"]}
    largest = {m["optimizer"]: m["lambda_max"]["mean"] for m in stored["curvature"]["methods"]}
    traces = [ratios["fad", rival, "trace"] for rival in ("sam", "adam")]
    found = stored["accuracy and curvature"]["rank correlations"]
    photo = [means["fad", t] - means["gam", t] for t in ("art_painting", "cartoon", "sketch")]
    rates = {(r["optimizer"], r["targets"]): r["lr"] for r in stored["learning rates"]}
    pacs, index, evidence = "results/pacs.md", "results/index.md", "explanation/evidence.md"
    for page, sentence, holds in (
        (pacs, "FAD's lead over SGD is more than chance", p["fad - sgd"] < 0.05),
        (pacs, "those over Adam, SAM and GAM are not decided.", p["fad - adam"] > 0.05),
        (pacs, "that it is ahead of SAM and GAM is not decided", p["fad - gam"] > 0.1),
        (pacs, "| leaning to yes, rather by less than 4.0 |", 0.05 < p["fad - adam"] < 0.1),
        (pacs, "| holds on these targets, by far less than 8.3;", p["fad - sgd"] < 0.05),
        (pacs, "| not by 4.3; which is better is not decided |", p["sgd - adam"] > 0.1),
        (pacs, f"without photo it is {fmean(photo):+.1f}.", True),
        (pacs, "GAM alone has a learning rate of 0.003", rates["gam", "photo"] == 0.003),
        (pacs, "rises about half as far as around Adam's", _near(half, 0.5, 0.06)),
        (pacs, "Both have about half of Adam's", _near(half, 0.5, 0.06)),
        (index, "about half of Adam's", _near(half, 0.5, 0.06)),
        (evidence, "about half of Adam's", _near(half, 0.5, 0.06)),
        (pacs, "less than half as far as around SGD's and GAM's", max(less) < 0.5),
        (pacs, "and less than half of SGD's and GAM's", max(less) < 0.5),
        (index, "and less than half of SGD's and GAM's", max(less) < 0.5),
        (evidence, "and less than half of SGD's and GAM's", max(less) < 0.5),
        (pacs, "their mean losses are the highest", {"fad", "sam"} == _top(losses, 2)),
        (pacs, "all but one of which contain 1", len(_of(seen, "lambda_max")) == 1),
        (pacs, "no difference of the trace from Adam's is seen", not _of(seen, "trace")),
        (pacs, "seen, to about 20 %", all(r["low"] > 0.79 and r["high"] < 1.21 for r in traces)),
        (
            pacs,
            "| leaning to yes for FAD and SAM, not decided;",
            len(_of(seen, "lambda_max")) == 1,
        ),
        (pacs, "The sharpest, SGD's", {"sgd"} == _top(largest, 1)),
        (pacs, "which favours the sharper", all(r["within trials"] > 0 for r in found.values())),
        (evidence, "None is clearly negative", all(r["interval"][1] > 0 for r in found.values())),
        (index, "not clearly before SAM and GAM", min(p["fad - sam"], p["fad - gam"]) > 0.1),
        ("../README.md", "leads over Adam, SAM and GAM are not decided", p["fad - adam"] > 0.05),
        ("../README.md", "the one over SGD only on these four targets.", p["fad - sgd"] < 0.05),
        (evidence, "FAD's over SGD remains, over the seeds.", p["fad - sgd"] < 0.05),
    ):
        assert holds, sentence
        assert sentence in " ".join((DOCS / page).read_text().split()), sentence


def _near(values: list[float], middle: float, reach: float) -> bool:
    return all(abs(value - middle) <= reach for value in values)


def _top(values: dict[str, float], n: int) -> set[str]:
    return set(sorted(values, key=values.__getitem__)[-n:])


def _of(keys: set[tuple[str, str, str]], quantity: str) -> list[tuple[str, str, str]]:
    return [key for key in keys if key[2] == quantity]


def test_holm_and_the_interval_of_a_correlation() -> None:
    script = load_script(DOCS / "results/publish.py")
    shown = SimpleNamespace(units=6, err=1.0)
    pairs = [
        SimpleNamespace(a="a", b=str(i), difference=d, **vars(shown))
        for i, d in enumerate((0.1, 5.0, -3.0, 2.99))
    ]
    raw = [2 * scipy.stats.t.sf(d, 5) for d in (0.1, 5.0, 3.0, 2.99)]
    # The fourth would be below the third, to which it was second.
    assert 2 * raw[3] < 3 * raw[2]
    expected = {"a - 1": 4 * raw[1], "a - 2": 3 * raw[2], "a - 3": 3 * raw[2], "a - 0": raw[0]}
    assert script.corrected(pairs) == pytest.approx(expected)
    low, high = script._fisher(0.5, 28)
    assert (low, high) == pytest.approx((0.1327, 0.7465), abs=1e-4)  # atanh 0.5 is 0.5493


def _parts(record: dict[str, Any], part: str) -> list[float]:
    return [own[part]["accuracy"] for own in record["domains"].values() if part in own]


def test_counts_that_the_page_has(records: Path) -> None:
    runs = {path.name: path / "result" for path in (records / "pacs/runs").iterdir()}
    page = (DOCS / "results/pacs.md").read_text()

    def count(*patterns: str) -> list[int]:
        return [sum(bool(re.search(own, name)) for name in runs) for own in patterns]

    ablation = len(list((records / "ablation/runs").iterdir()))
    assert f"All {len(runs) + ablation} runs that were finished are in the records" in page
    assert f"records and log of all {len(runs) + ablation} runs" in page
    six = f"-({'|'.join(NAMES.values())})-none-trial"
    known, tuned, final = count(rf"{six}\d(-tune|$)", f"{six}0-tune", rf"{six}\d$")
    assert f"{known} of the six optimizers with six seeds, of which {tuned} tune;" in page
    assert f"shows the {final} runs behind the first table" in page
    yogi, belief, *tunes = count("-yogi-", "-adabelief-", "-yogi-.*tune", "-adabelief-.*tune")
    numbers = " and ".join(map(str, tunes))
    assert f"{yogi} of Yogi and {belief} of AdaBelief, of which {numbers} tune, " in page
    (shares, plain) = count("-ratio", "-nodecay")
    assert f"{shares} of FAD in a part of the updates and, on up to six, {plain} of Adam" in page
    hessian, tunes_hessian, longer = count("-adahessian-", "-adahessian-.*tune", "-steps15000")
    assert (
        f"on one seed {hessian} of AdaHessian, of which {tunes_hessian} tune, {longer} of" in page
    )
    assert f"named after the paper's 15,000), {ablation} of the ablation" in page
    (old,) = count(r"-yogi-.*tune0\.(01|003)$")
    assert old == 8
    assert f"Of the {tunes[0]} runs that tune Yogi, eight are at 0.003 and 0.01" in page
    streamed = [
        log
        for log in records.glob("*/runs/*/result/log.txt")
        if "streamed"
        in [line for line in log.read_text().splitlines() if " INFO steppe " in line][-1]
    ]
    assert f"{len(streamed)} runs found too little memory" in page

    def rate(name: str) -> float:
        lr: float = json.loads((runs[name] / "config.json").read_text())["optimizer"]["lr"]
        return lr

    bases = ("sgd", "sam", "gam", "fad")
    assert {rate(f"PACS-sketch-ERM-{o}-none-trial3") for o in bases} == {0.001}
    assert {o: rate(f"PACS-photo-ERM-{o}-none-trial3") for o in bases if o != "gam"} == {
        o: 0.001 for o in bases if o != "gam"
    }
    assert rate("PACS-photo-ERM-gam-none-trial3") == 0.003
    rates = {
        (o, t): rate(f"PACS-{t}-ERM-{o}-none-trial0") for o in ("adam", "adamw") for t in TARGETS
    }
    assert {place for place, lr in rates.items() if lr != 0.00015} == {("adamw", "photo")}
    assert rates["adamw", "photo"] == 0.00005
    assert "Both have a learning rate of 0.00015, except on photo, where AdamW has 0.00005;" in page
    assert "AdamW took the lowest on photo, the middle one elsewhere." in page
    decay = {
        json.loads((runs[f"PACS-{t}-ERM-{o}-none-trial0"] / "config.json").read_text())[
            "optimizer"
        ]["weight_decay"]
        for o, t in rates
    }
    assert decay == {1e-4}
    assert "the weight decay of 1e-4 is not part of the gradient" in page
    for name in runs:
        if re.search("-(ratio.*|nodecay|steps15000)$", name):
            assert rate(name) == rate(name.rpartition("-")[0])
    for optimizer, shown in (("adam", "0.12 and"), ("adamw", "and 0.12")):
        losses = []
        for target, trial in product(TARGETS, range(6)):
            result = runs[f"PACS-{target}-ERM-{optimizer}-none-trial{trial}"]
            last = json.loads((result / "records.jsonl").read_text().splitlines()[-1])
            losses.append(last["loss"]["total"])
        assert f"{fmean(losses):.2f}" in shown
    assert "their mean training losses at the end are 0.12 and 0.12" in page

    ranges = {
        "FAD on cartoon has {:.1f} to {:.1f}": ("cartoon", "fad"),
        "SGD on sketch {:.1f} to {:.1f}": ("sketch", "sgd"),
    }
    for said, (target, optimizer) in ranges.items():
        found = []
        for trial in range(6):
            result = runs[f"PACS-{target}-ERM-{optimizer}-none-trial{trial}"]
            lines = [
                json.loads(line) for line in (result / "records.jsonl").read_text().splitlines()
            ]
            best = max(lines, key=lambda r: fmean(_parts(r, "val")))
            found += _parts(best, "test")
        assert said.format(100 * min(found), 100 * max(found)) in page

    files = {name: runs[name] / "curvature/train.json" for name in runs}
    measured = {n: json.loads(file.read_text()) for n, file in files.items() if file.exists()}
    assert f"{len(measured)} measurements of curvature" in page
    for target, named in (("art_painting", "SAM FAD GAM Adam SGD"), ("cartoon", "FAD SGD Adam")):
        for shown in named.split():
            one = measured[f"PACS-{target}-ERM-{NAMES[shown]}-none-trial3"]
            assert f"{one['eigenvalues']['values'][0]:.1f} for {shown}" in page
    later = [
        one
        for name, one in measured.items()
        if re.search("sketch.*trial[345]$", name) and "-adamw-" not in name
    ]
    assert len(later) == 15
    correct = {}
    for shown in ("AdamW", "Adam", "FAD"):
        names = [f"PACS-sketch-ERM-{NAMES[shown]}-none-trial{trial}" for trial in (3, 4)]
        lines = [(runs[name] / "records.jsonl").read_text().splitlines()[-1] for name in names]
        correct[shown] = [100 * _parts(json.loads(line), "test")[0] for line in lines]
        two = [measured[name] for name in names]
        cells = [
            [f"{one['eigenvalues']['values'][0]:.1f}" for one in two],
            [f"{one['trace']['value']:.0f}" for one in two],
            *([f"{one['flatness'][order]:.2f}" for one in two] for order in ("zeroth", "first")),
            [f"{value:.1f}" for value in correct[shown]],
        ]
        assert f"| {shown} | {' | '.join(map(', '.join, cells))} |" in page
    assert all(max(own[i] for own in correct.values()) == correct["AdamW"][i] for i in (0, 1))
    assert sum("-adamw-" in name for name in measured) == 2
    norms = [one["gradient_norm"] for one in later]
    assert f"the gradient's norm is {min(norms):.2f} to {max(norms):.2f}" in page
    shares: dict[bool, list[float]] = {True: [], False: []}
    for name, one in measured.items():
        if one in later:
            share = 5 * one["gradient_norm"] / one["flatness"]["zeroth"]
            shares["-fad-" in name or "-sam-" in name].append(share)
    ours, others = (f"{min(some):.0f} to {max(some):.0f} %" for some in shares.values())
    assert f"{ours} of $R^0$ for FAD and SAM, and for {others} for the others" in page
    converged = [one[key]["converged"] for one in later for key in ("eigenvalues", "trace")]
    assert all(converged + [one["flatness"]["converged"] for one in later])
    assert "All of them converged" in page
    lost = measured["PACS-sketch-ERM-adam-none-trial0"]["flatness"]["first"]
    assert f"had an $R^1$ of {lost:.2f}" in page
    # What `small` is reckoned with, in tests/paper/test_order.py.
    assert max(one["products"] for one in measured.values()) == PRODUCTS
    assert max(one["flatness"]["passes"] for one in measured.values()) == PASSES


def _said(page: str, sentence: str) -> bool:
    return sentence in " ".join((ROOT / page).read_text().split())


def _paper() -> dict[str, float]:
    """The averages on PACS of the paper's Table 1."""
    rows = (ROOT / "src/steppe/paper/paper.csv").read_text().splitlines()
    cells = [r.split(",") for r in rows if r.startswith("table1,") and ",PACS,,ERM,none," in r]
    return {row[6]: float(row[9]) for row in cells}


PACS_PAGE, INDEX = "docs/results/pacs.md", "docs/results/index.md"
EVIDENCE = "docs/explanation/evidence.md"


def test_what_is_said_of_adamw(stored: dict[str, Any]) -> None:
    paper = _paper()
    p = stored["p after Holm"]["over trials"]
    both = {
        pair: [_difference(stored, *pair, over) for over in ("targets", "trials")]
        for pair in (("fad", "adamw"), ("adamw", "adam"))
    }
    claims = {("fad", "adamw"): "better than AdamW", ("adamw", "adam"): "but not on PACS"}
    for (a, b), claim in claims.items():
        shown = {name: label for label, name in NAMES.items()}
        (points, over_targets), (_, over_seeds) = both[a, b]
        later = _difference(stored, a, b, "trials", LATER)[0]
        said = (
            f"{shown[a]} - {shown[b]} is {points}; {over_targets} over the targets, {over_seeds} "
            f"over the seeds; for the later seeds alone {later}"
        )
        assert said in _row(claim)
    lead = "AdamW - Adam {} ({}".format(*both["adamw", "adam"][0])
    undecided = all(text.startswith("-") and "to +" in text for _, text in both["fad", "adamw"])
    clear = all(text.startswith("+") for _, text in both["adamw", "adam"])
    gain = paper["fad"] - paper["adamw"]
    for page, sentence, holds in (
        (PACS_PAGE, "AdamW and FAD cannot be told apart, and AdamW has a quarter of", undecided),
        (PACS_PAGE, "it cannot be told from AdamW |", undecided),
        (PACS_PAGE, f"| FAD is better than AdamW by {gain:.1f} |", True),
        (PACS_PAGE, f"| not by {gain:.1f}; which is better is not decided |", undecided),
        (PACS_PAGE, f"not on PACS ({paper['adamw']:.1f} and {paper['adam']:.1f})", True),
        (PACS_PAGE, "| leaning to AdamW on PACS, unlike the", clear and p["adamw - adam"] > 0.05),
        (INDEX, lead, True),
        (INDEX, "cannot be told from AdamW, which has a quarter of the gradients.", undecided),
        ("README.md", "AdamW and FAD cannot be told apart, FAD with four times the", undecided),
    ):
        assert holds, sentence
        assert _said(page, sentence), sentence


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_is_adam_without_decay_here(fused: bool) -> None:
    """With the learning rate and the decay of the runs: in float32, to the last bit."""

    def trained(optimizer: type[torch.optim.Adam], decay: float) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(30, 30)
        opt = optimizer(model.parameters(), lr=1.5e-4, weight_decay=decay, fused=fused)
        for _ in range(100):
            x = torch.randn(8, 30)
            opt.zero_grad()
            (model(x) - x).square().mean().backward()
            opt.step()
        return model.weight.detach()

    ours = trained(torch.optim.AdamW, 1e-4)
    assert torch.equal(ours, trained(torch.optim.Adam, 0.0))
    assert not torch.equal(ours, trained(torch.optim.Adam, 1e-4))
    assert not torch.equal(ours, trained(torch.optim.AdamW, 1e-2))


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    with tarfile.open(PACS / "records.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def _curve(run: Path, last: int) -> list[Any]:
    """The training loss and all accuracies at every evaluation up to a step."""
    lines = map(json.loads, (run / "result/records.jsonl").read_text().splitlines())
    return [
        (
            line["step"],
            line["loss"],
            [_parts(line, part) for part in ("train", "val", "test", "oracle")],
        )
        for line in lines
        if line["step"] <= last
    ]


SECOND_MACHINE = datetime(2026, 11, 16, 12, 14, tzinfo=UTC).timestamp()
"""When the fourth session went on with another; what it has begun since 11:50 is its own."""
FOURTH_SESSION = SECOND_MACHINE - 24 * 60


def _repeats(records: Path) -> list[tuple[str, str, bool]]:
    """All pairs of runs of one method on one machine of the fourth session: whether they agree."""
    groups: dict[tuple[Any, ...], list[Path]] = {}
    for run in sorted(records.glob("*/runs/*")):
        config = json.loads((run / "config.json").read_text())
        optimizer = dict(config["optimizer"])
        name, decay = optimizer.pop("name"), optimizer.pop("weight_decay")
        if name == "adamw" or (name == "adam" and decay == 0):
            name = "adam without decay"
        elif name == "fad" and 0 in (optimizer["rho"], optimizer["beta"]):
            name = "sgd"
        elif name != "sgd":
            name = json.dumps(config["optimizer"])
        events = [json.loads(file.read_text()) for file in (run / "events").iterdir()]
        time = max(event["time"] for event in events if event["kind"] == "claim")
        if time > FOURTH_SESSION:
            place = (config["targets"][0], config["trial_seed"], config["batch_size"])
            key = (name, optimizer["lr"], *place, time > SECOND_MACHINE)
            groups.setdefault(key, []).append(run)
    found = []
    for runs in groups.values():
        for a, b in combinations(runs, 2):
            last = min(_curve(run, 10_000)[-1][0] for run in (a, b))
            if last >= 500:
                found.append((a.name, b.name, _curve(a, last) == _curve(b, last)))
    return found


def test_one_method_run_twice(stored: dict[str, Any], records: Path) -> None:
    pairs = stored["adamw, and adam without decay"]
    assert all(p["accuracy"][0] == p["accuracy"][1] for p in pairs if p["same"])
    gaps = [a - b for a, b in (p["accuracy"] for p in pairs if not p["same"])]
    size = fmean(gap**2 for gap in gaps) ** 0.5
    assert (len(pairs), len(gaps)) == (15, 9)
    assert sum(gap > 0 for gap in gaps) == 7
    for pair in pairs:
        names = [f"{name}-none-trial{pair['trial']}" for name in ("adamw", "adam")]
        first, second = (
            _curve(records / f"pacs/runs/PACS-{pair['target']}-ERM-{name}", 1_000)
            for name in (names[0], f"{names[1]}-nodecay")
        )
        assert (first == second) == pair["same"]
    repeats = _repeats(records)
    assert len(repeats) == 11
    assert all(same for *_, same in repeats), repeats
    average = {name: cells["Avg."]["mean"] for name, cells in stored["more"]["means"].items()}
    more, mean = {"all": stored["more"]["pairs"]}, stored["adamw with both runs"]["mean"]
    both = {"all": stored["adamw with both runs"]["pairs"]}
    first_runs = {"all": stored["all pairs"]}
    p = stored["adamw with both runs"]["p after Holm"]["over trials"]
    gam = p["adamw - gam"]
    over_gam = [_difference(own, "adamw", "gam", "targets", "all")[0] for own in (first_runs, both)]
    points, targets = _difference(both, "fad", "adamw", "targets", "all")
    gain, over_targets = _difference(both, "adamw", "adam", "targets", "all")
    plain, interval = _difference(more, "adam, no decay", "adam", "targets", "all")
    assert over_targets == _difference(both, "adamw", "adam", "trials", "all")[1]
    seeds = _difference(both, "fad", "adamw", "trials", "all")[1]
    for page, sentence in (
        (
            PACS_PAGE,
            "Of these fifteen pairs of runs six agree in every accuracy and training loss.",
        ),
        (
            PACS_PAGE,
            f"differs by {size:.1f} points, root mean square, and by {max(map(abs, gaps)):.1f} at",
        ),
        (PACS_PAGE, "all eleven repeats within a machine agree"),
        (PACS_PAGE, f"FAD - SGD remains at {p['fad - sgd']:.3f}, and AdamW - GAM has {gam:.2f}."),
        (PACS_PAGE, "AdamW - GAM falls from {} to {}.".format(*over_gam)),
        (PACS_PAGE, f"[with AdamW's second runs](#adam-adamw-and-weight-decay) {gain}. AdamW is"),
        (PACS_PAGE, "The first runs of AdamW have the better of it in seven of the nine"),
        (PACS_PAGE, f"where there are two, it has {mean:.1f} on six seeds; FAD's difference from"),
        (PACS_PAGE, f"is {points} ({targets} over the targets, {seeds} over the seeds), its own"),
        (PACS_PAGE, f"its own from Adam {gain} ({over_targets} both ways)"),
        (PACS_PAGE, f"on three seeds, is at {average['adam, no decay']:.1f}, {plain} from Adam"),
        (PACS_PAGE, f"{plain} from Adam ({interval} over the targets)"),
        (PACS_PAGE, f"[with AdamW's second runs](#adam-adamw-and-weight-decay) {points} |"),
        ("docs/index.md", f"and {points} where AdamW's second runs count too."),
        (INDEX, f"{gain} ({over_targets}) where its second runs count too;"),
        (INDEX, f"nine differ, by {size:.1f} points on the target, root mean square"),
        (
            EVIDENCE,
            f"nine differ, by {size:.1f} points on the target, root mean square, by rounding",
        ),
    ):
        assert _said(page, sentence), sentence


def test_what_is_said_of_other_optimizers_and_of_a_part_of_the_updates(
    stored: dict[str, Any],
) -> None:
    more, paper = stored["more"], _paper()
    average = {name: cells["Avg."]["mean"] for name, cells in more["means"].items()}
    pairs = {"all": more["pairs"]}
    row = _row("FAD in 10 % and in 50 %")
    for share, shown in product(("10", "50"), ("SGD", "Adam", "AdamW", "SAM", "GAM")):
        points, interval = _difference(pairs, f"fad {share} %", NAMES[shown], "targets", "all")
        part = row.split(f"FAD {share} % - SGD")[1]
        assert re.search(rf"(- {shown}|^) (is )?{re.escape(f'{points} ({interval}')}", part)
        assert interval.startswith("-")
        assert (" to -" in interval) == ((share, shown) == ("10", "AdamW"))
    half = [_difference(pairs, "fad 50 %", "fad", over, "all") for over in ("targets", "trials")]
    p, targets = (more["p after Holm"][f"over {over}"] for over in ("trials", "targets"))
    by_size = sorted(p.values())
    shares = [average[name] for name in ("sgd", "fad 5 %", "fad 10 %", "fad")]
    between = shares == sorted(shares) and shares[2] < (shares[0] + shares[3]) / 2
    unclear = all(
        low < 0 < high
        for pair in more["pairs"]
        if pair["a"] in ("fad 5 %", "fad 10 %") and pair["b"] in ("sgd", "fad")
        for low, high in [(pair["low"], pair["high"])]
    )
    others = [
        (pair["low"], pair["high"])
        for pair in more["pairs"]
        if pair["a"] in ("yogi", "adabelief") and pair["b"] in ("fad", "adam")
    ]
    in_between = all(average["adam"] < average[n] < average["fad"] for n in ("yogi", "adabelief"))
    cartoon = min(more["means"], key=lambda name: more["means"][name]["cartoon"]["mean"])
    rates = {(r["optimizer"], r["targets"]): r for r in more["learning rates"]}
    belief = rates["adabelief", "cartoon"]
    best = sorted(belief["validation"].values())[-2:]
    chosen = {
        name: sorted({r["lr"] for (o, _), r in rates.items() if o == name})
        for name in ("yogi", "adabelief", "adahessian")
    }
    assert chosen == {"yogi": [1e-4], "adabelief": [1.5e-5, 5e-5, 1.5e-4], "adahessian": [0.003]}
    gaps = {name: paper["fad"] - paper[name] for name in ("yogi", "adabelief", "adahessian")}
    rivals = _row("better than Yogi")
    assert f"(paper: by {gaps['yogi']:.1f} and {gaps['adabelief']:.1f})" in rivals
    assert f"AdaHessian (by {gaps['adahessian']:.1f})" in rivals
    for name, shown in (("yogi", "Yogi"), ("adabelief", "AdaBelief")):
        points, interval = _difference(pairs, name, "fad", "targets", "all")
        assert re.search(rf"{shown} - FAD (is )?{re.escape(f'{points} ({interval}')}", rivals)
    level = f"{half[0][0]}, {half[0][1]} over the targets, {half[1][1]} over the seeds."
    reach = max(abs(float(end)) for _, text in half for end in text.split(" to "))
    for page, sentence, holds in (
        (PACS_PAGE, f"at 2.5 gradients instead of four: {level}", True),
        (PACS_PAGE, "in half of them and in all of them, to about 3 points.", reach < 3.25),
        (PACS_PAGE, "it lies between SGD and FAD, nearer to SGD; that is not", between and unclear),
        (INDEX, f"is seen ({half[0][0]}; {half[0][1]} over targets, {half[1][1]} over", True),
        (INDEX, "in 5 or 10 % it lies between SGD and FAD, not decided", between and unclear),
        (PACS_PAGE, "**Yogi and AdaBelief** lie between Adam and FAD, and no", in_between),
        (
            PACS_PAGE,
            "no difference from Adam or FAD excludes zero.",
            all(a < 0 < b for a, b in others),
        ),
        (PACS_PAGE, "AdaBelief's learning rate on cartoon, 0.000015, won", belief["lr"] == 1.5e-5),
        (PACS_PAGE, "won by half a point of validation", 0.4 < best[1] - best[0] < 0.6),
        (PACS_PAGE, "its accuracy there is the lowest of all.", cartoon == "adabelief"),
        (PACS_PAGE, "corrected over these thirty pairs, p over the seeds is", len(p) == 30),
        (PACS_PAGE, f"{p['fad 50 % - adam']:.3f} for FAD 50 % - Adam", True),
        (PACS_PAGE, "and above 0.5 for all others;", by_size[1] > 0.5),
        (PACS_PAGE, "over targets none is below 0.6.", min(targets.values()) > 0.6),
        (PACS_PAGE, "not seen for AdamW; not decided for the others |", by_size[1] > 0.5),
    ):
        assert holds, sentence
        assert _said(page, sentence), sentence


def test_what_is_said_of_the_first_seed(stored: dict[str, Any]) -> None:
    first = stored["first trial"]
    cells = {name: own["accuracy"] for name, own in first.items()}
    average, last = (
        {name: own[column] for name, own in cells.items()} for column in ("Avg.", "last weights")
    )
    ahead = {n: average[f"{n}, longer"] - average["fad"] for n in ("adam", "adamw", "sgd")}
    at_last = [last[f"{n}, longer"] - last["fad"] for n in ahead]
    steps = [own["steps"].items() for name, own in first.items() if "longer" in name]
    early = sum(step <= 1_000 for own in steps for _, step in own)
    at_1000 = {
        (name, t) for name, own in first.items() for t, s in own["steps"].items() if s == 1_000
    }
    sgd = [cells["sgd, longer"][t] - cells["fad"][t] for t in TARGETS]
    by_target = ", ".join(f"{gap:+.1f}" for gap in sgd[:3]) + f" and {sgd[3]:+.1f}"
    longer = "{:.1f}, {:.1f} and {:.1f}".format(*(average[f"{n}, longer"] for n in ahead))
    level = f"level with FAD ({average['adahessian']:.1f} and {average['fad']:.1f})"
    said = "Adam, AdamW and SGD are ahead of it by {adam:.1f}, {adamw:.1f} and {sgd:.1f} points;"
    after = "{:.1f}, {:.1f}, {:.1f}".format(*(last[f"{n}, longer"] for n in ahead))
    settings = {
        (r["optimizer"], r["setting"]): r["mean"]
        for r in stored["ablation"]
        if r["column"] == "Avg."
    }
    by_place = {(r["setting"], r["column"]): r["mean"] for r in stored["ablation"]}
    own = {part: mean for (optimizer, part), mean in settings.items() if optimizer == "fad"}
    sgd_runs = {r["column"]: r["mean"] for r in stored["ablation"] if r["optimizer"] == "sgd"}
    again = [by_place["beta 0", t] - sgd_runs[t] for t in TARGETS]
    failed = {sum(by_place[f"rho {rho}", t] < 30 for t in TARGETS) for rho in (0.2, 0.5)}
    no_lead = min(ahead.values()) > 0 and min(at_last) < 0 < max(at_last)
    lost = last["adamw"] - last["adamw, longer"]
    adam, plain = settings["adam", None], settings["sgd", None]
    below = {part for part, mean in own.items() if mean < adam} - {"rho 0", "beta 0"}
    radii = f"with 0.1, and with $\\alpha$ = 1, it is below Adam ({own['rho 0.1']:.1f} and "
    for page, sentence, holds in (
        (PACS_PAGE, said.format(**ahead), True),
        (PACS_PAGE, "two of their twelve models are those after 1,000 updates", early == 2),
        (
            PACS_PAGE,
            "(Adam on cartoon, AdamW on sketch)",
            {("adam, longer", "cartoon"), ("adamw, longer", "sketch")} <= at_1000,
        ),
        (
            PACS_PAGE,
            "their differences from FAD are {:+.1f}, {:+.1f} and {:+.1f};".format(*at_last),
            [gap > 0 for gap in at_last] == [True, False, True],
        ),
        (PACS_PAGE, f"SGD's differences are {by_target}.", True),
        (PACS_PAGE, f"with 3,000 updates have {longer}, FAD with 1,000 has", True),
        (PACS_PAGE, f"after the last update {after} and {last['fad']:.1f}; one seed |", True),
        (PACS_PAGE, level, abs(average["adahessian"] - average["fad"]) < 0.5),
        (
            PACS_PAGE,
            "is equal to it in every number;",
            all(by_place["rho 0", t] == sgd_runs[t] for t in TARGETS),
        ),
        (PACS_PAGE, f"differs from it by {min(again):+.1f} to {max(again):+.1f} points", True),
        (PACS_PAGE, f"so much is noise here, and {fmean(again):.1f} on average.", True),
        (PACS_PAGE, "FAD fails on three of the four targets** at this", failed == {3}),
        (
            PACS_PAGE,
            f"($\\alpha$ = 1) lie {own['alpha 0'] - own['alpha 1']:.1f} points",
            True,
        ),
        (PACS_PAGE, f"{radii}{own['alpha 1']:.1f}, Adam {adam:.1f})", True),
        (PACS_PAGE, "otherwise above both", below == {"rho 0.1", "rho 0.2", "rho 0.5", "alpha 1"}),
        (PACS_PAGE, f"AdamW loses {lost:.1f} points from 1,000 to 3,000 updates.", True),
        (INDEX, "FAD with 1,000 updates has no consistent lead over Adam, AdamW and", no_lead),
        (INDEX, "with $\\rho$ of 0.2 or 0.5 FAD fails on three of four targets |", failed == {3}),
        (EVIDENCE, "FAD has [no consistent lead](../results/pacs.md#the-same-work)", no_lead),
    ):
        assert holds, sentence
        assert _said(page, sentence), sentence
    assert plain < min(mean for part, mean in own.items() if part not in ("rho 0", *below))


def test_what_the_page_says_of_flatness(
    stored: dict[str, Any], means: dict[tuple[str, str], float]
) -> None:
    page = (DOCS / "results/pacs.md").read_text()
    by_name = {m["optimizer"]: m for m in stored["curvature"]["methods"]}
    largest = {shown: by_name[name]["lambda_max"]["mean"] for shown, name in MEASURED.items()}
    ascending = sorted(largest, key=largest.__getitem__)
    shown = ", ".join(f"{n} {largest[n]:.3g}" for n in ascending)
    assert shown in _row("lower spectra")
    assert sorted(by_name, key=lambda n: by_name[n]["loss"]["mean"])[-2:] == ["fad", "sam"]

    ratios = {(r["a"], r["b"], r["quantity"]): r for r in stored["ratios"]}
    clear = {key for key, r in ratios.items() if r["high"] < 1 or r["low"] > 1}
    ours, rivals = ("fad", "sam"), ("adam", "sgd", "gam")
    flat = set(product(ours, rivals, ("zeroth", "first")))
    assert clear == flat | {("fad", "sgd", "lambda_max")}
    spectra = _row("lower spectra")
    largest_of_sgd = ratios["fad", "sgd", "lambda_max"]["factor"]
    assert f"one of eight excludes 1: FAD's $\\lambda_{{\\max}}$ is {largest_of_sgd:.2f}" in spectra
    factors = [ratios[key]["factor"] for key in flat if key[1] != "gam"]
    said = f"{min(factors):.2f} to {max(factors):.2f} times, and exclude 1 in all eight cases"
    assert said in spectra
    lowest = _row("lowest trace")
    for rival, quantity, owner in (
        ("sam", "lambda_max", "SAM's "),
        ("sam", "trace", ""),
        ("adam", "trace", "Adam's "),
    ):
        r = ratios["fad", rival, quantity]
        assert f"{r['factor']:.2f} times {owner}({r['low']:.2f} to {r['high']:.2f})" in lowest

    together = stored["accuracy and curvature"]
    found = together["rank correlations"]
    overall = {q: f"{r['all']:.2f}" for q, r in found.items()}
    within = {q: f"{r['within trials']:.2f}" for q, r in found.items()}
    assert (
        f"is {overall['lambda_max']} for $\\lambda_{{\\max}}$, {overall['trace']} for the trace, "
        f"{overall['zeroth']} for $R^0$ and {overall['first']} for $R^1$"
    ) in page
    *some, last = within.values()
    assert f"the correlations are {', '.join(some)} and {last}" in page
    evidence = (DOCS / "explanation/evidence.md").read_text()
    assert (
        f"is {overall['zeroth']} and {overall['first']}, and {overall['lambda_max']} for "
        "$\\lambda_{\\max}$; within a seed it is "
        f"{within['zeroth']}, {within['first']} and {within['lambda_max']}"
    ) in evidence
    assert all(-0.6 < r["interval"][0] < 0 < r["interval"][1] for r in found.values())
    held_out = {shown: fmean(together["accuracy"][name]) for shown, name in MEASURED.items()}
    ordered = sorted(held_out, key=lambda n: -held_out[n])
    first, *rest = (f"{n} {held_out[n]:.1f}" for n in ordered)
    assert ordered[0] == "SGD"
    assert f"({first.split()[1]}; {', '.join(rest)})" in page
    assert f"({means['sgd', 'sketch']:.1f} and {means['fad', 'sketch']:.1f})" in page


def test_two_draws_and_twenty_of_the_tutorial() -> None:
    """By the paired t-test over targets, from the numbers that were kept."""
    kept = json.loads((DOCS / "results/digits.json").read_text())
    assert "--draws 20 --steps 101" in kept["environment"]["command"]
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
    optimizers = ",".join(NAMES.values())
    for option in ("--factors", "1,3,10", "--trials", "6", "--optimizers", optimizers):
        now.remove(option)
    assert now == [word for word in then if word not in ("--out", "pacs")]
