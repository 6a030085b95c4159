"""IB-ERM, IB-IRM and SD: penalties on features and logits that reduce to others."""

import pytest
import torch
from torch import Tensor

from steppe.algorithms import ERM, Algorithm, build_algorithm
from steppe.algorithms.algorithm import domain_risks
from tests.algorithms.oracles import gradients, make_batches, make_network, move


def assert_same(algorithm: Algorithm, found: Tensor, expected: Tensor) -> None:
    """Bit for bit, with gradients."""
    assert torch.equal(found, expected)
    for a, b in zip(gradients(found, algorithm), gradients(expected, algorithm), strict=True):
        assert torch.equal(a, b)


def test_without_a_penalty_sd_is_erm():
    algorithm = build_algorithm("SD", make_network(), 3, penalty=0.0).double()
    prepared = algorithm.prepare(make_batches())
    assert_same(algorithm, algorithm(prepared).total, ERM(algorithm.network, 3)(prepared).total)


def test_sd_penalizes_the_mean_squared_logit():
    algorithm = build_algorithm("SD", make_network(), 3, penalty=0.3).double()
    prepared = algorithm.prepare(make_batches())
    with torch.no_grad():
        algorithm.network.classifier.weight.zero_()
        algorithm.network.classifier.bias.copy_(torch.tensor([2.0, 2.0, 2.0, 2.0, 2.0]))
    found, erm = algorithm(prepared).total, ERM(algorithm.network, 3)(prepared).total
    torch.testing.assert_close(
        found - erm, torch.tensor(1.2, dtype=torch.float64), rtol=1e-12, atol=0
    )


def test_ib_erm_begins_as_the_mean_risk_and_then_narrows_features():
    algorithm = build_algorithm("IB-ERM", make_network(), 3, penalty=2.0, anneal_steps=2).double()
    for step in range(4):
        prepared = algorithm.prepare(make_batches(seed=step))
        losses = algorithm(prepared)
        risk = domain_risks(algorithm.network(prepared.images), prepared).mean()
        if step < 2:
            assert_same(algorithm, losses.total, risk)
        spreads = []
        for rows in prepared.split(algorithm.network.features(prepared.images)):
            centred = rows - rows.sum(0) / len(rows)
            spreads.append((centred**2).sum() / (len(rows) - 1) / rows.shape[1])
        penalty = losses.total - risk
        expected = (2.0 if step >= 2 else 0.0) * sum(spreads) / 3
        torch.testing.assert_close(penalty, expected, rtol=1e-9, atol=1e-15)
        algorithm.commit(prepared, {"main": losses})
        move(algorithm, step)


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1)])
def test_ib_irm_anneals_two_penalties_each_at_its_step(first: int, second: int):
    network = make_network()
    options = {"anneal_steps": first, "ib_anneal_steps": second}
    both = build_algorithm("IB-IRM", network, 3, **options, ib_penalty=7.0).double()
    irm = build_algorithm("IRM", network, 3, anneal_steps=first).double()
    ib = build_algorithm("IB-ERM", network, 3, anneal_steps=second, penalty=7.0).double()
    for step in range(5):
        prepared = both.prepare(make_batches(seed=step))
        losses, of_irm, of_ib = (algorithm(prepared) for algorithm in (both, irm, ib))
        if step < second:
            assert_same(both, losses.total, of_irm.total)
        expected = of_irm.total + of_ib.total - of_ib.parts["risk"]
        torch.testing.assert_close(losses.total, expected, rtol=1e-12, atol=0)
        for algorithm, found in ((both, losses), (irm, of_irm), (ib, of_ib)):
            algorithm.commit(prepared, {"main": found})
        move(network, step)


def test_ib_irm_resets_the_optimizer_twice():
    options = {"anneal_steps": 5, "ib_anneal_steps": 2}
    (objective,) = build_algorithm("IB-IRM", make_network(), 3, **options).objectives()
    assert [step for step in range(9) if objective.reset(step)] == [2, 5]
    (objective,) = build_algorithm("IB-ERM", make_network(), 3, anneal_steps=4).objectives()
    assert [step for step in range(9) if objective.reset(step)] == [4]
