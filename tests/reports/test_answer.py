"""Who leads, by how much, how sure that is and what it costs: the numbers and the sentences."""

import itertools
import json
import random

import pytest
import scipy.stats
from typer.testing import CliRunner

from steppe.cli import app
from steppe.errors import UserError
from steppe.reports import build_report, load_runs, paired, write
from steppe.reports.contrasts import MARGIN
from steppe.reports.holm import holm
from tests.reports.trees import DOMAINS, config, record, write_run

TWO = DOMAINS[:2]


def sweep(root, accuracies, targets=DOMAINS, trials=3, seconds=None, **more):
    """Runs of two records each; `accuracies[optimizer](target, trial)` are the test accuracies."""
    for name, of in accuracies.items():
        for target, trial in itertools.product(targets, range(trials)):
            value = of(DOMAINS.index(target), trial)
            times = {"seconds_per_step": (seconds or {}).get(name, 0.5), "evaluation_seconds": 36.0}
            records = [
                record(s, (target,), lambda d, p, v=value: v if p == "test" else 0.5, **times)
                for s in (0, 99)
            ]
            one = config((target,), trial, optimizer=name, steps=100, device="cuda:0", **more)
            write_run(root / f"{name}-{target}-{trial}", one, records)
    return build_report(load_runs(root))


def level(base, noise=0.001):
    """About `base`, differing a little from target to target and seed to seed."""
    return lambda target, trial: base + noise * ((7 * target + 3 * trial) % 5)


def test_holm_is_the_written_out_example():
    # Sorted: 0.005 x 4, 0.01 x 3, 0.03 x 2, 0.04 x 1; the last may not be below the third.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_clear_lead_is_said_with_its_evidence_and_cost(tmp_path):
    accuracies = {"sgd": level(0.70), "sam": level(0.80, 0.002), "adam": level(0.71, 0.003)}
    report = sweep(tmp_path, accuracies, seconds={"sgd": 0.5, "sam": 1.0, "adam": 0.6})
    first, second, step, total = report.answer
    assert first.startswith("sam leads with 80.4%; adam is next with 71.5%. The paired difference")
    assert "over 3 seeds" in first
    assert first.endswith("significant on these 4 targets.")
    assert second == "sam is significantly better than sgd on these 4 targets."
    assert step == "A step of sam takes 1000.0 ms, 2.00 times that of sgd, the cheapest."
    # 12 runs of a method: 100 steps and two evaluations of 36 s.
    hours = 12 * (100 * (0.5 + 1.0 + 0.6) + 3 * 72) / 3600
    assert total == f"All 36 runs took {hours:.3f} GPU-hours."
    assert report.to_json()["hours"] == {"GPU": pytest.approx(hours)}
    shown = [(pair.a, pair.b) for pair in report.comparisons]
    assert shown == [("sam", "adam"), ("sam", "sgd"), ("adam", "sgd")]


def test_the_selected_values_of_a_search_are_said(tmp_path):
    """Validation picks another rho for each of two targets; what no search varied is left out."""
    for target, lr, rho in itertools.product(TWO, (0.1, 0.3), (0.02, 0.05, 0.1)):
        best = (0.3, {TWO[0]: 0.02, TWO[1]: 0.05}[target])
        value = 0.9 if (lr, rho) == best else 0.5
        options = {"name": "fad", "lr": lr, "rho": rho, "alpha": 0.5}
        one = config((target,), optimizer=options)
        write_run(
            tmp_path / f"{target}-{lr}-{rho}", one, [record(0, (target,), lambda *_, v=value: v)]
        )
    report = build_report(load_runs(tmp_path))
    assert report.answer[-1] == "Selected for fad: lr 0.3, rho 0.02 to 0.05."
    assert "rho 0.02 to 0.05." in " ".join(write(report, "terminal").split())
    alone = build_report(load_runs(tmp_path / f"{TWO[0]}-0.1-0.02"))
    assert not any("Selected" in sentence for sentence in alone.answer)


@pytest.mark.parametrize("value", [None, "x" * 9999, {"a": [1]}, float("nan"), 10**400, True])
def test_a_selected_value_may_be_anything(tmp_path, value):
    for k, (rho, accuracy) in enumerate(((value, 0.9), (0.1, 0.5))):
        one = config(TWO[:1], optimizer={"name": "fad", "rho": rho})
        records = [record(0, TWO[:1], lambda *_, a=accuracy: a)]
        write_run(tmp_path / str(k), one, records)
    *_, said = build_report(load_runs(tmp_path)).answer
    assert said.startswith("Selected for fad: rho ")
    assert len(said) < 200


def test_p_values_are_corrected_for_what_could_have_been_picked(tmp_path):
    accuracies = {
        name: (lambda *at, k=k: 0.7 + 0.01 * k + 0.05 * random.Random(repr((k, at))).random())
        for k, name in enumerate(("sgd", "adam", "sam", "gam"))
    }
    report = sweep(tmp_path, accuracies)
    means = {
        name: [sum(of(target, trial) for target in range(4)) / 4 for trial in range(3)]
        for name, of in accuracies.items()
    }
    pairs = list(itertools.combinations(means, 2))
    p = {(a, b): scipy.stats.ttest_rel(means[a], means[b]).pvalue for a, b in pairs}
    adjusted = dict(zip(map(frozenset, pairs), holm(list(p.values())), strict=True))
    assert report.contrasts.tests == 6
    assert "Holm-corrected for 6 pairs" in report.contrasts.note
    for pair in report.comparisons:
        assert pair.adjusted == pytest.approx(adjusted[frozenset((pair.a, pair.b))], rel=1e-6)
    assert report.contrasts.note.endswith("Intervals are not corrected.")
    reasons = {
        ("best", "cheapest"): "because the best and the cheapest method were chosen from",
        ("cheapest",): "because the cheapest method was chosen from",
    }
    for given, reason in reasons.items():
        assert reason in build_report(load_runs(tmp_path), references=given).contrasts.note
    # Named beforehand, three pairs are all there is.
    named = build_report(load_runs(tmp_path), references=["sgd"])
    assert [(pair.a, pair.b) for pair in named.comparisons] == [
        (other, "sgd") for other in ("adam", "gam", "sam")
    ]
    own = [p["sgd", other] for other in ("adam", "gam", "sam")]
    assert [pair.adjusted for pair in named.comparisons] == pytest.approx(holm(own), rel=1e-6)
    with pytest.raises(UserError, match="reference 'sgdd', did you mean 'sgd'"):
        write(build_report(load_runs(tmp_path), references=["sgdd"]), "terminal")


def test_a_pair_without_a_reference_in_it_is_not_said_to_share_nothing(tmp_path):
    sweep(tmp_path, {"sgd": level(0.70), "sam": level(0.80, 0.002), "adam": level(0.75, 0.003)})
    first, second, *_ = build_report(load_runs(tmp_path), references=["sgd"]).answer
    assert first.startswith("sam leads with 80.4%; adam is next with 75.")
    assert first.endswith("They were not compared with each other, because neither is a reference.")
    assert second == "sam is significantly better than sgd on these 4 targets."


def test_ties_and_open_questions_are_not_called_wins(tmp_path):
    wobble = {"sgd": level(0.8, 0.0), "sam": lambda target, trial: 0.8 + 0.002 * (trial - 0.9)}
    near = sweep(tmp_path / "near", wobble)
    assert near.comparisons[0].deciding.high < MARGIN
    assert "statistically tied" in near.answer[0]
    swings = {"sgd": level(0.7), "sam": lambda target, trial: 0.71 + 0.1 * (trial - 1)}
    far = sweep(tmp_path / "far", swings)
    assert far.answer[0].endswith(": inconclusive.")


def test_a_tie_is_corrected_for_the_number_of_pairs(tmp_path):
    """Two one-sided t tests by SciPy, doubled, then Holm: a tie alone, but not among six pairs."""
    near = {"sgd": level(0.8, 0.0), "sam": lambda target, trial: 0.8 + 0.0025 * (trial - 1)}
    alone = sweep(tmp_path / "alone", near)
    assert alone.comparisons[0].verdict == "statistically tied"
    more = {"gam": lambda target, trial: 0.8 - 0.0024 * (trial - 1), "fad": level(0.9, 0.004)}
    report = sweep(tmp_path / "more", near | more)
    means = {
        name: [100 * sum(of(target, trial) for target in range(4)) / 4 for trial in range(3)]
        for name, of in (near | more).items()
    }
    pairs = list(itertools.combinations(means, 2))
    outside = []
    for a, b in pairs:
        gap = [x - y for x, y in zip(means[a], means[b], strict=True)]
        below = scipy.stats.ttest_1samp(gap, -MARGIN, alternative="greater").pvalue
        above = scipy.stats.ttest_1samp(gap, MARGIN, alternative="less").pvalue
        outside.append(min(1.0, 2 * max(below, above)))
    expected = dict(zip(map(frozenset, pairs), holm(outside), strict=True))
    for pair in report.comparisons:
        assert pair.outside == pytest.approx(expected[frozenset((pair.a, pair.b))], rel=1e-6)
    assert expected[frozenset(("sgd", "sam"))] > 0.05
    told = json.loads(write(report, "json"))["comparisons"]
    assert [one["p_tied"] for one in told] == [pair.outside for pair in report.comparisons]


def test_with_few_seeds_the_targets_decide(tmp_path):
    report = sweep(tmp_path, {"sgd": level(0.7), "sam": level(0.8, 0.002)}, trials=2)
    (pair,) = report.comparisons
    assert (pair.over_trials.units, pair.deciding.unit) == (2, "targets")
    assert "over 4 targets" in report.answer[0]
    assert "CI, targets" in write(report, "markdown")
    one = sweep(tmp_path / "one", {"sgd": level(0.7), "sam": level(0.8, 0.002)}, DOMAINS[:1])
    text, (row,) = write(one, "markdown"), json.loads(write(one, "json"))["comparisons"]
    assert ("CI, seeds" in text, "CI, targets" in text) == (True, False)
    assert (row["low"], row["targets_low"]) == (row["seeds_low"], None)
    assert report.answer[0].endswith("significant across targets.")


def test_one_target_and_one_seed_give_no_interval(tmp_path):
    report = sweep(tmp_path, {"sgd": level(0.7), "sam": level(0.8)}, DOMAINS[:1], trials=1)
    first, *_, last = report.answer
    assert "+10.0 points; one target and one seed give no interval" in first
    assert "significant" not in first
    assert last == "Of PACS's 4 targets, 1 was run (art_painting)."
    (pair,) = json.loads(write(report, "json"))["comparisons"]
    assert (pair["low"], pair["p_adjusted"], pair["verdict"]) == (None, None, "no interval")
    assert report.contrasts.note.startswith("Nothing to test")


def test_a_target_has_its_unit_in_the_sentence_and_the_table(tmp_path):
    angles = tuple(map(str, range(0, 90, 15)))
    one = record(0, ("75",), lambda domain, part: 0.5, angles)
    write_run(tmp_path / "run", config(("75",), dataset="RotatedDigits"), [one])
    report = build_report(load_runs(tmp_path))
    assert report.answer[-1] == "Of RotatedDigits's 6 targets, 1 was run (75°)."
    assert "75°" in write(report, "markdown").split("optimizer", 1)[1]


@pytest.mark.parametrize("trials", [2, 3])
@pytest.mark.parametrize(("better", "start"), [(0.80, "fad leads"), (0.75, "fad and sgd lead")])
def test_equal_differences_are_no_evidence(tmp_path, trials, better, start):
    """Seeds on a small target often agree to the image."""
    steady = {"fad": level(better, noise=0), "sgd": level(0.75, noise=0)}
    report = sweep(tmp_path, steady, DOMAINS[:1], trials)
    assert report.answer[0].startswith(start)
    assert "the differences do not vary, so there is no interval" in report.answer[0]
    (pair,) = json.loads(write(report, "json"))["comparisons"]
    assert (pair["p_adjusted"], pair["verdict"]) == (None, "no interval")
    alone = paired(load_runs(tmp_path).runs, "fad", "sgd")
    assert (alone.p, alone.p_outside(MARGIN), alone.clear) == (1, 1, False)


def test_methods_without_all_targets_are_not_ranked(tmp_path):
    sweep(tmp_path, {"sgd": level(0.7), "adam": level(0.6)}, TWO)
    report = sweep(tmp_path, {"sam": level(0.9)}, TWO[:1])
    assert report.answer[0].startswith("sgd leads")
    assert "1 method lacks a target and is not ranked." in report.answer
    alone = sweep(tmp_path / "alone", {"sgd": level(0.7)})
    assert alone.answer[0].endswith("it is the only method, so nothing is compared.")


@pytest.mark.parametrize("form", ["terminal", "markdown", "latex", "json"])
def test_every_format_begins_with_the_answer(tmp_path, form):
    report = sweep(tmp_path, {"sgd": level(0.7), "sam": level(0.8, 0.002)})
    text = write(report, form).replace("\n% ", " ")
    begin = " ".join(text.split())
    assert 0 <= begin.find("sam leads with 80.") < 20
    assert form == "json" or text.index("CI, seeds") < text.index("Avg.")


def test_the_command_takes_a_reference(tmp_path):
    sweep(tmp_path, {"sgd": level(0.7), "sam": level(0.8, 0.002), "adam": level(0.71)})
    given = ["report", str(tmp_path), "--format", "json", "--reference", "adam"]
    found = CliRunner().invoke(app, given, catch_exceptions=False)
    pairs = json.loads(found.stdout)["comparisons"]
    assert [(pair["a"], pair["b"]) for pair in pairs] == [("sam", "adam"), ("sgd", "adam")]
