"""URM: bounded features, and the two losses of the discriminator's game."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from steppe.algorithms import Prepared, build_algorithm
from tests.algorithms.oracles import N_FEATURES, make_batches, make_network

SIZES = (5, 7, 4)


def make(dropout: float = 0.0, **options: Any) -> tuple[Any, Prepared]:
    built = build_algorithm("URM", make_network(dropout), 3, **options).double()
    torch.manual_seed(4)
    return built, built.prepare(make_batches(SIZES))


def test_without_a_penalty_it_is_erm_of_bounded_features() -> None:
    urm, prepared = make(penalty=0.0)
    network = deepcopy(urm.network)
    network.featurizer.append(nn.Tanh())
    linear = nn.Linear(N_FEATURES, network.n_classes).double()
    linear.load_state_dict(network.classifier.state_dict())
    network.classifier = linear
    erm = build_algorithm("ERM", network, 3)
    ours, theirs = urm(prepared).total, erm(prepared).total
    assert torch.equal(ours, theirs)
    gradients = [
        torch.autograd.grad(loss, list(algorithm.network.parameters()))
        for algorithm, loss in ((urm, ours), (erm, theirs))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert torch.equal(urm.predict(prepared.images), erm.predict(prepared.images))
    assert torch.equal(urm.risk(prepared, 1), erm.risk(prepared, 1))


def test_the_losses_of_the_game() -> None:
    urm, prepared = make(dropout=0.5, penalty=0.3, depth=2)
    z = urm.network.features(prepared.images, prepared.keep).tanh()
    sizes = [(layer.in_features, layer.out_features) for layer in urm.discriminator[::2]]
    assert sizes == [(N_FEATURES, 100), (100, 100), (100, 100), (100, 1)]

    def chance(x: torch.Tensor) -> torch.Tensor:
        for layer in urm.discriminator[::2]:
            x = x @ layer.weight.T + layer.bias
            x = torch.where(x > 0, x, 0.01 * x) if layer.out_features > 1 else x
        return x.sigmoid()  # that it is noise

    noise = prepared.draws["noise"]
    main, discriminator = urm.objectives()
    assert (main.name, discriminator.name) == ("main", "discriminator")
    found = urm(prepared, "discriminator").total
    expected = -chance(noise).log().mean() - 0.3 * (1 - chance(z)).log().mean()
    torch.testing.assert_close(found, expected)
    network = torch.autograd.grad(found, main.parameters, retain_graph=True, allow_unused=True)
    assert set(network) == {None}
    found, risk = urm(prepared), urm.risks(prepared)
    sizes_of = torch.tensor(SIZES) / sum(SIZES)
    expected = (risk * sizes_of).sum() - 0.3 * chance(z).log().mean()
    torch.testing.assert_close(found.total, expected)


def test_noise_fills_the_range_of_the_features() -> None:
    urm, prepared = make()
    noise = torch.cat([urm.prepare(make_batches(SIZES)).draws["noise"] for _ in range(100)])
    assert noise.shape == (100 * sum(SIZES), N_FEATURES)
    assert noise.dtype == prepared.images.dtype
    assert -1 <= noise.min() < -0.99
    assert 0.99 < noise.max() < 1
    assert noise.var() == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize(("lr", "options"), [(None, {}), (1e-4, {"lr": 1e-4})])
def test_the_discriminators_learning_rate(lr: float | None, options: dict[str, float]) -> None:
    urm, _ = make(lr=lr)
    main, discriminator = urm.objectives()
    assert (main.options, discriminator.options) == ({}, options)
    assert all(o.active(step) for o in (main, discriminator) for step in range(5))
