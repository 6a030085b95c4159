"""`study.advice.associations`: p values hold under the null, relatives included."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from steppe.errors import UserError
from steppe.reports.holm import holm
from steppe.study.advice.associations import associations, block_orders
from tests.study.advice.simulated import table


def test_p_values_are_uniform_where_nothing_is_associated() -> None:
    """The test that takes relatives as independent rejects far too often on the same tables."""
    blocks, naive = [], []
    for seed in range(250):
        examples = table(0, seed, indicators=1, seeds=2)
        blocks.append(associations(examples, "gam", permutations=199, seed=seed)[0].p)
        gains = [np.mean(e.scores["gam"]) - np.mean(e.scores["adamw"]) for e in examples]
        naive.append(stats.spearmanr([e.indicators["x0"] for e in examples], gains).pvalue)
    assert stats.kstest(blocks, "uniform").pvalue > 0.01
    assert np.mean(np.array(naive) < 0.05) > 0.08


def test_an_association_is_found() -> None:
    examples = table(2, 0)
    first, *others = associations(examples, "gam")
    gains = [np.mean(e.scores["gam"]) - np.mean(e.scores["adamw"]) for e in examples]
    rho = stats.spearmanr([e.indicators["x0"] for e in examples], gains).statistic
    assert first.rho == pytest.approx(rho)
    assert first.adjusted < 0.05
    found = [first, *others]
    assert [a.adjusted for a in found] == holm([a.p for a in found])
    assert associations(examples, "gam") == (first, *others)


def test_families_are_exchanged_as_a_whole() -> None:
    families = ["a", "b", "a", "c", "b", "d", "d", "d"]
    orders = block_orders(families, 200, 0)
    assert {tuple(sorted(order)) for order in orders.tolist()} == {tuple(range(8))}
    assert {tuple(order[[0, 2]]) for order in orders} == {(0, 2), (1, 4)}
    assert all(order[3] == 3 and tuple(order[5:]) == (5, 6, 7) for order in orders)


def test_a_constant_indicator_is_not_associated() -> None:
    examples = [replace(e, indicators={"flat": 1.0}) for e in table(0, 0)]
    assert (associations(examples, "gam")[0].rho, associations(examples, "gam")[0].p) == (0, 1)
    place = [
        replace(
            e,
            indicators={"images": float(e.task[-1])},
            scores={**e.scores, "gam": tuple(s - int(e.task[-1]) for s in e.scores["adamw"])},
        )
        for e in table(0, 0)
    ]
    same = associations(place, "gam")[0]
    assert (round(same.rho, 6), same.p) == (-1, 1)  # what families share cannot be tested
    with pytest.raises(UserError, match="unknown optimizer 'lion'"):
        associations(examples, "lion")
