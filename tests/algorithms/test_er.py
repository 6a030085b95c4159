"""ER: its losses, and whom they teach."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.algorithms import build_algorithm
from steppe.algorithms.er import ER, class_balanced
from tests.algorithms.oracles import gradients, make_batches, make_network

WEIGHTS = {"lambda_c": 0.3, "lambda_d": 0.7, "lambda_e": 0.2}


def build(**options: float) -> ER:
    found = build_algorithm("ER", make_network(dropout=0.5), 3, **{"width": 16, **options})
    assert isinstance(found, ER)
    return found.double()


class Scaled(torch.autograd.Function):
    """The identity, with a gradient of another size or sign."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.factor * gradient, None


def test_without_weights_it_is_erm() -> None:
    er = build(lambda_c=0.0, lambda_d=0.0, lambda_e=0.0)
    prepared = er.prepare(make_batches())
    erm = build_algorithm("ERM", er.network, 3)
    assert torch.equal(er(prepared).total, erm(prepared).total)
    ours, theirs = (gradients(a(prepared).total, er.network) for a in (er, erm))
    assert all(map(torch.equal, ours, theirs))


def test_its_updates_are_those_of_a_gradient_reversal_layer() -> None:
    """One loss with reversed and scaled gradients, as the authors write it."""
    er = build(**WEIGHTS)
    prepared = er.prepare(make_batches())
    draws, sizes = prepared.draws, prepared.sizes
    features = er.network.features(prepared.images, prepared.keep)
    at = [
        [i for i in range(sum(sizes)) if sum(sizes[:d]) <= i < sum(sizes[: d + 1])]
        for d in (0, 1, 2)
    ]
    domains = torch.tensor([d for d in (0, 1, 2) for _ in at[d]])

    def reweighted(net: nn.Module, rows: list[int], mask: Tensor, factor: float) -> Tensor:
        labels = prepared.labels[rows]
        weight = torch.tensor([1.0 / max(int((labels == c).sum()), 1) for c in range(5)]).double()
        outputs = net(Scaled.apply(features[rows], factor), mask[rows])
        return F.cross_entropy(outputs, labels, weight=weight)

    reversed_ = Scaled.apply(features, -WEIGHTS["lambda_d"])
    per_domain = torch.tensor([1.0 / n for n in sizes]).double()
    outputs = er.discriminator(reversed_, draws["discriminator"])
    total = F.cross_entropy(er.network.classifier(features), prepared.labels)
    total = total + F.cross_entropy(outputs, domains, weight=per_domain)
    for i in range(3):
        others = [row for d in (0, 1, 2) if d != i for row in at[d]]
        t, adversary = er.classifiers[i], er.adversaries[i]
        total = total + reweighted(t, others, draws["own"][i], WEIGHTS["lambda_c"]) / 3
        mask = draws["adversaries"][i]
        total = total + reweighted(adversary, at[i], mask, -WEIGHTS["lambda_e"]) / 3
    for objective, modules in {
        "main": [er.network],
        "adversaries": [er.discriminator, er.adversaries],
    }.items():
        found = er(prepared, objective).total
        for module in modules:
            torch.testing.assert_close(gradients(found, module), gradients(total, module))
    # The classifiers learn from their own domains alone.
    own = [er.classifiers[i] for i in range(3)]
    expected = sum(reweighted(own[i], at[i], draws["own"][i], 1.0) / 3 for i in range(3))
    found = er(prepared, "own").total
    torch.testing.assert_close(found, expected)
    assert not found.isnan()
    assert all(not g.any() for g in gradients(found, er.network))


@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 4], [3, 3, 3, 0, 0], [2, 2, 2, 2, 2]])
def test_classes_count_equally_and_absent_ones_not(labels: list[int]) -> None:
    torch.manual_seed(0)
    logits, y = torch.randn(5, 5).double(), torch.tensor(labels)
    means = [F.cross_entropy(logits[y == c], y[y == c]) for c in set(labels)]
    torch.testing.assert_close(class_balanced(logits, y), torch.stack(means).mean())


def test_the_opponents_see_the_features_before_the_step() -> None:
    er = build(**WEIGHTS)
    prepared = er.prepare(make_batches())
    before = {name: er(prepared, name).total for name in ("own", "adversaries", "main")}
    with torch.no_grad():
        for p in er.network.parameters():
            p.add_(0.1)
    for name, value in before.items():
        assert torch.equal(er(prepared, name).total, value) == (name != "main")


def test_the_domains_perceptrons_learn_at_their_own_rate() -> None:
    er = build(lr_factor=0.25)
    factors = {p: f for o in er.objectives() for p, f in o.lr_factors.items()}
    slow = {*er.classifiers.parameters(), *er.adversaries.parameters()}
    assert factors == dict.fromkeys(slow, 0.25)
