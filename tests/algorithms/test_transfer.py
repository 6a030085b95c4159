"""Transfer: the adversary's ascent, and that every search trains the network."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.algorithms import Prepared, build_algorithm
from tests.algorithms.oracles import make_batches, make_network, move

SIZES = (5, 7, 4)


def make(**options: Any) -> tuple[Any, Prepared]:
    built = build_algorithm("Transfer", make_network(), 3, **options).double()
    return built, built.prepare(make_batches(SIZES))


def gap_of(head: nn.Linear, features: Tensor, prepared: Prepared) -> Tensor:
    parts = zip(prepared.split(head(features)), prepared.split(prepared.labels), strict=True)
    risks = torch.stack([F.cross_entropy(*part) for part in parts])
    return risks.max() - risks.min()


@pytest.mark.parametrize(("delta", "inner_lr"), [(9.0, 0.5), (0.1, 0.5), (0.0, 0.5), (9.0, 0.0)])
def test_the_gap_is_that_of_a_projected_ascent(delta: float, inner_lr: float) -> None:
    algorithm, prepared = make(delta=delta, inner_lr=inner_lr, d_steps=4, penalty=3.0)
    features = algorithm.network.features(prepared.images)
    classifier = algorithm.network.classifier
    adversary = nn.Linear(classifier.in_features, classifier.out_features).double()
    adversary.load_state_dict(classifier.state_dict())
    params = list(adversary.parameters())
    lengths = []
    for _ in range(4):
        gradients = torch.autograd.grad(
            3.0 * gap_of(adversary, features.detach(), prepared), params
        )
        with torch.no_grad():
            moves = [
                p + inner_lr * g - q
                for p, g, q in zip(params, gradients, classifier.parameters(), strict=True)
            ]
            length = sum(m.square().sum() for m in moves).sqrt()
            lengths.append(float(length))
            for p, m, q in zip(params, moves, classifier.parameters(), strict=True):
                p.copy_(q + m * min(1.0, delta / float(length) if length else 1.0))
    assert (max(lengths) > delta) == (delta < 1 and inner_lr > 0)
    expected = gap_of(adversary, features, prepared)
    losses = algorithm(prepared, "gap")
    torch.testing.assert_close(losses.parts["gap"], expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(losses.total, 3 * expected, rtol=1e-10, atol=0)
    featurizer = list(algorithm.network.featurizer.parameters())
    for a, b in zip(
        torch.autograd.grad(losses.total, featurizer),
        torch.autograd.grad(3 * expected, featurizer),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    if delta and inner_lr:
        assert expected > gap_of(classifier, features, prepared)


def test_every_pass_compares_the_domains_of_the_first() -> None:
    algorithm, prepared = make(d_steps=2)
    first = algorithm(prepared, "gap")
    assert [sorted(signs) for signs in first.aux["signs"].tolist()] == [[-1, 0, 1]] * 3
    swapped = algorithm(prepared, "gap", first={"signs": -first.aux["signs"]})
    assert swapped.total < 0 < first.total
    move(algorithm.network, 3)
    again = algorithm(prepared, "gap", first=first.aux)
    assert torch.equal(again.aux["signs"], first.aux["signs"])


def moved(network: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {n for n, p in network.named_parameters() if not torch.equal(p, before[n])}


def descend(loss: Tensor, held: Iterable[nn.Parameter]) -> None:
    """Takes a gradient step of an optimizer that holds these parameters."""
    held = list(held)
    gradients = torch.autograd.grad(loss, held, retain_graph=True, allow_unused=True)
    with torch.no_grad():
        for p, g in zip(held, gradients, strict=True):
            if g is not None:
                p -= 0.1 * g


def test_a_search_trains_the_network() -> None:
    """DomainBed's samples gda=True: its optimizer then holds the adversary alone."""
    algorithm, prepared = make()
    network = algorithm.network
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    adversary = nn.Linear(network.n_features, network.n_classes).double()
    features = network.features(prepared.images)
    risk = F.cross_entropy(network.classifier(features), prepared.labels)
    for loss in (risk, gap_of(adversary, features, prepared)):
        descend(loss, adversary.parameters())
    assert not moved(network, before)

    main, gap = algorithm.objectives()
    assert (main.optimizer, gap.optimizer) == (None, "main")
    for objective in (main, gap):
        assert all(objective.active(step) for step in range(20))
        before = {name: p.detach().clone() for name, p in network.named_parameters()}
        descend(algorithm(prepared, objective.name).total, main.parameters)
        kept = {"classifier.weight", "classifier.bias"} if objective is gap else set()
        assert moved(network, before) == before.keys() - kept
