"""MASF: the inner step, the two losses behind it, and what later passes keep."""

import copy
from collections import Counter
from itertools import permutations

import pytest
import torch
from torch import Tensor

from steppe.algorithms import build_algorithm
from steppe.algorithms.algorithm import domain_risks
from steppe.algorithms.masf import MASF, class_relations, divergence
from steppe.algorithms.triplets import semihard, squared_distances, triplet_loss
from tests.algorithms.oracles import SIZES, gradients, make_batches, make_network


def build(n_domains: int = 3, **options: float) -> MASF:
    found = build_algorithm("MASF", make_network(dropout=0.5), n_domains, **options)
    assert isinstance(found, MASF)
    return found.double()


def some_distances() -> tuple[Tensor, Tensor]:
    """With ties, and with an anchor whose positives are farther than all negatives."""
    torch.manual_seed(0)
    x = torch.randint(0, 4, (12, 2)).double()
    x[0] += 100
    return squared_distances(x), torch.tensor([0, 0, 1, 1, 2, 2, 0, 1, 2, 0, 1, 3])


@pytest.mark.parametrize("n_domains", [2, 3])
def test_without_weights_it_is_the_mean_risk_of_the_other_domains(n_domains: int) -> None:
    masf = build(n_domains=n_domains, beta_global=0.0, beta_local=0.0)
    prepared = masf.prepare(make_batches((4,) * n_domains))
    own = [prepared.only(i) for i, _ in prepared.draws["pairs"]]
    risks = [domain_risks(masf.network(part.images, part.keep), part).mean() for part in own]
    found = masf(prepared).total
    if n_domains == 2:  # bit for bit, where the same images share a forward pass
        assert torch.equal(found, risks[0])
    torch.testing.assert_close(found, torch.stack(risks).mean(), rtol=1e-14, atol=0)


def test_both_losses_are_taken_after_a_clipped_step() -> None:
    """Against a copy of the network that took the step."""
    for inner_lr, scale in ((0.3, 1.0), (0.3, 60.0)):  # the second has gradients to clip
        masf = build(inner_lr=inner_lr)
        with torch.no_grad():
            masf.network.classifier.weight.mul_(scale)
        prepared = masf.prepare(make_batches())
        clone = copy.deepcopy(masf)
        inner = gradients(masf(prepared).parts["risk"], masf.network)
        norms = [float(g.norm()) for g in inner]
        assert (max(norms) > 2) == (scale > 1)
        with torch.no_grad():
            for p, g, norm in zip(clone.network.parameters(), inner, norms, strict=True):
                p -= inner_lr * g * min(1.0, 2 / norm)
        clone.inner_lr = 0.0
        found, expected = masf(prepared).parts, clone(prepared).parts
        for name in ("global", "local"):
            torch.testing.assert_close(found[name], expected[name])
            ours, theirs = (gradients(x[name], m) for x, m in ((found, masf), (expected, clone)))
            torch.testing.assert_close(ours, theirs)  # first order: the step is a constant
            assert any(g.any() for g in ours)


def test_class_relations_depend_on_class_means_alone() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(8, 5).double(), torch.tensor([0, 0, 0, 1, 1, 3, 3, 3])
    order = torch.tensor([2, 0, 1, 4, 3, 7, 5, 6])
    mean = torch.stack([logits[labels == c].mean(0) for c in labels.tolist()])
    expected = class_relations(logits, labels)
    for other in (class_relations(logits[order], labels), class_relations(mean, labels)):
        torch.testing.assert_close(other, expected)
        assert divergence(*expected, *other) < 1e-30
    assert expected[1].tolist() == [True, True, False, True, False]


def test_the_divergence_is_symmetric_and_counts_common_classes() -> None:
    torch.manual_seed(0)
    one, two = torch.randn(6, 4).double(), torch.randn(5, 4).double()
    y, z = torch.tensor([0, 0, 1, 1, 3, 3]), torch.tensor([1, 1, 2, 3, 3])
    total = 0.0
    for c in (1, 3):
        s, t = ((x[own == c].mean(0) / 2).softmax(0) for x, own in ((one, y), (two, z)))
        total += float(((s * (s / t).log()).sum() + (t * (t / s).log()).sum()) / 2)
    found = divergence(*class_relations(one, y), *class_relations(two, z))
    torch.testing.assert_close(float(found), total / 4)
    back = divergence(*class_relations(two, z), *class_relations(one, y))
    torch.testing.assert_close(back, found)


def test_triplets_are_those_of_a_loop() -> None:
    distances, labels = some_distances()
    chosen = semihard(distances, labels)
    losses, outside = [], 0
    n = len(labels)
    for a, p in permutations(range(n), 2):
        if labels[a] != labels[p]:
            continue
        negatives = {float(distances[a, k]) for k in range(n) if labels[k] != labels[a]}
        farther = {d for d in negatives if d > distances[a, p]}
        outside += not farther
        negative = min(farther) if farther else max(negatives)
        assert float(distances[a, chosen[a, p]]) == negative
        assert labels[chosen[a, p]] != labels[a]
        losses.append(max(0.0, 3 + float(distances[a, p]) - negative))
    assert 0 < outside < len(losses)
    found = triplet_loss(distances, labels, chosen, 3.0)
    torch.testing.assert_close(float(found), sum(losses) / len(losses))


def test_no_triplets_no_loss() -> None:
    distances, _ = some_distances()
    for labels in (torch.arange(12), torch.zeros(12, dtype=torch.int64)):
        assert triplet_loss(distances, labels, semihard(distances, labels), 3.0) == 0


def test_later_passes_keep_the_first_ones_negatives() -> None:
    masf = build(margin=20.0)
    prepared = masf.prepare(make_batches((12, 12, 12)))
    first = masf(prepared).aux
    with torch.no_grad():
        for p in masf.metric.parameters():
            p.copy_(torch.randn_like(p) * 0.2)
    again, anew = masf(prepared, first=first), masf(prepared)
    assert torch.equal(again.aux["negatives"], first["negatives"])
    assert not torch.equal(anew.aux["negatives"], first["negatives"])
    assert not torch.equal(again.total, anew.total)


def test_every_domain_is_for_meta_testing_as_often() -> None:
    masf, batches = build(), make_batches((1, 1, 1))
    seen: Counter[int] = Counter()
    torch.manual_seed(0)
    for _ in range(300):
        pairs = masf.prepare(batches).draws["pairs"]
        ((test,), training) = ({j for _, j in pairs}, {i for i, _ in pairs})
        assert training == {0, 1, 2} - {test}
        seen[test] += 1
    assert len(seen) == len(SIZES)
    assert min(seen.values()) > 70
