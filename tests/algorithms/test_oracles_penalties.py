"""SD, IB-ERM, IB-IRM, CausIRL, IGA, RDM, EQRM, CAD, CondCAD and SelfReg, image by image."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from steppe.algorithms import Losses, Prepared, build_algorithm
from steppe.domains.batches import Batch
from tests.algorithms.oracles import (
    SIZES,
    Image,
    assert_equal_losses,
    buffers,
    cross_entropy,
    features,
    images_of,
    logits,
    make_batches,
    make_network,
    mean,
    move,
    risk,
)

STEPS = 3
CUTS = ((2, 5, 0), (0, 1, 0), (4, 6, 3))
"""Where each step cuts the domains in two; the first part of the second step has one image."""


@dataclass
class Step:
    """What a slow version sees of a step; `first` is the first pass's aux."""

    algorithm: Any
    options: Mapping[str, Any]
    domains: list[list[Image]]
    draws: Mapping[str, Any]
    number: int
    first: Mapping[str, Tensor] | None = None

    @property
    def images(self) -> list[Image]:
        return list(chain(*self.domains))

    @property
    def pooled_risk(self) -> Tensor:
        return risk(self.algorithm.network, self.images)

    @property
    def risks(self) -> list[Tensor]:
        return [risk(self.algorithm.network, domain) for domain in self.domains]

    def features(self) -> list[Tensor]:
        return [features(self.algorithm.network, image) for image in self.images]

    def logits(self) -> list[Tensor]:
        return [logits(self.algorithm.network, image) for image in self.images]

    def later(self, option: str = "anneal_steps") -> bool:
        return self.number >= self.options[option]


def variance(values: list[Tensor]) -> Tensor:
    """Over n - 1, entry by entry."""
    return sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)


def sd(step: Step) -> Losses:
    squared = [v**2 for z in step.logits() for v in z]
    parts = {"risk": step.pooled_risk, "penalty": sum(squared) / len(squared)}
    return Losses(parts["risk"] + step.options["penalty"] * parts["penalty"], parts)


def mean_variance(step: Step) -> Tensor:
    phis = ([features(step.algorithm.network, i) for i in domain] for domain in step.domains)
    return mean(variance(of_domain).mean() for of_domain in phis)


def ib_erm(step: Step) -> Losses:
    parts = {"risk": mean(step.risks), "penalty": mean_variance(step)}
    weight = step.options["penalty"] if step.later() else 0.0
    return Losses(parts["risk"] + weight * parts["penalty"], parts)


def ib_irm(step: Step) -> Losses:
    def slope(images: list[Image]) -> Tensor:
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        network = step.algorithm.network
        scaled = mean(cross_entropy(scale * logits(network, i), i.label) for i in images)
        return torch.autograd.grad(scaled, scale, create_graph=True)[0]

    penalty = mean(slope(domain[0::2]) * slope(domain[1::2]) for domain in step.domains)
    parts = {"risk": mean(step.risks), "penalty": penalty, "variance": mean_variance(step)}
    total = parts["risk"] + (step.options["penalty"] if step.later() else 1.0) * penalty
    if step.later("ib_anneal_steps"):
        total = total + step.options["ib_penalty"] * parts["variance"]
    return Losses(total, parts)


def kernel_distance(xs: list[Tensor], ys: list[Tensor], powers: range) -> Tensor:
    gammas = torch.tensor([10.0**k for k in powers], dtype=torch.float64)

    def k(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
        return mean((-gammas * ((x - y) ** 2).sum()).exp().sum() for x in xs for y in ys)

    return k(xs, xs) + k(ys, ys) - 2 * k(xs, ys)


def moment_distance(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
    def covariance(xs: list[Tensor]) -> Tensor:
        return sum(torch.outer(x - mean(xs), x - mean(xs)) for x in xs) / (len(xs) - 1)

    m = len(xs[0])
    by_means = ((mean(xs) - mean(ys)) ** 2).sum() / m
    return by_means + ((covariance(xs) - covariance(ys)) ** 2).sum() / m**2


def causirl(distance: Callable[[list[Tensor], list[Tensor]], Tensor]) -> Slow:
    def slow(step: Step) -> Losses:
        before: list[Tensor] = []
        after: list[Tensor] = []
        for cut, domain in zip(CUTS[step.number], step.domains, strict=True):
            for place, image in enumerate(domain):
                part = before if place < cut else after
                part.append(features(step.algorithm.network, image))
        enough = len(before) > 1 and len(after) > 1
        penalty = distance(before, after) if enough else torch.zeros((), dtype=torch.float64)
        parts = {"risk": mean(step.risks), "penalty": penalty}
        return Losses(parts["risk"] + step.options["penalty"] * penalty, parts)

    return slow


def iga(step: Step) -> Losses:
    weights = list(step.algorithm.network.parameters())
    risks = step.risks
    slopes = [torch.autograd.grad(r, weights, create_graph=True) for r in risks]
    penalty = sum(
        ((g - mean(of_domains)) ** 2).sum()
        for of_domains in zip(*slopes, strict=True)
        for g in of_domains
    )
    parts = {"risk": mean(risks), "penalty": penalty}
    return Losses(parts["risk"] + step.options["penalty"] * penalty, parts)


def rdm(step: Step) -> Losses:
    own = [
        [cross_entropy(logits(step.algorithm.network, image), image.label) for image in domain]
        for domain in step.domains
    ]
    risks = [mean(losses) for losses in own]
    worst = int(step.first["worst"]) if step.first else risks.index(max(risks))
    every = list(chain(*own))
    distance = kernel_distance(own[worst], every, range(-4, 4))
    variances = variance(every) + variance(own[worst])
    total = mean(risks)
    if step.later():
        total = total + step.options["penalty"] * distance + step.options["variance"] * variances
    parts = {"risk": mean(risks), "distance": distance, "variances": variances}
    return Losses(total, parts, aux={"worst": torch.tensor(worst)})


def eqrm(step: Step) -> Losses:
    """The quantile by bisection, and its derivatives from those of F, term by term."""
    risks, alpha = step.risks, step.options["quantile"]
    r, n = [float(x.detach()) for x in risks], len(risks)
    middle = sum(r) / n
    sigma = math.sqrt(sum((x - middle) ** 2 for x in r) / (n - 1))
    h = 1.06 * sigma * n**-0.2

    def cdf(q: float) -> float:
        return sum(math.erfc((x - q) / (h * math.sqrt(2))) / 2 for x in r) / n

    low, high = min(r) - 9 * h, max(r) + 9 * h
    for _ in range(80):
        q = (low + high) / 2
        low, high = (q, high) if cdf(q) < alpha else (low, q)
    phi = [math.exp(-(((q - x) / h) ** 2) / 2) / math.sqrt(2 * math.pi) for x in r]
    density = sum(phi) / (n * h)
    weights = []
    for i in range(n):
        h_by_i = 1.06 * n**-0.2 * (r[i] - middle) / ((n - 1) * sigma)
        by_width = sum(-(q - x) / h**2 * h_by_i * f for x, f in zip(r, phi, strict=True))
        weights.append(-(by_width - phi[i] / h) / n / density)
    linear = sum(w * (x - x.detach()) for w, x in zip(weights, risks, strict=True))
    parts = {"risk": mean(risks), "quantile": q + linear}
    return Losses(parts["quantile" if step.later("burn_in_steps") else "risk"], parts)


def cad(within_classes: bool) -> Slow:
    def slow(step: Step) -> Losses:
        z, t = step.features(), step.options["temperature"]
        y = [image.label for image in step.images]
        d = [number for number, domain in enumerate(step.domains) for _ in domain]
        terms = []
        for i in range(len(z)):
            others = [j for j in range(len(z)) if j != i]
            if within_classes:
                others = [j for j in others if y[j] == y[i]]
            e = {j: ((z[i] * z[j]).sum() / t).exp() for j in others}
            if abroad := [j for j in others if d[j] != d[i]]:
                terms.append((sum(e[j] for j in abroad) / sum(e.values())).log())
        bottleneck = -t / 0.07 * (mean(terms) if terms else torch.zeros((), dtype=torch.float64))
        parts = {"risk": step.pooled_risk, "penalty": bottleneck}
        return Losses(parts["risk"] + step.options["penalty"] * bottleneck, parts)

    return slow


def projections(projector: Any, xs: list[Tensor]) -> list[Tensor]:
    """Linear maps without biases, each normalized over the images; ReLU between them."""
    linears, norms = projector[0::3], projector[1::3]
    assert len(linears) == len(norms) == 3
    for k, (linear, norm) in enumerate(zip(linears, norms, strict=True)):
        assert linear.bias is None
        xs = [linear.weight @ x for x in xs]
        center, square = mean(xs), mean((x - mean(xs)) ** 2 for x in xs)
        xs = [(x - center) / (square + 1e-5).sqrt() * norm.weight + norm.bias for x in xs]
        if k < 2:
            xs = [torch.where(x > 0, x, 0) for x in xs]
    return xs


def selfreg(step: Step) -> Losses:
    share = float(step.draws["share"])
    pairs = step.draws["partners"].T.tolist()

    def apart(own: list[Tensor], others: list[Tensor]) -> Tensor:
        single, mixed = [], []
        for a, (i, j) in zip(own, pairs, strict=True):
            mix = share * others[i] + (1 - share) * others[j]
            single.append(((a - others[i]) ** 2).mean())
            mixed.append(((a - mix) ** 2).mean())
        return share * mean(single) + (1 - share) * mean(mixed)

    z, phi, options = step.logits(), step.features(), step.options
    of_logits, of_features = apart(z, z), apart(phi, projections(step.algorithm.projector, phi))
    penalty = options["logit_penalty"] * of_logits + options["feature_penalty"] * of_features
    pooled = step.pooled_risk
    scale = step.first["scale"] if step.first else pooled.detach().clamp(max=1)
    parts = {"risk": pooled, "penalty": penalty}
    return Losses(pooled + scale * penalty, parts, aux={"scale": scale})


Slow = Callable[[Step], Losses]
SLOW: dict[str, Slow] = {
    "SD": sd,
    "IB-ERM": ib_erm,
    "IB-IRM": ib_irm,
    "CausIRL-CORAL": causirl(moment_distance),
    "CausIRL-MMD": causirl(lambda xs, ys: kernel_distance(xs, ys, range(-3, 4))),
    "IGA": iga,
    "RDM": rdm,
    "EQRM": eqrm,
    "CAD": cad(within_classes=False),
    "CondCAD": cad(within_classes=True),
    "SelfReg": selfreg,
}


@dataclass
class Case:
    name: str
    options: dict[str, Any]
    sizes: tuple[int, ...] = SIZES
    dropout: float = 0.0
    labels: str = "absent"
    resets: tuple[int, ...] = ()
    lr_steps: dict[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.sizes)])


IB = {"penalty": 30.0, "ib_penalty": 7.0}
RDM = {"penalty": 3.0, "variance": 0.5, "anneal_steps": 2, "lr_factor": 0.2}
EQRM = {"quantile": 0.8, "burn_in_steps": 1, "lr_factor": 0.3}
SELFREG = {"logit_penalty": 0.7, "feature_penalty": 0.2, "alpha": 2.0}
CASES = [
    Case("SD", {"penalty": 0.4}, dropout=0.5),
    Case("SD", {"penalty": 0.4}, (3,)),
    Case("IB-ERM", {"penalty": 30.0, "anneal_steps": 2}, dropout=0.5, resets=(2,)),
    Case("IB-ERM", {"penalty": 3.0, "anneal_steps": 0}, (2,), resets=(0,)),
    Case("IB-IRM", IB | {"anneal_steps": 2, "ib_anneal_steps": 1}, resets=(1, 2), dropout=0.5),
    Case("IB-IRM", IB | {"anneal_steps": 1, "ib_anneal_steps": 2}, (2, 6, 3, 2), resets=(1, 2)),
    Case("CausIRL-CORAL", {"penalty": 0.3}, dropout=0.5),
    Case("CausIRL-MMD", {"penalty": 0.3}, dropout=0.5),
    Case("IGA", {"penalty": 0.7}, dropout=0.5),
    Case("IGA", {"penalty": 7.0}, (1, 6)),
    Case("RDM", RDM, dropout=0.5, resets=(2,), lr_steps={2: 0.2}),
    Case("RDM", RDM | {"anneal_steps": 1}, (2, 3, 2, 4), resets=(1,), lr_steps={1: 0.2}),
    Case("EQRM", EQRM, dropout=0.5, resets=(1,), lr_steps={1: 0.3}),
    Case("EQRM", EQRM | {"quantile": 0.999}, (3, 2), resets=(1,), lr_steps={1: 0.3}),
    Case("EQRM", EQRM | {"quantile": 0.3}, (3, 1, 2, 5), resets=(1,), lr_steps={1: 0.3}),
    Case("CAD", {"penalty": 3.0, "temperature": 0.05}, dropout=0.5),
    Case("CAD", {"penalty": 0.5, "temperature": 0.3}, (1, 4)),
    Case("CondCAD", {"penalty": 3.0, "temperature": 0.05}, dropout=0.5),
    Case("CondCAD", {"penalty": 3.0, "temperature": 0.2}, labels="domains"),
    Case("SelfReg", SELFREG, dropout=0.5),
    Case("SelfReg", SELFREG, labels="one"),
    Case("SelfReg", SELFREG, (6,)),
]
LABELS: dict[str, Callable[[int, Tensor], Tensor]] = {
    "absent": lambda domain, y: y * (y % 3 != 1),  # no image of classes 1 and 4
    "domains": lambda domain, y: torch.full_like(y, domain),
    "one": lambda domain, y: torch.zeros_like(y),
}


def prepare(algorithm: Any, case: Case, number: int) -> tuple[Prepared, list[Batch]]:
    batches = [
        batch._replace(labels=LABELS[case.labels](domain, batch.labels))
        for domain, batch in enumerate(make_batches(case.sizes, seed=number))
    ]
    torch.manual_seed(number)
    prepared = algorithm.prepare(batches)
    if "CausIRL" in case.name:
        places = zip(CUTS[number], case.sizes, strict=True)
        first = torch.cat([torch.arange(n) < cut for cut, n in places])
        prepared = replace(prepared, draws={"first part": first})
    return prepared, batches


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_the_formulas(case: Case):
    """Losses and gradients, passes at other weights, and what is committed."""
    network = make_network(case.dropout)
    algorithm: Any = build_algorithm(case.name, network, len(case.sizes), **case.options).double()
    move(algorithm, 9)  # no two parameters alike
    if case.labels == "one":  # a risk below 1, by which SelfReg multiplies
        with torch.no_grad():
            network.classifier.bias[0] += 2
    anneals = any("steps" in option for option in case.options)
    assert buffers(algorithm) == ({"steps": 0} if anneals else {})
    would_choose = set()
    for number in range(STEPS):
        prepared, batches = prepare(algorithm, case, number)
        images = images_of(batches, prepared.keep)
        step = Step(algorithm, case.options, images, prepared.draws, number)
        found, expected = algorithm(prepared), SLOW[case.name](step)
        assert_same(algorithm, found, expected)
        torch.testing.assert_close(found.logits, torch.stack(step.logits()), rtol=1e-10, atol=1e-14)

        # A second pass, elsewhere: it recomputes all but what the first one froze.
        first = {name: value.detach().clone() for name, value in found.aux.items()}
        before = buffers(algorithm)
        move(algorithm, number)
        again = algorithm(prepared, "main", first)
        assert_same(algorithm, again, SLOW[case.name](replace(step, first=first or None)))
        assert again.total != found.total
        own = SLOW[case.name](step).aux
        would_choose.add(all(torch.equal(own[name], first[name]) for name in first))
        assert buffers(algorithm) == before

        algorithm.commit(prepared, {"main": found})
        assert buffers(algorithm) == ({"steps": number + 1} if anneals else {})
    if case.name == "RDM" or case.labels == "one":
        assert False in would_choose


def assert_same(algorithm: Any, found: Losses, expected: Losses) -> None:
    assert_equal_losses(algorithm, found, expected)
    assert found.parts.keys() == expected.parts.keys()
    assert found.aux.keys() == expected.aux.keys()
    for name, value in expected.aux.items():
        torch.testing.assert_close(found.aux[name], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_objective_trains_all(case: Case):
    algorithm: Any = build_algorithm(case.name, make_network(), len(case.sizes), **case.options)
    (objective,) = algorithm.objectives()
    assert list(map(id, objective.parameters)) == list(map(id, algorithm.parameters()))
    assert all(map(objective.active, range(9)))
    assert tuple(step for step in range(9) if objective.reset(step)) == case.resets
    changes = objective.lr_steps, objective.lr_factors, objective.options
    assert changes == (case.lr_steps, {}, {})


@pytest.mark.parametrize("name", SLOW)
def test_predictions_are_the_networks(name: str):
    algorithm: Any = build_algorithm(name, make_network(dropout=0.5), len(SIZES)).double().eval()
    move(algorithm, 9)
    batches = make_batches()
    for domain, (batch, images) in enumerate(zip(batches, images_of(batches, None), strict=True)):
        expected = torch.stack([logits(algorithm.network, image) for image in images])
        of_source = algorithm.predict_source(batch.images, domain)
        for found in (algorithm.predict(batch.images), of_source):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    assert not type(algorithm).mixes_images()
