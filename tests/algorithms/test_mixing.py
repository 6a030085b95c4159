"""Mixup and MLDG against their formulas, image by image, and how they draw."""

import copy
from collections import Counter
from itertools import permutations

import pytest
import torch
from scipy import stats

from steppe.algorithms import Algorithm, Losses, build_algorithm
from steppe.domains.batches import Batch
from tests.algorithms.oracles import (
    SIZES,
    Image,
    assert_equal_losses,
    cross_entropy,
    gradients,
    images_of,
    logits,
    make_batches,
    make_network,
    mean,
    risk,
)


def numbered(sizes: tuple[int, ...] = SIZES) -> list[Batch]:
    """Batches whose labels tell the images apart."""
    labels = torch.arange(sum(sizes)).split(sizes)
    return [Batch(b.images, own) for b, own in zip(make_batches(sizes), labels, strict=True)]


def mixup(n_domains: int, n_classes: int, alpha: float = 0.2, dropout: float = 0.0) -> Algorithm:
    return build_algorithm("Mixup", make_network(dropout, n_classes), n_domains, alpha=alpha)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("alpha", [0.2, 2.0])
def test_mixup_is_the_formula(alpha: float, dropout: float):
    algorithm, batches = mixup(3, sum(SIZES), alpha, dropout), numbered()
    prepared = algorithm.prepare(batches)
    images = [image for domain in images_of(batches, None) for image in domain]
    domain = [d for d, n in enumerate(SIZES) for _ in range(n)]

    losses: dict[tuple[int, int], list] = {}
    keep = [1.0] * len(prepared.labels) if prepared.keep is None else prepared.keep
    draws = prepared.draws["others"].tolist(), prepared.draws["shares"].tolist()
    for i, j, share, row in zip(prepared.labels.tolist(), *draws, keep, strict=True):
        pixels = share * images[i].pixels + (1 - share) * images[j].pixels
        z = logits(algorithm.network, Image(pixels, i, row))
        loss = share * cross_entropy(z, i) + (1 - share) * cross_entropy(z, j)
        losses.setdefault((domain[i], domain[j]), []).append(loss)
    # The images that two domains can pair, each once.
    assert len(set(prepared.labels.tolist())) == len(prepared.labels)
    assert {pair: len(own) for pair, own in losses.items()} == {
        (i, j): min(SIZES[i], SIZES[j]) for i, j in losses
    }
    total = sum(mean(own) for own in losses.values()) / 3
    assert_equal_losses(algorithm, algorithm(prepared), Losses(total))


def test_mixups_ring():
    algorithm = mixup(4, 4)
    rings = Counter()
    for seed in range(300):
        torch.manual_seed(seed)
        prepared = algorithm.prepare(numbered((1, 1, 1, 1)))
        after = dict(zip(prepared.labels.tolist(), prepared.draws["others"].tolist(), strict=True))
        rings[(after[0], after[after[0]], after[after[after[0]]])] += 1
    # From domain 0 through all the others, in each of the six orders about as often.
    assert rings.keys() == set(permutations((1, 2, 3)))
    assert stats.chisquare(list(rings.values())).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_mixups_shares(alpha: float):
    n = 2000
    algorithm, batches = mixup(n, 2, alpha), [make_batches((2,))[0]] * n
    torch.manual_seed(0)
    shares = algorithm.prepare(batches).draws["shares"].view(n, 2)
    assert torch.equal(shares[:, 0], shares[:, 1])  # one for every pair of domains
    assert stats.kstest(shares[:, 0].numpy(), stats.beta(alpha, alpha).cdf).pvalue > 1e-3
    assert abs(shares.var() - 1 / (4 * (2 * alpha + 1))) < 0.01


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_mixup_of_nothing_is_cross_entropy(share: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.distributions.Beta.sample", lambda beta: beta.mean * 0 + share)
    algorithm, batches = mixup(3, 5), make_batches((4, 4, 4))
    prepared = algorithm.prepare(batches)
    expected = mean(risk(algorithm.network, d) for d in images_of(batches, None))
    assert_equal_losses(algorithm, algorithm(prepared), Losses(expected))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("beta", "n_meta_test"), [(1.0, 2), (0.3, 1), (2.0, 3), (0.0, 1)])
def test_mldg_is_the_formula(beta: float, n_meta_test: int, dropout: float):
    network, batches = make_network(dropout), make_batches((*SIZES, 3))
    options = {"beta": beta, "n_meta_test": n_meta_test, "inner_lr": 0.3}
    algorithm = build_algorithm("MLDG", network, 4, **options)
    prepared = algorithm.prepare(batches)
    images = images_of(batches, prepared.keep)

    before_after: list[tuple] = []
    by_hand = [torch.zeros_like(p) for p in network.parameters()]
    for i, j in prepared.draws["pairs"]:
        clone = copy.deepcopy(network)
        before = risk(clone, images[i])
        g_i = gradients(before, clone)
        with torch.no_grad():
            for p, g in zip(clone.parameters(), g_i, strict=True):
                p -= 0.3 * g
        after = risk(clone, images[j])
        before_after.append((before.detach(), after.detach()))
        for g, a, b in zip(by_hand, g_i, gradients(after, clone), strict=True):
            g += (a + beta * b) / 4
    assert len(before_after) == 4 - n_meta_test
    total = sum(before + beta * after for before, after in before_after) / 4
    parts = {
        "risk": mean(before for before, _ in before_after),
        "risk after inner step": mean(after for _, after in before_after),
    }
    losses = algorithm(prepared)
    assert losses.parts.keys() == parts.keys()
    assert_equal_losses(algorithm, losses, Losses(total, parts), by_hand)


@pytest.mark.parametrize("n_meta_test", [1, 2, 3])
def test_mldgs_pairs(n_meta_test: int):
    algorithm = build_algorithm("MLDG", make_network(), 4, n_meta_test=n_meta_test)
    batches, seen = make_batches((1, 1, 1, 1)), Counter()
    for seed in range(300):
        torch.manual_seed(seed)
        pairs = algorithm.prepare(batches).draws["pairs"]
        training, testing = ([pair[k] for pair in pairs] for k in (0, 1))
        assert len(pairs) == len(set(training)) == 4 - n_meta_test
        assert not set(training) & set(testing)
        assert len(set(testing)) == min(n_meta_test, len(pairs))
        seen.update(pairs)
    assert seen.keys() == set(permutations(range(4), 2))
    assert min(seen.values()) > 0.6 * seen.total() / 12


def test_mldg_leaves_a_frozen_featurizer_alone():
    network = make_network()
    network.featurizer.requires_grad_(False)
    algorithm = build_algorithm("MLDG", network, 3)
    algorithm(algorithm.prepare(make_batches())).total.backward()
    assert [p.grad is not None for p in network.parameters()] == [False, False, True, True]


@pytest.mark.parametrize(("n_domains", "n_meta_test"), [(2, 2), (3, 3), (4, 9)])
def test_mldg_leaves_one_domain_to_train_on(n_domains: int, n_meta_test: int):
    algorithm = build_algorithm("MLDG", make_network(), n_domains, n_meta_test=n_meta_test)
    prepared = algorithm.prepare(make_batches((2,) * n_domains))
    ((training, testing),) = prepared.draws["pairs"]
    assert training != testing
    assert algorithm(prepared).total.isfinite()
