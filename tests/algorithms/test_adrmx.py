"""ADRMX: whose images are remixed, the contrastive loss, both networks, and turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.algorithms import Prepared, build_algorithm
from steppe.algorithms.pairs import contrastive_loss, draw_pairs, is_pair
from steppe.training.backbones import build_network
from tests.algorithms.oracles import N_CLASSES, make_batches, make_network, move

SIZES = (5, 7, 4)
LABELS = torch.tensor([0, 0, 2, 2, 4, 0, 2, 2, 2, 1, 1, 3, 0, 2, 1, 1])
DOMAINS = torch.tensor([0] * 5 + [1] * 7 + [2] * 4)
REMIXED = [True, True, True, False, False]
"""Classes 3 and 4 have a single image."""


def make(**options: Any) -> tuple[Any, Prepared]:
    options = {"width": 8, "depth": 3, **options}
    built = build_algorithm("ADRMX", make_network(), 3, **options).double()
    batches = make_batches(SIZES)
    batches = [b._replace(labels=y) for b, y in zip(batches, LABELS.split(SIZES), strict=True)]
    torch.manual_seed(5)
    return built, built.prepare(batches)


def apart(algorithm: Any) -> None:
    """Moves everything, so that the two networks differ."""
    move(algorithm, 1)


def test_remixed_are_images_of_a_class_from_different_domains() -> None:
    torch.manual_seed(0)
    pairs = torch.stack([draw_pairs(LABELS, DOMAINS, N_CLASSES) for _ in range(300)])
    for of_step in pairs:
        assert is_pair(of_step, LABELS, DOMAINS).tolist() == REMIXED
    for c in (0, 1, 2):
        every = {tuple(pair) for pair in pairs[:, :, c].tolist()}
        images = range(len(LABELS))
        assert every == {
            (i, j)
            for i in images
            for j in images
            if LABELS[i] == LABELS[j] == c and DOMAINS[i] != DOMAINS[j]
        }
    # DomainBed's: two positions within the class, taken for positions in the batch.
    positions = torch.stack([torch.randperm(LABELS.tolist().count(c))[:2] for c in (0, 1, 2)])
    assert positions.max() < 6
    assert not (LABELS[positions] == torch.arange(3)[:, None]).all()


def test_the_remix_loss_is_of_those_pairs() -> None:
    algorithm, prepared = make()
    apart(algorithm)
    phi = algorithm.network.featurizer(prepared.images)
    psi = algorithm.domain_network.featurizer(prepared.images)
    first, second = prepared.draws["remixed"]
    expected = torch.zeros(())
    for c in (0, 1, 2):
        i, j = first[c], second[c]
        mixed = algorithm.network.classifier(phi[i] - psi[i] + psi[j])
        expected = expected + F.cross_entropy(mixed[None], torch.tensor([c])) / N_CLASSES
    torch.testing.assert_close(algorithm(prepared).parts["remix"], expected.double())


def test_classes_of_a_single_domain_are_not_remixed() -> None:
    algorithm, prepared = make()
    draws = {**prepared.draws, "domains": torch.zeros(sum(SIZES), dtype=torch.int64)}
    assert algorithm(replace(prepared, draws=draws)).parts["remix"] == 0


def slow_contrast(features: Tensor, labels: Tensor) -> Tensor:
    unit = features / features.norm(dim=1, keepdim=True)
    n, losses = len(labels), []
    for i in range(n):
        others = [j for j in range(n) if j != i]
        scores = {j: ((unit[i] * unit[j]).sum() / 0.07).exp() for j in others}
        same = [j for j in others if labels[j] == labels[i]]
        if same:
            total = sum(scores.values())
            losses.append(-sum((scores[j] / total).log() for j in same) / len(same))
    return sum(losses) / len(losses)


def test_the_contrastive_loss() -> None:
    rng = torch.Generator().manual_seed(0)
    features = 3 * torch.randn(sum(SIZES), 6, dtype=torch.float64, generator=rng)
    found = contrastive_loss(features, LABELS)
    torch.testing.assert_close(found, slow_contrast(features, LABELS))
    torch.testing.assert_close(contrastive_loss(2 * features, LABELS), found)
    assert contrastive_loss(features[:3], torch.arange(3)) == 0


@pytest.mark.parametrize("rounding", [0.0, 1e-7])
def test_rounding_errors_are_no_directions(rounding: float) -> None:
    rng = torch.Generator().manual_seed(0)
    difference = rounding * torch.randn(sum(SIZES), 6, dtype=torch.float64, generator=rng)
    loss = contrastive_loss(difference.requires_grad_(), LABELS)
    (gradient,) = torch.autograd.grad(loss, difference)
    assert gradient.abs().max() <= 100 * rounding


def test_the_networks_start_equal_and_learn_apart() -> None:
    algorithm, prepared = make(penalty=0.5, domain_weight=2.0, contrast=0.25, remix=3.0)
    twins = zip(
        algorithm.network.featurizer.parameters(),
        algorithm.domain_network.featurizer.parameters(),
        strict=True,
    )
    twins = list(twins)
    assert all(a is not b and torch.equal(a, b) for a, b in twins)
    apart(algorithm)
    losses = algorithm(prepared)
    weights = {"risk": 1, "difference": 1, "domain": 2, "contrast": 0.25, "remix": 3}
    expected = sum(w * losses.parts[name] for name, w in weights.items())
    expected = expected - 0.5 * losses.parts["adversary"]
    torch.testing.assert_close(losses.total, expected)
    gradients = torch.autograd.grad(losses.total, [p for pair in twins for p in pair])
    assert all(g.abs().max() > 0 for g in gradients)
    names = algorithm.state_dict().keys()
    copies = {f"domain_{name}" for name in names if name.startswith("network.featurizer")}
    assert copies
    assert copies < names


def test_predictions_use_the_first_classifier_of_the_first_network() -> None:
    algorithm, prepared = make()
    apart(algorithm)
    hidden = algorithm.network.featurizer(prepared.images)
    head = algorithm.network.classifier
    for layer in (head.hidden[0], head.hidden[2]):
        hidden = (hidden @ layer.weight.T + layer.bias).clamp(min=0)
    expected = hidden @ head.weight.T + head.bias
    torch.testing.assert_close(algorithm.predict(prepared.images), expected)
    torch.testing.assert_close(algorithm(prepared).logits, expected)
    with torch.no_grad():
        for module in (algorithm.domain_network.featurizer, algorithm.difference_classifier):
            for parameter in module.parameters():
                parameter.zero_()
    torch.testing.assert_close(algorithm.predict(prepared.images), expected)
    own = prepared.only(1)
    torch.testing.assert_close(
        algorithm.risk(prepared, 1), F.cross_entropy(expected[5:12], own.labels)
    )


@pytest.mark.parametrize("freeze_bn", [True, False])
def test_both_networks_freeze_batch_norm(freeze_bn: bool) -> None:
    network = build_network("small-cnn", n_classes=5, image_size=8, freeze_bn=freeze_bn)
    network.featurizer.append(nn.BatchNorm1d(network.n_features))
    algorithm: Any = build_algorithm("ADRMX", network, 3).train()
    norms = [m for m in algorithm.modules() if isinstance(m, nn.BatchNorm1d)]
    assert len(norms) == 2
    assert [m.training for m in norms] == [not freeze_bn] * 2
    assert algorithm.eval().train().domain_network.featurizer.training
    assert [m.training for m in norms] == [not freeze_bn] * 2


@pytest.mark.parametrize("d_steps", [1, 2])
def test_turns_are_danns(d_steps: int) -> None:
    algorithm, prepared = make(d_steps=d_steps, beta1=0.25)
    dann = build_algorithm("DANN", make_network(), 3, d_steps=d_steps, beta1=0.25)
    for ours, theirs in zip(algorithm.objectives(), dann.objectives(), strict=True):
        assert (ours.name, ours.options) == (theirs.name, theirs.options)
        assert [ours.active(k) for k in range(12)] == [theirs.active(k) for k in range(12)]
    discriminator, main = algorithm.objectives()
    assert {*discriminator.parameters}.isdisjoint(main.parameters)
    loss = algorithm(prepared, "discriminator").total
    assert torch.equal(loss, algorithm(prepared).parts["adversary"])
    unused = torch.autograd.grad(loss, main.parameters, allow_unused=True)
    assert set(unused) == {None}
