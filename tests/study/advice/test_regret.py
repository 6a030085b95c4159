"""`study.advice.regret`, its strategies and the calibration: no bias, no leak, and what is true."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from steppe.errors import UserError
from steppe.study.advice.calibration import (
    calibration,
    held_out_probabilities,
    reliability,
    winners,
)
from steppe.study.advice.regret import (
    SPLITS,
    Chooser,
    Group,
    estimate,
    evaluate,
    folds,
    halves,
    held_out,
    losses,
    regrets,
)
from steppe.study.advice.strategies import advised, always, average, probes, random, strategies
from steppe.study.advice.table import Example
from tests.study.advice.simulated import NAMES, table


def naive(example: Example, name: str) -> float:
    means = {n: float(np.mean(scores)) for n, scores in example.scores.items()}
    return max(means.values()) - means[name]


def test_regret_is_not_biased_by_taking_a_maximum() -> None:
    """With equal optimizers every choice is as good as another."""
    examples = [e for seed in range(20) for e in table(0, seed, spread=0, noise=2)]
    fitted = [regrets(e)["sam"] for e in examples]
    assert abs(np.mean(fitted)) < 3 * np.std(fitted) / math.sqrt(len(fitted))
    assert np.mean([naive(e, "sam") for e in examples]) > 0.4


def test_regret_is_a_lower_bound_near_the_truth() -> None:
    """With true means half a point apart and noise of as much in the mean of a half."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(500):
        scores = {n: 50 + i / 2 + rng.normal(size=10) for i, n in enumerate(NAMES)}
        example = Example("t", "f", "b", {}, {n: tuple(s.tolist()) for n, s in scores.items()})
        found.append(regrets(example)["adamw"])
    assert 1.8 < np.mean(found) < 2.0


def test_regret_is_that_of_both_halves_written_out() -> None:
    for example in table(0, 0, spread=0, noise=2, seeds=5)[:5]:
        found = []
        for half in combinations(range(5), 2):
            for ours in (set(half), set(range(5)) - set(half)):
                rest = set(range(5)) - ours
                first = {n: np.mean([s[i] for i in ours]) for n, s in example.scores.items()}
                second = {n: np.mean([s[i] for i in rest]) for n, s in example.scores.items()}
                found.append(second[max(first, key=first.__getitem__)] - second["fad"])
        assert regrets(example)["fad"] == pytest.approx(np.mean(found))


def test_halves_are_all_or_a_sample() -> None:
    assert len(halves(10)) == 2 * SPLITS
    assert halves(30).shape == (SPLITS, 30)
    with pytest.raises(UserError, match="at least 2 seeds"):
        halves(1)


@pytest.mark.parametrize("by", ["family", "base"])
def test_a_held_out_group_does_not_influence_its_own_choice(by: Group) -> None:
    examples, rng = table(2, 0), np.random.default_rng(0)
    noise = [{n: tuple(rng.uniform(0, 100, 10).tolist()) for n in NAMES} for _ in examples]
    corrupted = [
        replace(e, scores=scores) if getattr(e, by) == f"{by}0" else e
        for e, scores in zip(examples, noise, strict=True)
    ]
    ours = [e.task for e in examples if getattr(e, by) == f"{by}0"]
    every = {**strategies(examples), "advised by one": advised(["x0"])}
    for name, strategy in every.items():
        before, after = held_out(examples, strategy, by), held_out(corrupted, strategy, by)
        assert [before[t] for t in ours] == [after[t] for t in ours]
        if name.startswith("advised"):  # the scores do matter to others
            assert before != after
    first, second = (held_out_probabilities(rows, by=by) for rows in (examples, corrupted))
    assert [first[t] for t in ours] == [second[t] for t in ours]


def test_relatives_are_held_out_with_a_base() -> None:
    examples = table(0, 0)
    mixed = [replace(e, base=f"base{i % 3}") for i, e in enumerate(examples)]
    for kept, out in folds(mixed, "base"):
        assert not {e.family for e in kept} & {e.family for e in out}
    for by in ("family", "base"):
        tasks = [e.task for _, out in folds(examples, by) for e in out]  # type: ignore[arg-type]
        assert sorted(tasks) == sorted(e.task for e in examples)


def test_strategies_choose_what_they_say() -> None:
    examples = table(2, 0)
    tilted = [replace(e, scores={**e.scores, "gam": (99.0,) * 10}) for e in examples]
    x = {"a": 1.0, "b": 3.0, "x0": 0.0}
    probed = [replace(e, indicators=x) for e in examples]

    def choice(strategy: object, on: Sequence[Example], given: Mapping[str, float]) -> object:
        chooser: Chooser = strategy(on)  # type: ignore[operator]
        return dict(chooser(given))

    assert choice(always("sam"), examples, x) == {"sam": 1}
    assert choice(average, tilted, x) == {"gam": 1}
    assert choice(advised(), tilted, tilted[0].indicators) == {"gam": 1}
    assert choice(random, examples, x) == dict.fromkeys(NAMES, 0.2)
    assert choice(probes({"sgd": "a", "fad": "b"}), probed, x) == {"fad": 1}
    with pytest.raises(UserError, match="unknown optimizer 'lion'"):
        always("lion")(examples)
    with pytest.raises(UserError, match="unknown indicator 'c'"):
        probes({"sgd": "c"})(examples)
    found = losses(examples, held_out(examples, random))
    assert found["family0-0"] == pytest.approx(np.mean(list(regrets(examples[0]).values())))


def test_families_are_the_unit_of_intervals() -> None:
    examples = table(0, 0, families=3)
    values = {e.task: float(e.family[-1]) for e in examples}
    found = estimate(examples, values)
    assert (found.mean, found.families) == (1, 3)
    assert found.high - 1 == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    assert estimate(examples[:4], values).high == math.inf


def test_advice_pays_where_an_indicator_decides() -> None:
    gains, better = [], []
    for seed in range(10):
        found = evaluate(table(2, seed), {"average": average, "advised": advised()})
        gains.append(found.difference("advised", "average").mean)
        better.append(found.difference("advised", "average").high < 0)
    assert np.mean(gains) < -0.5
    assert np.mean(better) >= 0.3


def test_advice_costs_little_where_nothing_predicts() -> None:
    found = [
        evaluate(table(0, seed), {"average": average, "advised": advised()}).difference(
            "advised", "average"
        )
        for seed in range(20)
    ]
    assert sum(difference.low > 0 for difference in found) <= 2
    assert np.mean([difference.mean for difference in found]) < 0.1


def test_probabilities_come_true_as_often_as_they_say() -> None:
    pairs, gains, brier, uniform = [], [], [], []
    for seed in range(12):
        examples = table(2, seed)
        probabilities = held_out_probabilities(examples)
        found = calibration(examples, probabilities)
        gains.append(found.gain.mean)
        brier.append(found.brier.mean)
        uniform.append(found.brier_uniform.mean)
        pairs += [(probabilities[e.task][n], winners(e)[n]) for e in examples for n in NAMES]
    assert np.mean(gains) > 0.2
    assert np.mean(brier) < np.mean(uniform) - 0.1
    for found_bin in reliability(pairs):
        assert found_bin.frequency == pytest.approx(found_bin.forecast, abs=0.12)


def test_scores_of_probabilities_are_their_formulas() -> None:
    example = Example("t", "f", "b", {}, {"a": (1.0,), "b": (2.0,), "c": (0.0,), "d": (2.0,)})
    assert winners(example) == {"a": 0, "b": 0.5, "c": 0, "d": 0.5}
    p = {"t": {"a": 0.1, "b": 0.6, "c": 0.1, "d": 0.2}}
    found = calibration([example], p)
    assert found.brier.mean == pytest.approx(0.01 + 0.01 + 0.01 + 0.09)
    assert found.brier_uniform.mean == pytest.approx(4 * 0.0625)
    assert found.gain.mean == pytest.approx((math.log(2.4) + math.log(0.8)) / 2)
    assert sum(b.count for b in found.bins) == 4
    assert reliability([(1.0, 1.0)])[0].count == 1
