"""DSON against its formulas, image by image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steppe.algorithms import Losses, build_algorithm
from tests.algorithms.convolutional import (
    NORMS,
    Maps,
    assert_close,
    by_hand,
    classified,
    domain_numbers,
    losses_of,
    make,
    make_convolutional,
    make_prepared,
    normalized,
)
from tests.algorithms.oracles import (
    Image,
    assert_equal_losses,
    images_of,
    make_batches,
    mean,
    move,
)


def moments(xs: Maps) -> tuple[Tensor, Tensor, int]:
    """Of each channel over all pixels of some maps: mean, variance, and how many they are."""
    rows = torch.cat([x.flatten(1) for x in xs], 1)
    mu = rows.sum(1) / rows.shape[1]
    return mu, ((rows - mu[:, None]) ** 2).sum(1) / rows.shape[1], rows.shape[1]


def mixed(norm: Any, x: Tensor, d: int, mu_d: Tensor, var_d: Tensor) -> Tensor:
    w = 1 / (1 + (-norm.mix[d]).exp())
    mu_x, var_x, _ = moments([x])
    return normalized(norm, x, w * mu_d + (1 - w) * mu_x, w * var_d + (1 - w) * var_x, d)


class LiveNorms:
    """Normalizes by each domain's images, and keeps what running statistics become."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.found: dict[Any, list[Tensor]] = {}

    def __call__(self, norm: Any, xs: Maps) -> Maps:
        of_domains = {
            d: moments([x for x, number in zip(xs, self.numbers, strict=True) if number == d])
            for d in self.numbers
        }
        means, variances = norm.running_mean.clone(), norm.running_var.clone()
        for d, (mu, var, n) in of_domains.items():
            means[d] = 0.7 * means[d] + 0.3 * mu.detach()
            variances[d] = 0.7 * variances[d] + 0.3 * var.detach() * n / (n - 1)
        self.found[norm] = [means, variances]
        pairs = zip(xs, self.numbers, strict=True)
        return [mixed(norm, x, d, *of_domains[d][:2]) for x, d in pairs]


def estimated(d: int) -> Callable[[Any, Maps], Maps]:
    """Normalization by a domain's running statistics."""
    return lambda norm, xs: [
        mixed(norm, x, d, norm.running_mean[d], norm.running_var[d]) for x in xs
    ]


def norm_state(dson: Any) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in dson.named_buffers() if ".norm." in name}


def assert_committed(dson: Any, live: LiveNorms, count: int) -> None:
    for norm, (means, variances) in live.found.items():
        torch.testing.assert_close(norm.running_mean, means, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(norm.running_var, variances, rtol=1e-11, atol=1e-13)
        assert norm.num_batches_tracked == count
    assert {*live.found} == {*dson.norms.values()}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dson(dropout):
    dson = make("DSON", dropout)
    assert [*dson.norms] == [f"network.featurizer.{name}" for name in NORMS]
    for step in range(3):
        prepared, domains = make_prepared(dson, step)
        images, numbers = list(chain(*domains)), domain_numbers(domains)
        before = norm_state(dson)

        def expected(live: LiveNorms, images: list[Image] = images) -> Maps:
            return losses_of(dson.network, by_hand(dson.network, images, norms=live), images)

        live, first = LiveNorms(numbers), dson(prepared)
        losses = expected(live)
        assert_equal_losses(dson, first, Losses(mean(losses)))
        for d, domain in enumerate(domains):
            own = LiveNorms([d] * len(domain))
            risk = mean(expected(own, domain))
            for found in (dson.risk(prepared, d), dson.risks(prepared)[d]):
                torch.testing.assert_close(found, risk, rtol=1e-11, atol=0)
        move(dson, step)
        again = dson(prepared, first=first.aux)
        assert_equal_losses(dson, again, Losses(mean(expected(LiveNorms(numbers)))))
        assert all(torch.equal(b, before[name]) for name, b in norm_state(dson).items())
        dson.commit(prepared, {"main": first})
        assert_committed(dson, live, step + 1)


def test_dsons_predictions():
    dson = make("DSON", 0.5)
    for step in range(2):  # to statistics that differ between domains
        prepared, _ = make_prepared(dson, step)
        dson.commit(prepared, {"main": dson(prepared)})
    batch, *_ = make_batches((4,))
    (images,) = images_of([batch], None)

    def predicted(norms: Callable[[Any, Maps], Maps], images: Sequence[Image] = images) -> Maps:
        return classified(dson.network, by_hand(dson.network, images, norms=norms))

    dson.eval()
    each = [predicted(estimated(d)) for d in range(3)]
    for d, expected in enumerate(each):
        assert_close(dson.predict_source(batch.images, d), expected)
    assert_close(dson.predict(batch.images), [mean(zs) for zs in zip(*each, strict=True)])

    dson.train()  # as SWAD estimates statistics
    batches = make_batches((3, 3, 3))
    live = LiveNorms([0, 0, 0, 1, 1, 1, 2, 2, 2])
    expected = predicted(live, list(chain(*images_of(batches, None))))
    found = dson.predict(torch.cat([b.images for b in batches]))
    assert_close(found, expected)
    assert_committed(dson, live, 3)


def test_dsons_start_is_the_batch_norms():
    network = make_convolutional()
    norms = {name: network.featurizer.get_submodule(name) for name in NORMS}
    dson: Any = build_algorithm("DSON", network, 3, lr_factor=7.0)
    (objective,) = dson.objectives()
    mixes = [norm.mix for norm in dson.norms.values()]
    assert dict(objective.lr_factors) == dict.fromkeys(mixes, 7.0)
    assert {*objective.parameters} == {*dson.parameters()}
    assert {*mixes} < {*dson.parameters()}
    for (name, old), norm in zip(norms.items(), dson.norms.values(), strict=True):
        assert network.featurizer.get_submodule(name) is norm
        for key in ("weight", "bias", "running_mean", "running_var"):
            assert torch.equal(getattr(norm, key), getattr(old, key).expand(3, -1))
        assert not norm.mix.any()  # a share of 1/2
        assert norm.mix.shape == (3,)
        assert (norm.eps, norm.momentum) == (0.125, 0.3)
        assert norm.training
        assert norm.num_batches_tracked == 0


@pytest.mark.parametrize("mix", [40.0, -800.0])
def test_dson_with_one_domain_is_batch_or_instance_norm(mix):
    network = make_convolutional()
    dson: Any = build_algorithm("DSON", network, 1).double()
    (norm, _) = dson.norms.values()
    other = nn.BatchNorm2d(5, 0.125, 0.3) if mix > 0 else nn.InstanceNorm2d(5, 0.125, affine=True)
    nn.init.constant_(norm.mix, mix)
    x = torch.randn(6, 5, 4, 4, dtype=torch.float64)
    with network.of_domains((6,)):
        torch.testing.assert_close(norm(x), other.double()(x), rtol=1e-11, atol=1e-12)
