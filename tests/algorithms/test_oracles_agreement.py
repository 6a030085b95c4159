"""Fish, ANDMask and SANDMask against their equations, domain by domain and entry by entry."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations, permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from steppe.algorithms import Losses, Network, build_algorithm
from tests.algorithms.oracles import (
    assert_equal_losses,
    buffers,
    gradients,
    images_of,
    logits,
    make_batches,
    make_network,
    mean,
    move,
    risk,
)
from tests.algorithms.stepping import Domains, assert_predicts, without_classes

THREE, FOUR = (5, 7, 4), (3, 5, 2, 4)
ByHand = tuple[Losses, list[Tensor]]
"""Losses, and the gradient that they should have."""


def of_each(network: Network, domains: Domains) -> list[list[Tensor]]:
    """For each parameter, the gradient of each domain."""
    by_domain = [gradients(risk(network, domain), network) for domain in domains]
    return [list(own) for own in zip(*by_domain, strict=True)]


def fish(network: Network, domains: Domains, order: tuple[int, ...], inner_lr: float) -> ByHand:
    """Walks as in the paper's Algorithm 2, and looks where that ends."""
    walker, risks = copy.deepcopy(network), []
    for d in order:
        risks.append(risk(walker, domains[d]))
        steps = gradients(risks[-1], walker)
        with torch.no_grad():
            for p, step in zip(walker.parameters(), steps, strict=True):
                p -= inner_lr * step
    ends = zip(network.parameters(), walker.parameters(), strict=True)
    ways = [(start - end).detach() / (len(order) * inner_lr) for start, end in ends]
    return Losses(mean(risks)), ways


def hard(signs: float, variance: float, tau: float) -> float:
    return float(signs >= tau)


def smooth(k: float) -> Callable[[float, float, float], float]:
    def mask(signs: float, variance: float, tau: float) -> float:
        """A mask of entries on which all domains have one gradient is the limit."""
        if variance == 0:
            return float(signs > tau)
        return max(0.0, math.tanh(k / variance * (signs - tau)))

    return mask


def sign(x: float) -> int:
    return (x > 0) - (x < 0)


def factor(own: list[Tensor], tau: float, mask: Callable[..., float]) -> Tensor:
    """What the mean gradient of a parameter is multiplied by."""
    masks = []
    for entry in zip(*(g.flatten().tolist() for g in own), strict=True):
        center = math.fsum(entry) / len(entry)
        variance = math.fsum((g - center) ** 2 for g in entry) / (len(entry) - 1)
        signs = abs(sum(map(sign, entry))) / len(entry)
        masks.append(mask(signs, variance, tau))
    kept = sum(masks) / len(masks)
    values = [m / kept if kept > 0 else 0.0 for m in masks]
    return torch.tensor(values, dtype=torch.float64).view(own[0].shape)


def masked(network: Network, domains: Domains, factors: list[Tensor]) -> ByHand:
    by_hand = [f * mean(own) for f, own in zip(factors, of_each(network, domains), strict=True)]
    entries = torch.cat([f.flatten() for f in factors])
    updated = (entries != 0).double().mean()
    return Losses(mean(risk(network, d) for d in domains), {"updated": updated.float()}), by_hand


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("sizes", [THREE, FOUR])
def test_fish_walks_from_domain_to_domain(sizes: tuple[int, ...], dropout: float):
    network = make_network(dropout)
    algorithm = build_algorithm("Fish", network, len(sizes), inner_lr=0.3).double()
    for step in range(3):
        batches = without_classes(step, sizes)
        prepared = algorithm.prepare(batches)
        domains, order = images_of(batches, prepared.keep), prepared.draws["order"]
        losses = algorithm(prepared)
        assert_equal_losses(algorithm, losses, *fish(network, domains, order, 0.3))
        assert (losses.aux, losses.state, losses.parts) == ({}, {}, {})
        move(network, step)
        again = algorithm(prepared, "main", losses.aux)
        assert_equal_losses(algorithm, again, *fish(network, domains, order, 0.3))
        algorithm.commit(prepared, {"main": losses})
        assert not buffers(algorithm)
    assert_predicts(algorithm, lambda image: logits(network, image))


def test_walking_rewards_inner_products_of_gradients():
    """To first order and over all orders, with the weight that the docstring says."""
    network, alpha = make_network(), 1e-4
    algorithm: Any = build_algorithm("Fish", network, 3).double()
    batches = make_batches()
    prepared = algorithm.prepare(batches)
    orders = [replace(prepared, draws={"order": o}) for o in permutations(range(3))]

    def average(inner_lr: float) -> list[Tensor]:
        algorithm.inner_lr = inner_lr
        found = [gradients(algorithm(p).total, network) for p in orders]
        return [mean(own) for own in zip(*found, strict=True)]

    slopes = [(a - b) / (2 * alpha) for a, b in zip(average(alpha), average(-alpha), strict=True)]
    parameters = list(network.parameters())
    flat = []
    for domain in images_of(batches, None):
        found = torch.autograd.grad(risk(network, domain), parameters, create_graph=True)
        flat.append(torch.cat([g.flatten() for g in found]))
    products = sum(a @ b for a, b in combinations(flat, 2))
    for found, expected in zip(slopes, gradients(-products / (2 * 3), network), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_every_order_of_domains_is_as_likely():
    algorithm = build_algorithm("Fish", make_network(), 3).double()
    torch.manual_seed(0)
    orders = Counter(algorithm.prepare(make_batches()).draws["order"] for _ in range(600))
    assert orders.keys() == {*permutations(range(3))}
    assert all(55 < count < 145 for count in orders.values())  # five deviations


MASKS: list[tuple[str, dict[str, float], tuple[int, ...]]] = [
    ("ANDMask", {}, THREE),
    ("ANDMask", {"tau": 0.5}, THREE),
    ("ANDMask", {"tau": 0.5}, FOUR),  # which half of them reaches, and no more
    ("ANDMask", {"tau": 0.6}, FOUR),
    ("SANDMask", {}, THREE),
    ("SANDMask", {"tau": 0.2, "k": 1e-4}, THREE),
    ("SANDMask", {"tau": 0.5, "k": 1e-3}, FOUR),
    ("SANDMask", {"tau": 0.0, "k": 1e-5}, FOUR),
]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("name", "options", "sizes"), MASKS)
def test_masks_are_the_formulas(
    name: str, options: dict[str, float], sizes: tuple[int, ...], dropout: float
):
    network = make_network(dropout)
    algorithm = build_algorithm(name, network, len(sizes), **options).double()
    mask = hard if name == "ANDMask" else smooth(options.get("k", 10.0))
    tau = options.get("tau", 1.0 if name == "ANDMask" else 0.5)
    for step in range(3):
        batches = without_classes(step, sizes)
        prepared = algorithm.prepare(batches)
        domains = images_of(batches, prepared.keep)
        factors = [factor(own, tau, mask) for own in of_each(network, domains)]
        losses = algorithm(prepared)
        assert_equal_losses(algorithm, losses, *masked(network, domains, factors))
        assert_factors(losses, network, factors)
        logs = [logits(network, image) for image in chain(*domains)]
        torch.testing.assert_close(losses.logits, torch.stack(logs), rtol=1e-9, atol=1e-12)

        move(network, step)  # the mask stays, gradients are new
        others = [factor(own, tau, mask) for own in of_each(network, domains)]
        assert not all(torch.allclose(a, b) for a, b in zip(factors, others, strict=True))
        again = algorithm(prepared, "main", {key: v.detach() for key, v in losses.aux.items()})
        assert_equal_losses(algorithm, again, *masked(network, domains, factors))
        assert_factors(again, network, factors)
        algorithm.commit(prepared, {"main": losses})
        assert (losses.state, buffers(algorithm)) == ({}, {})
    assert_predicts(algorithm, lambda image: logits(network, image))


def assert_factors(losses: Losses, network: Network, factors: list[Tensor]) -> None:
    names = [name for name, _ in network.named_parameters()]
    assert losses.aux.keys() == {f"factor.{name}" for name in names}
    for name, expected in zip(names, factors, strict=True):
        found = losses.aux[f"factor.{name}"]
        assert not found.requires_grad
        assert torch.equal(found == 0, expected == 0)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["ANDMask", "SANDMask"])
def test_nothing_moves_where_nothing_agrees(name: str):
    """Two domains with the same images and other labels: the biases' gradients are opposite."""
    algorithm = build_algorithm(name, make_network(), 2).double()
    with torch.no_grad():
        algorithm.network.classifier.weight.zero_()
        algorithm.network.classifier.bias.copy_(torch.tensor([0.0, 0.0, -99.0, -99.0, -99.0]))
    (batch,) = make_batches((3,))
    pair = [batch._replace(labels=torch.full((3,), y)) for y in (0, 1)]
    losses = algorithm(algorithm.prepare(pair))
    bias = gradients(losses.total, algorithm)[-1]
    assert losses.aux["factor.classifier.bias"][:2].tolist() == [0, 0]
    assert bias[:2].tolist() == [0, 0]
