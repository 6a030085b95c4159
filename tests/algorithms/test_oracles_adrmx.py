"""ADRMX against its equation, image by image."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steppe.algorithms import Losses, Network, Prepared, build_algorithm
from steppe.algorithms.pairs import contrastive_loss
from tests.algorithms.oracles import (
    MEAN,
    N_CLASSES,
    SIDE,
    STD,
    buffers,
    cross_entropy,
    features,
    mean,
    move,
)
from tests.algorithms.stepping import (
    Domains,
    assert_losses,
    assert_predicts,
    linear,
    steps,
    without_classes,
)


def make_adrmx(dropout: float, **options: Any) -> Any:
    """Of a network that is wide enough for classifiers with a quarter of its width."""
    torch.manual_seed(0)
    featurizer = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 16), nn.Tanh())
    network = Network(featurizer, 16, N_CLASSES, MEAN, STD, dropout=dropout)
    return build_algorithm("ADRMX", network.double(), 3, width=8, **options).double()


def perceptron(layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
    for layer in layers[:-1]:
        x = linear(layer, x)
        x = torch.where(x > 0, x, 0)
    return linear(layers[-1], x)


def classify(classifier: Any, x: Tensor) -> Tensor:
    first, _, second, _ = classifier.hidden
    return perceptron([first, second, classifier], x)


def contrastive(xs: list[Tensor], labels: list[int]) -> Tensor:
    """The supervised contrastive loss, image by image; short features stay short."""
    units = [x / (x.norm() if x.norm() > 1 else 1) for x in xs]
    terms = []
    for i, label in enumerate(labels):
        odds = {j: torch.exp(units[i] @ units[j] / 0.07) for j in range(len(xs)) if j != i}
        alike = [j for j in odds if labels[j] == label]
        if alike:
            terms.append(mean(-(odds[j] / sum(odds.values())).log() for j in alike))
    return mean(terms)


def adrmx_losses(adrmx: Any, prepared: Prepared, domains: Domains, objective: str) -> Losses:
    images, n = list(chain(*domains)), len(prepared.labels)
    labels = [image.label for image in images]
    origin = [d for d, domain in enumerate(domains) for _ in domain]
    keep = prepared.draws["keep"]
    phis = [features(adrmx.network, image) for image in images]
    psis = [adrmx.domain_network.featurizer(image.pixels[None])[0] for image in images]
    psis = psis if keep is None else [psi * row for psi, row in zip(psis, keep, strict=True)]
    zs = [phi - psi for phi, psi in zip(phis, psis, strict=True)]
    judge = list(adrmx.discriminator.layers)
    if objective == "discriminator":
        return Losses(
            mean(cross_entropy(perceptron(judge, zs[i].detach()), origin[i]) for i in range(n))
        )
    remixed = []
    for c, (i, j) in enumerate(prepared.draws["remixed"].T.tolist()):
        homes = {origin[k] for k in range(n) if labels[k] == c}
        if len(homes) > 1:
            assert labels[i] == labels[j] == c
            assert origin[i] != origin[j]
            remixed.append(cross_entropy(classify(adrmx.network.classifier, zs[i] + psis[j]), c))
    assert len(remixed) < N_CLASSES

    def over(classifier: nn.Module, xs: list[Tensor], answers: list[int]) -> Tensor:
        pairs = zip(xs, answers, strict=True)
        return mean(cross_entropy(classify(classifier, x), answer) for x, answer in pairs)

    parts = {
        "risk": over(adrmx.network.classifier, phis, labels),
        "difference": over(adrmx.difference_classifier, zs, labels),
        "domain": over(adrmx.domain_network.classifier, psis, origin),
        "contrast": contrastive(phis, labels) + contrastive(zs, labels),
        "remix": sum(remixed) / N_CLASSES,
        "adversary": mean(cross_entropy(perceptron(judge, zs[i]), origin[i]) for i in range(n)),
    }
    total = parts["risk"] + parts["difference"] + adrmx.domain_weight * parts["domain"]
    total = total + adrmx.contrast * parts["contrast"] + adrmx.remix * parts["remix"]
    return Losses(total - adrmx.penalty * parts["adversary"], parts)


def test_short_features_and_images_that_are_alone_in_their_class():
    """Neither enlarges rounding errors, nor counts what has no pair."""
    torch.manual_seed(0)
    lengths = torch.tensor([1.0, 0.5, 0.9, 1e-3, 2.0, 1.1, 0.0])
    xs = torch.randn(7, 3).double()
    xs = (xs / xs.norm(dim=1, keepdim=True) * lengths[:, None]).requires_grad_()
    labels = [0, 0, 0, 1, 2, 1, 1]
    found = contrastive_loss(xs, torch.tensor(labels))
    expected = contrastive([*xs], labels)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    a, b = (torch.autograd.grad(loss, xs)[0] for loss in (found, expected))
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


WEIGHTS = {"penalty": 0.3, "domain_weight": 0.6, "contrast": 1.7, "remix": 2.3}


@pytest.mark.parametrize(
    ("dropout", "options"), [(0.0, {"depth": 4}), (0.5, {"depth": 2, **WEIGHTS})]
)
def test_adrmx_is_its_losses(dropout: float, options: dict[str, Any]):
    adrmx = make_adrmx(dropout, **options)
    others = [m for m in adrmx.children() if m is not adrmx.discriminator]
    learns = {"main": others, "discriminator": [adrmx.discriminator]}
    assert len(adrmx.discriminator.layers) == options["depth"]
    for step, (prepared, domains) in enumerate(steps(adrmx, 2)):
        for objective, modules in learns.items():
            # Before anything moves, both networks give the same and differences get no gradient.
            modules = modules if step or dropout else []
            losses = adrmx(prepared, objective)
            expected = adrmx_losses(adrmx, prepared, domains, objective)
            assert_losses(adrmx, losses, expected, *modules)
            assert (losses.aux, losses.state) == ({}, {})
        move(adrmx, step)
        for objective, modules in learns.items():
            expected = adrmx_losses(adrmx, prepared, domains, objective)
            assert_losses(adrmx, adrmx(prepared, objective, {}), expected, *modules)
        adrmx.commit(prepared, {"main": losses})
        assert {name.rpartition(".")[2] for name in buffers(adrmx)} == {"mean", "std"}  # pixels'
    network = adrmx.network
    assert_predicts(adrmx, lambda x: classify(network.classifier, features(network, x)))


def test_turns_and_optimizers_of_adrmx():
    adrmx = make_adrmx(0.0, d_steps=3, beta1=0.2)
    discriminator, main = adrmx.objectives()
    assert [o.name for o in (discriminator, main)] == ["discriminator", "main"]
    turns = [(count % 4) < 3 for count in range(1, 13)]  # update_count, from 1
    assert [discriminator.active(step) for step in range(12)] == turns
    assert [main.active(step) for step in range(12)] == [not turn for turn in turns]
    assert {*discriminator.parameters} == {*adrmx.discriminator.parameters()}
    assert {*main.parameters} == {*adrmx.parameters()} - {*discriminator.parameters}
    for objective in (discriminator, main):
        assert objective.options == {"betas": (0.2, 0.9)}


def test_adrmxs_second_network_is_a_copy_of_the_first():
    adrmx = make_adrmx(0.0)
    pairs = zip(
        adrmx.network.featurizer.parameters(),
        adrmx.domain_network.featurizer.parameters(),
        strict=True,
    )
    for a, b in pairs:
        assert a is not b
        assert torch.equal(a, b)


def test_adrmx_remixes_any_pair_of_a_class():
    adrmx = make_adrmx(0.0)
    batches = without_classes(0)
    labels = [int(y) for batch in batches for y in batch.labels]
    origin = [d for d, batch in enumerate(batches) for _ in batch.labels]
    images = range(len(labels))
    torch.manual_seed(0)
    seen = {
        (c, i, j)
        for _ in range(2000)
        for c, (i, j) in enumerate(adrmx.prepare(batches).draws["remixed"].T.tolist())
        if labels[i] == labels[j] == c and origin[i] != origin[j]
    }
    assert seen == {
        (labels[i], i, j)
        for i in images
        for j in images
        if labels[i] == labels[j] and origin[i] != origin[j]
    }
