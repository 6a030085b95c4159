"""MASF, MetaReg and ER against their formulas, image by image."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steppe.algorithms import Losses, Prepared, build_algorithm
from steppe.algorithms.triplets import semihard
from tests.algorithms.oracles import (
    N_CLASSES,
    Image,
    assert_equal_losses,
    buffers,
    cross_entropy,
    images_of,
    logits,
    make_batches,
    make_network,
    mean,
    move,
    risk,
)

SIZES = (11, 7, 4)
Domains = list[list[Image]]


def make(name: str, dropout: float = 0.0, /, **options: Any) -> Any:
    algorithm: Any = build_algorithm(name, make_network(dropout), len(SIZES), **options).double()
    move(algorithm, 1)  # no two parameters alike
    return algorithm


def make_prepared(algorithm: Any, seed: int = 0) -> tuple[Prepared, Domains]:
    """A step's: class 4 is in no domain, class 3 only in the first, class 2 not in the last."""
    batches = []
    torch.manual_seed(seed)
    for d, batch in enumerate(make_batches(SIZES, seed)):
        labels = torch.arange(len(batch.labels)) % (4 - d)
        batches.append(batch._replace(labels=labels[torch.randperm(len(labels))]))
    prepared = algorithm.prepare(batches)
    return prepared, images_of(batches, prepared.keep)


def assert_objective(learns: nn.Module, found: Losses, expected: Losses) -> None:
    assert_equal_losses(learns, found, expected)  # type: ignore[arg-type]


def assert_leaves_alone(loss: Tensor, *modules: nn.Module) -> None:
    parameters = [p for module in modules for p in module.parameters()]
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    assert found == (None,) * len(parameters)


def own_parameters(algorithm: Any) -> dict[str, set[nn.Parameter]]:
    return {objective.name: {*objective.parameters} for objective in algorithm.objectives()}


def raw_features(weights: Sequence[Tensor], image: Image) -> Tensor:
    """Without dropout, with weights in the order of the network's parameters."""
    return torch.tanh(weights[0] @ image.pixels.flatten() + weights[1])


def logits_at(weights: Sequence[Tensor], image: Image) -> Tensor:
    return weights[2] @ (raw_features(weights, image) * image.keep) + weights[3]


# MASF


def inner_step(weights: Sequence[Tensor], task: Tensor, inner_lr: float) -> list[Tensor]:
    moved = []
    for w, g in zip(weights, torch.autograd.grad(task, weights, retain_graph=True), strict=True):
        norm = (g**2).sum() ** 0.5
        moved.append(w - inner_lr * (g if norm <= 2 else 2 * g / norm))
    return moved


def class_divergence(moved: Sequence[Tensor], one: list[Image], other: list[Image]) -> Tensor:
    def relations(domain: list[Image]) -> dict[int, Tensor]:
        by_class: dict[int, list[Tensor]] = {}
        for image in domain:
            by_class.setdefault(image.label, []).append(logits_at(moved, image))
        return {c: (mean(zs) / 2).exp() / (mean(zs) / 2).exp().sum() for c, zs in by_class.items()}

    def kl(s: Tensor, t: Tensor) -> Tensor:
        return (s * (s / t).log()).sum()

    here, there = relations(one), relations(other)
    assert here.keys() != there.keys()
    common = [(here[c], there[c]) for c in here.keys() & there.keys()]
    return sum((kl(s, t) + kl(t, s)) / 2 for s, t in common) / N_CLASSES


def triplet_terms(
    masf: Any, moved: Sequence[Tensor], domains: Domains, chosen: dict[tuple[int, int], int]
) -> list[Tensor]:
    """One per anchor and positive; `chosen` has their negatives, or is empty and gets them."""
    images = [image for domain in domains for image in domain[: (len(domain) + 2) // 3]]
    assert len(images) == 4 + 3 + 2
    outputs = []
    for image in images:
        z = raw_features(moved, image)
        for layer in masf.metric[::2]:
            z = layer.weight @ z + layer.bias
            z = torch.where(z > 0, z, 0.2 * z)
        outputs.append(z)

    def distance(i: int, j: int) -> Tensor:
        return ((outputs[i] - outputs[j]) ** 2).sum()

    terms, choose = [], not chosen
    for i, anchor in enumerate(images):
        for j, other in enumerate(images):
            if i == j or anchor.label != other.label:
                continue
            if choose:
                negatives = [k for k, x in enumerate(images) if x.label != anchor.label]
                distances = {distance(i, k).item(): k for k in negatives}
                far = [value for value in distances if value > distance(i, j)]
                chosen[i, j] = distances[min(far) if far else max(distances)]
            gap = masf.margin + distance(i, j) - distance(i, chosen[i, j])
            terms.append(torch.where(gap > 0, gap, 0))
    return terms


def masf_losses(masf: Any, domains: Domains, j: int, chosen: dict[tuple[int, int], int]) -> Losses:
    weights = list(masf.network.parameters())
    others = [domain for d, domain in enumerate(domains) if d != j]
    task = mean(mean(cross_entropy(logits_at(weights, x), x.label) for x in d) for d in others)
    moved = inner_step(weights, task, masf.inner_lr)
    relations = mean(class_divergence(moved, domain, domains[j]) for domain in others)
    local = mean(triplet_terms(masf, moved, domains, chosen))
    total = task + masf.beta_global * relations + masf.beta_local * local
    return Losses(total, {"risk": task, "global": relations, "local": local})


def make_masf(dropout: float = 0.0) -> Any:
    options = {"beta_global": 3.0, "beta_local": 0.02, "margin": 4.0, "inner_lr": 0.7}
    masf = make("MASF", dropout, **options)
    with torch.no_grad():
        masf.network.classifier.weight *= 15  # so that some gradients are clipped
        for p in masf.metric.parameters():
            p *= 0.6  # so that some triplets have no loss
    return masf


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_masf(dropout, seed):
    masf = make_masf(dropout)
    prepared, domains = make_prepared(masf, seed)
    ((_, j), *_) = prepared.draws["pairs"]
    chosen: dict[tuple[int, int], int] = {}
    first, expected = masf(prepared), masf_losses(masf, domains, j, chosen)
    assert_objective(masf, first, expected)

    move(masf, 2)
    again: dict[tuple[int, int], int] = {}
    aux = {name: value.detach() for name, value in first.aux.items()}
    fresh = masf_losses(masf, domains, j, again)
    assert again != chosen
    assert_objective(masf, masf(prepared), fresh)
    assert_objective(masf, masf(prepared, first=aux), masf_losses(masf, domains, j, chosen))
    masf.commit(prepared, {"main": first})
    assert not buffers(masf)


def test_masfs_cases_all_occur():
    """Clipped gradients and others, triplets without a loss, negatives that are not far."""
    masf = make_masf()
    _, domains = make_prepared(masf)
    weights = list(masf.network.parameters())
    task = mean(mean(cross_entropy(logits_at(weights, x), x.label) for x in d) for d in domains)
    norms = [float(g.norm()) for g in torch.autograd.grad(task, weights)]
    assert min(norms) < 2 < max(norms)
    terms = triplet_terms(masf, weights, domains, {})
    assert min(terms) == 0
    assert masf.margin < max(terms)  # a negative closer than the positive


def test_masfs_negatives_are_farther_than_the_positive():
    """Or the farthest of all; one that is as far as the positive is not farther."""
    distances = torch.tensor([[0.0, 3.0, 3.0, 5.0, 7.0, 4.0]]).repeat(6, 1)
    assert semihard(distances, torch.tensor([0, 0, 1, 2, 0, 1]))[0].tolist()[1::3] == [5, 3]


def test_masfs_domain_for_testing_is_any_of_them():
    masf = make("MASF")
    found = [masf.prepare(make_batches(SIZES)).draws["pairs"] for _ in range(300)]
    for j in range(3):
        pairs = tuple((i, j) for i in range(3) if i != j)
        assert found.count(pairs) == pytest.approx(100, abs=41)  # five deviations


# MetaReg


def head(metareg: Any, d: int) -> tuple[Tensor, Tensor]:
    """The classifier of a domain."""
    rows = slice(d * N_CLASSES, (d + 1) * N_CLASSES)
    return metareg.copy.classifier.weight[rows], metareg.copy.classifier.bias[rows]


def copy_features(metareg: Any, domains: Domains) -> list[list[Tensor]]:
    weights = list(metareg.copy.featurizer.parameters())
    return [[raw_features(weights, x) * x.keep for x in domain] for domain in domains]


def head_risk(weight: Tensor, bias: Tensor, phis: list[Tensor], domain: list[Image]) -> Tensor:
    pairs = zip(phis, domain, strict=True)
    return mean(cross_entropy(weight @ phi + bias, image.label) for phi, image in pairs)


def after_inner_steps(
    metareg: Any, phis: list[list[Tensor]], domains: Domains, pair: Any
) -> Tensor:
    a, b = map(int, pair)
    phis = [[phi.detach() for phi in of_domain] for of_domain in phis]
    weight, bias = (x.detach().requires_grad_() for x in head(metareg, a))
    for _ in range(metareg.inner_steps):
        inner = head_risk(weight, bias, phis[a], domains[a]) + (metareg.phi * weight.abs()).sum()
        by_weight, by_bias = torch.autograd.grad(inner, (weight, bias), create_graph=True)
        weight, bias = weight - metareg.inner_lr * by_weight, bias - metareg.inner_lr * by_bias
    return head_risk(weight, bias, phis[b], domains[b])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_metareg(dropout, seed):
    metareg = make("MetaReg", dropout, inner_steps=3, inner_lr=0.4)
    prepared, domains = make_prepared(metareg, seed)
    network, copied, phi = metareg.network, metareg.copy, nn.ParameterList([metareg.phi])
    pair = prepared.draws["pair"]

    def heads_risk() -> Losses:
        phis = copy_features(metareg, domains)
        return Losses(mean(head_risk(*head(metareg, d), phis[d], domains[d]) for d in range(3)))

    def main() -> Losses:
        plain = risk(network, chain(*domains))
        rows = zip(metareg.phi, network.classifier.weight, strict=True)
        penalty = sum(f * w.abs() for fs, ws in rows for f, w in zip(fs, ws, strict=True))
        return Losses(plain + penalty, {"risk": plain, "penalty": penalty})

    kept = copy_features(metareg, domains)
    first = metareg(prepared, "regularizer")
    for _ in range(2):  # at these weights, and at others
        found = {o: metareg(prepared, o) for o in ("heads", "main")}
        assert_objective(copied, found["heads"], heads_risk())
        assert_leaves_alone(found["heads"].total, network, phi)
        assert_objective(nn.ModuleList([network, phi]), found["main"], main())
        assert_leaves_alone(found["main"].total, copied)

        fresh = Losses(after_inner_steps(metareg, copy_features(metareg, domains), domains, pair))
        assert_objective(phi, metareg(prepared, "regularizer"), fresh)
        frozen = Losses(after_inner_steps(metareg, kept, domains, pair))
        later = metareg(prepared, "regularizer", first.aux)
        assert_objective(phi, later, frozen)
        assert_leaves_alone(later.total, network, copied)
        move(metareg, 2)
    metareg.commit(prepared, found)
    assert not any("phi" in name for name in buffers(metareg))


def test_metaregs_phases_and_start():
    metareg: Any = build_algorithm("MetaReg", make_network(), 3, share=0.3, steps=10)
    active = {o.name: [o.active(step) for step in range(10)] for o in metareg.objectives()}
    early = [True] * 3 + [False] * 7
    assert active == {"heads": early, "regularizer": early, "main": [not x for x in early]}
    network, copied = metareg.network, metareg.copy
    assert own_parameters(metareg) == {
        "heads": {*copied.parameters()},
        "regularizer": {metareg.phi},
        "main": {*network.parameters()},
    }
    assert [o.options for o in metareg.objectives()] == [{}, {"weight_decay": 0.0}, {}]
    assert metareg.phi.shape == network.classifier.weight.shape
    assert not metareg.phi.any()
    for a, b in zip(network.featurizer.parameters(), copied.featurizer.parameters(), strict=True):
        assert torch.equal(a, b)


def test_metaregs_pairs_are_any_two_domains():
    steps = map(make("MetaReg").prepare, [make_batches(SIZES)] * 300)
    found = [tuple(step.draws["pair"].tolist()) for step in steps]
    assert {*found} == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert found.count((2, 0)) == pytest.approx(50, abs=33)  # five deviations


# ER


def perceptron(module: Any, phi: Tensor, mask: Tensor) -> Tensor:
    first, second = module.hidden[0], module.hidden[2]
    x = first.weight @ phi + first.bias
    x = second.weight @ torch.where(x > 0, x, 0) + second.bias
    return module.output.weight @ (torch.where(x > 0, x, 0) * mask) + module.output.bias


def balanced(losses: list[tuple[int, Tensor]]) -> Tensor:
    """The mean over classes of each one's mean."""
    classes = {label for label, _ in losses}
    return mean(mean(loss for label, loss in losses if label == c) for c in classes)


def masks_of(prepared: Prepared) -> tuple[Any, Any, Tensor]:
    """Those of the T_i, of the T_i', and of D."""
    draws = prepared.draws
    return draws["own"], draws["adversaries"], draws["discriminator"]


def er_risks(er: Any, prepared: Prepared, domains: Domains, phis: Any) -> dict[str, Tensor]:
    """The mean risks: T_i at home and elsewhere, D, and T_i'."""
    masks, class_masks, domain_mask = masks_of(prepared)
    found: dict[str, list[Tensor]] = {"own": [], "others": [], "domains": [], "classes": []}
    images = [(d, x) for d, domain in enumerate(domains) for x in domain]
    for i in range(3):
        home, away, adversary, domain = [], [], [], []
        for row, ((d, image), phi) in enumerate(zip(images, chain(*phis), strict=True)):
            own = perceptron(er.classifiers[i], phi, masks[i][row])
            loss = image.label, cross_entropy(own, image.label)
            (home if d == i else away).append(loss)
            if d == i:
                out = perceptron(er.adversaries[i], phi, class_masks[i][row])
                adversary.append((image.label, cross_entropy(out, image.label)))
                out = perceptron(er.discriminator, phi, domain_mask[row])
                domain.append(cross_entropy(out, i))
        values = balanced(home), balanced(away), mean(domain), balanced(adversary)
        for name, value in zip(found, values, strict=True):
            found[name].append(value)
    return {name: mean(values) for name, values in found.items()}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("training", [True, False])
def test_er(dropout, training):
    options = {"lambda_c": 0.7, "lambda_d": 0.3, "lambda_e": 0.9, "width": 24}
    er = make("ER", dropout, **options).train(training)
    prepared, domains = make_prepared(er)
    own, others, shared = masks_of(prepared)
    masks = torch.cat([*own, *others, shared])
    assert masks.unique().tolist() == ([0, 2] if training else [1])  # a half is dropped
    opponents = nn.ModuleList([er.discriminator, er.adversaries])

    def phis() -> list[list[Tensor]]:
        weights = list(er.network.parameters())
        return [[raw_features(weights, x) * x.keep for x in domain] for domain in domains]

    kept = [[phi.detach() for phi in domain] for domain in phis()]
    for _ in range(2):  # at these weights, and at others: opponents see the features as they were
        then = er_risks(er, prepared, domains, kept)
        losses = er(prepared, "own")
        assert_objective(er.classifiers, losses, Losses(then["own"]))
        assert_leaves_alone(losses.total, er.network, opponents)
        losses = er(prepared, "adversaries")
        parts = {name: then[name] for name in ("domains", "classes")}
        assert_objective(opponents, losses, Losses(then["domains"] + then["classes"], parts))
        assert_leaves_alone(losses.total, er.network, er.classifiers)

        now = er_risks(er, prepared, domains, phis())
        plain = risk(er.network, chain(*domains))
        total = plain + 0.7 * now["others"] - 0.3 * now["domains"] - 0.9 * now["classes"]
        losses = er(prepared)
        parts = {"risk": plain, "other domains": now["others"]}
        assert_objective(er, losses, Losses(total, parts))
        move(er, 2)
    er.commit(prepared, {"main": losses})
    assert not buffers(er)


def test_ers_masks_and_learning_rates():
    er = make("ER", lr_factor=0.3, width=400)
    prepared, _ = make_prepared(er)
    own_masks, other_masks, shared = masks_of(prepared)
    masks = [*own_masks, *other_masks, shared]
    assert [mask.shape for mask in masks] == [(sum(SIZES), 100)] * 7
    assert torch.cat(masks).mean() == pytest.approx(1, abs=0.05)  # of 11,000: five deviations
    assert all(not torch.equal(a, b) for a, b in pairwise(masks))
    own, adversaries, main = er.objectives()
    slow = {*er.classifiers.parameters(), *er.adversaries.parameters()}
    for objective in (own, adversaries):
        factors = {objective.lr_factors.get(p, 1) for p in slow & {*objective.parameters}}
        assert factors == {0.3}
    assert slow.isdisjoint(er.discriminator.parameters())
    assert not {*er.discriminator.parameters()} & {*adversaries.lr_factors}
    assert not main.lr_factors
    assert own_parameters(er) == {
        "own": {*er.classifiers.parameters()},
        "adversaries": {*er.discriminator.parameters(), *er.adversaries.parameters()},
        "main": {*er.network.parameters()},
    }
    assert all(o.active(step) for o in er.objectives() for step in range(3))


@pytest.mark.parametrize("name", ["MASF", "MetaReg", "ER", "EISNet"])
def test_predictions_are_the_networks(name):
    algorithm = make(name, 0.5).eval()
    (batch,) = make_batches((4,))
    expected = torch.stack([logits(algorithm.network, x) for x in images_of([batch], None)[0]])
    for found in (algorithm.predict(batch.images), algorithm.predict_source(batch.images, 1)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
