"""CAD, CondCAD and SelfReg: similarities between images of other domains, or of the same class."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from steppe.algorithms import Algorithm, Prepared, build_algorithm
from steppe.domains.batches import Batch

from .oracles import SIZES, gradients, make_batches, make_network, move

LABELS = torch.tensor([0, 0, 1, 2, 1, 0, 0, 1, 1, 1, 2, 3, 0, 0, 4, 1])
DOMAINS = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))


def build(name: str, labels: Tensor = LABELS, **options: object) -> tuple[Algorithm, Prepared]:
    algorithm = build_algorithm(name, make_network(), len(SIZES), **options).double()
    torch.manual_seed(3)
    return algorithm, algorithm.prepare(labeled(labels))


def labeled(labels: Tensor) -> list[Batch]:
    given = zip(make_batches(), labels.split(SIZES), strict=True)
    return [Batch(batch.images, own) for batch, own in given]


def log_sum_exp(values: list[float]) -> float:
    return max(values) + math.log(sum(math.exp(v - max(values)) for v in values))


def bottleneck(z: Tensor, temperature: float, same_class: bool) -> float:
    """Pair by pair."""
    n, terms = len(z), []
    for i in range(n):
        others = [j for j in range(n) if j != i and (not same_class or LABELS[j] == LABELS[i])]
        abroad = [j for j in others if DOMAINS[j] != DOMAINS[i]]
        if abroad:
            logit = {j: float(z[i] @ z[j]) / temperature for j in others}
            everywhere = log_sum_exp(list(logit.values()))
            terms.append(everywhere - log_sum_exp([logit[j] for j in abroad]))
    assert (len(terms) < n) == same_class
    return temperature / 0.07 * sum(terms) / len(terms)


@pytest.mark.parametrize(("name", "same_class"), [("CAD", False), ("CondCAD", True)])
@pytest.mark.parametrize("temperature", [0.05, 0.1])
def test_the_bottleneck_pair_by_pair(name: str, same_class: bool, temperature: float) -> None:
    algorithm, prepared = build(name, temperature=temperature, penalty=3.0)
    losses = algorithm(prepared)
    features = algorithm.network.features(prepared.images).detach()
    expected = bottleneck(features, temperature, same_class)
    assert losses.parts["penalty"].item() == pytest.approx(expected, rel=1e-12)
    risk = F.cross_entropy(algorithm.network(prepared.images), LABELS)
    assert losses.total.item() == pytest.approx(risk.item() + 3 * expected, rel=1e-12)


def test_cad_does_not_use_classes_where_domainbeds_does() -> None:
    """DomainBed leaves out images without another of their class; here those of classes 3 and 4."""
    algorithm, prepared = build("CAD")
    _, relabeled = build("CAD", labels=torch.arange(len(LABELS)) % 5)
    penalty = algorithm(prepared).parts["penalty"]
    assert torch.equal(penalty, algorithm(relabeled).parts["penalty"])
    lonely = (LABELS[:, None] == LABELS).sum(1) == 1
    assert lonely.sum() == 2
    z = algorithm.network.features(prepared.images) / 0.1**0.5
    p = (z @ z.T).fill_diagonal_(-torch.inf).softmax(1)
    terms = -(p * (DOMAINS[:, None] != DOMAINS)).sum(1).log() * 0.1 / 0.07
    torch.testing.assert_close(penalty, terms.mean(), rtol=1e-9, atol=0)
    assert abs(terms[~lonely].mean() - penalty) > 1e-3


def test_condcad_of_one_class_is_cad() -> None:
    one = torch.zeros_like(LABELS)
    (cad, prepared), (conditional, _) = build("CAD", labels=one), build("CondCAD", labels=one)
    assert torch.equal(cad(prepared).total, conditional(prepared).total)


def test_without_classmates_in_other_domains_condcad_is_the_risk() -> None:
    algorithm, prepared = build("CondCAD", labels=DOMAINS, penalty=10.0)
    losses = algorithm(prepared)
    assert losses.parts["penalty"] == 0
    assert torch.equal(losses.total, losses.parts["risk"])
    found = gradients(losses.total, algorithm)
    risk = F.cross_entropy(algorithm.network(prepared.images), DOMAINS)
    for a, b in zip(found, gradients(risk, algorithm), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CAD", {"penalty": 0.0}),
        ("CondCAD", {"penalty": 0.0}),
        ("SelfReg", {"logit_penalty": 0.0, "feature_penalty": 0.0}),
    ],
)
def test_without_penalty_they_are_erm(name: str, options: dict[str, float]) -> None:
    algorithm, prepared = build(name, **options)
    erm = build_algorithm("ERM", algorithm.network, len(SIZES))
    ours, theirs = algorithm(prepared).total, erm(prepared).total
    assert torch.equal(ours, theirs)
    network = algorithm.network
    assert all(map(torch.equal, gradients(ours, network), gradients(theirs, network)))


def test_selfreg_draws_partners_of_the_same_class() -> None:
    algorithm, prepared = build("SelfReg")
    counts = torch.zeros(len(LABELS), len(LABELS))
    for _ in range(200):
        for partner in algorithm.prepare(labeled(LABELS)).draws["partners"]:
            assert sorted(partner.tolist()) == list(range(len(LABELS)))
            assert torch.equal(LABELS[partner], LABELS)
            counts[torch.arange(len(LABELS)), partner] += 1
    same = LABELS[:, None] == LABELS
    expected = 400.0 * same / same.sum(1, keepdim=True)
    # Five standard deviations of a binomial count.
    assert ((counts - expected).abs() <= 5 * expected.sqrt()).all()
    assert not torch.equal(*prepared.draws["partners"])


def test_selfreg_image_by_image() -> None:
    algorithm, prepared = build("SelfReg", logit_penalty=0.7, feature_penalty=0.2)
    network, share = algorithm.network, float(prepared.draws["share"])
    assert 0 < share < 1
    f = network.features(prepared.images)
    z, h = network.classifier(f), algorithm.projector(f)
    expected = 0.0
    for weight, own, others in ((0.7, z, z), (0.2, f, h)):
        to_partner = to_mix = 0.0
        for i, (j, k) in enumerate(prepared.draws["partners"].T.tolist()):
            mix = share * others[j] + (1 - share) * others[k]
            to_partner += (own[i] - others[j]).square().sum() / own.numel()
            to_mix += (own[i] - mix).square().sum() / own.numel()
        expected += weight * (share * to_partner + (1 - share) * to_mix)
    losses = algorithm(prepared)
    torch.testing.assert_close(losses.parts["penalty"], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("bias", "below_1"), [(0.0, False), (-50.0, True)])
def test_the_factor_of_selfreg_is_a_constant_of_the_step(bias: float, below_1: bool) -> None:
    """It is the loss of the first pass, at most 1: DomainBed's `min(cl_loss.item(), 1.)`."""
    algorithm, prepared = build("SelfReg", labels=(LABELS > 0).long())
    classifier = algorithm.network.classifier
    with torch.no_grad():  # about log 5, or log 2 if three classes are improbable
        classifier.weight.mul_(0.1)
        classifier.bias.copy_(torch.tensor([0.0, 0.0, bias, bias, bias]))
    first = algorithm(prepared)
    scale, parts = first.aux["scale"], first.parts
    assert scale == (parts["risk"] if below_1 else 1)
    assert torch.equal(first.total, parts["risk"] + scale * parts["penalty"])
    constant = parts["risk"] + scale.item() * parts["penalty"]
    pairs = zip(gradients(first.total, algorithm), gradients(constant, algorithm), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    move(algorithm.network, 1)
    later = algorithm(prepared, first={"scale": torch.tensor(0.25)})
    assert torch.equal(later.total, later.parts["risk"] + 0.25 * later.parts["penalty"])


def test_the_projector_of_selfreg_keeps_no_statistics() -> None:
    algorithm, _ = build("SelfReg")
    names = {name for name, _ in algorithm.named_buffers()}
    assert not {name for name in names if name.startswith("projector")}
    widths = [m.out_features for m in algorithm.projector if isinstance(m, torch.nn.Linear)]
    n = algorithm.network.n_features
    assert widths == [2 * n, 2 * n, n]
