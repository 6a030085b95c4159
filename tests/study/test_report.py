"""`study.report`: what a reader sees of the verdicts."""

import re
from pathlib import Path

import pytest

from steppe.study import Study
from steppe.study.decide import state
from steppe.study.outcomes import Outcome, Slot
from steppe.study.report import reach, sentence, study_report, to_text
from tests.study.test_decide import design, planned


def study(*, a: str = "fad", failed: bool = False, scale: float = 1.0) -> Study:
    """FAD is 20 points better than SGD on one target."""
    plan = planned(design([(a, "sgd")], targets=("60",), max_seeds=8))
    known = {
        Slot("run", name, seed, "60"): Outcome(mean + spread * (seed * 7 % 5), seconds=10.0)
        for name, mean, spread in ((a, 70.0, scale), ("sgd", 50.0, 0.0))
        for seed in range(7)
    }
    if failed:
        for seed in (0, 1):
            known[Slot("run", a, seed, "60")] = Outcome(None, error="diverged")
    return Study(Path("studies/one"), plan, known, state(plan, known))


def test_the_figure_shows_the_interval_that_decides() -> None:
    (claim,) = study_report(study())["claims"]
    assert claim["verdict"] == "better"
    assert claim["looks"][-1]["high"] > 20
    assert reach(claim, 1.0) > claim["looks"][-1]["high"]


def test_failed_runs_are_counted_but_not_timed() -> None:
    found = study_report(study(failed=True))
    assert found["claims"][0]["reason"] == "failed: fad on 60, seed 0, and 1 more"
    assert found["methods"][0]["seconds"] == 10.0


def test_an_interval_near_zero_has_the_digits_that_decide() -> None:
    (claim,) = study_report(study())["claims"]
    last = {"mean": 0.7, "low": 0.02, "high": 1.38, "seeds": 9}
    text = sentence({**claim, "looks": [last]}, 1.0)
    assert text == "fad beats sgd (+0.70 points [+0.02, +1.38], 9 seeds)."
    last = {"mean": -0.001, "low": -0.9, "high": 0.9, "seeds": 9}
    text = sentence({**claim, "verdict": "equivalent", "looks": [last]}, 1.0)
    assert "they differ by less than 1 point (+0.00 points [-0.90" in text


@pytest.mark.parametrize("form", ["terminal", "markdown", "html"])
def test_names_are_text(form: str) -> None:
    """A downloaded study's: no control codes in a terminal, no markup in a page."""
    text = to_text(study(a="x\x1b[31m<b>"), form)
    assert "\x1b" not in text
    assert "\\x1b" in text
    assert not (form != "terminal" and re.search(r"(?<!\\)<b>", text))


def test_equal_differences_are_shown_without_an_interval() -> None:
    made = study(scale=0.0)
    assert made.state.rulings[0].open
    (claim,) = study_report(made)["claims"]
    assert sentence(claim, 1.0) == "fad against sgd is undecided (+20.00 points, 7 seeds)."
    assert reach(claim, 1.0) == pytest.approx(2.3)
