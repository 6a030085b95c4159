"""IRM, VREx, GroupDRO, MMD, CORAL and Fishr against their formulas, image by image."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from steppe.algorithms import ERM, Losses, Network, build_algorithm
from tests.algorithms.oracles import (
    Image,
    assert_equal_losses,
    buffers,
    cross_entropy,
    features,
    gradients,
    images_of,
    logits,
    make_batches,
    make_network,
    mean,
    move,
    risk,
)

Domains = list[list[Image]]
State = dict[str, Tensor]


class Oracle:
    """The slow version of an algorithm: options as its own, state as its buffers."""

    def __init__(self, **options: float) -> None:
        self.options = options
        self.state: State = {}

    def start(self, network: Network, n_domains: int) -> None:
        """Sets the state before the first step."""

    def __call__(self, network: Network, domains: Domains, first: State | None = None) -> Losses:
        """The losses; `first` is the state that the first pass of the step gave."""
        raise NotImplementedError


class Annealed(Oracle):
    before = 1.0

    def start(self, network: Network, n_domains: int) -> None:
        self.state = {"steps": torch.tensor(0)}

    def penalty(self, network: Network, domains: Domains) -> tuple[Tensor, State]:
        raise NotImplementedError

    def __call__(self, network: Network, domains: Domains, first: State | None = None) -> Losses:
        early = int(self.state["steps"]) < self.options["anneal_steps"]
        weight = self.before if early else self.options["penalty"]
        penalty, state = self.penalty(network, domains)
        total = self.risk(network, domains) + weight * penalty
        state = {"steps": self.state["steps"] + 1, **state}
        return Losses(total, {"penalty": penalty}, state=state)

    def risk(self, network: Network, domains: Domains) -> Tensor:
        return mean(risk(network, domain) for domain in domains)


class IRM(Annealed):
    def penalty(self, network: Network, domains: Domains) -> tuple[Tensor, State]:
        def slope(images: list[Image]) -> Tensor:
            scale = torch.ones((), dtype=torch.float64, requires_grad=True)
            scaled = mean(cross_entropy(scale * logits(network, i), i.label) for i in images)
            return torch.autograd.grad(scaled, scale, create_graph=True)[0]

        return mean(slope(domain[::2]) * slope(domain[1::2]) for domain in domains), {}


class VREx(Annealed):
    def penalty(self, network: Network, domains: Domains) -> tuple[Tensor, State]:
        risks = [risk(network, domain) for domain in domains]
        return mean((r - mean(risks)) ** 2 for r in risks), {}


class Fishr(Annealed):
    before = 0.0

    def start(self, network: Network, n_domains: int) -> None:
        n = network.n_classes * (network.n_features + 1)
        self.state = {"steps": torch.tensor(0), "variances": torch.zeros(n_domains, n).double()}

    def penalty(self, network: Network, domains: Domains) -> tuple[Tensor, State]:
        ema, averaged = self.options["ema"], []
        for old, domain in zip(self.state["variances"], domains, strict=True):
            rows = []
            for image in domain:
                loss = cross_entropy(logits(network, image), image.label)
                parameters = (network.classifier.weight, network.classifier.bias)
                by_each = torch.autograd.grad(loss, parameters, create_graph=True)
                rows.append(torch.cat([g.flatten() for g in by_each]))
            variance = mean((row - mean(rows)) ** 2 for row in rows)
            averaged.append(ema * old + (1 - ema) * variance)
        v = [a / (1 - ema) for a in averaged]
        distances = (((v_d - mean(v)) ** 2).mean() for v_d in v)
        return mean(distances), {"variances": torch.stack(averaged).detach()}

    def risk(self, network: Network, domains: Domains) -> Tensor:
        return risk(network, [image for domain in domains for image in domain])


class GroupDRO(Oracle):
    def start(self, network: Network, n_domains: int) -> None:
        self.state = {"q": torch.full((n_domains,), 1 / n_domains, dtype=torch.float64)}

    def __call__(self, network: Network, domains: Domains, first: State | None = None) -> Losses:
        risks = [risk(network, domain) for domain in domains]
        pairs = zip(self.state["q"], risks, strict=True)
        grown = [q * (self.options["eta"] * r.detach()).exp() for q, r in pairs]
        q = torch.stack([g / sum(grown) for g in grown]) if first is None else first["q"]
        total = sum(weight * r for weight, r in zip(q, risks, strict=True))
        return Losses(total, {"risk": mean(risks)}, state={"q": q})


class Matching(Oracle):
    def distance(self, xs: list[Tensor], ys: list[Tensor]) -> Tensor:
        raise NotImplementedError

    def __call__(self, network: Network, domains: Domains, first: State | None = None) -> Losses:
        of_domains = [[features(network, image) for image in domain] for domain in domains]
        penalty = mean(self.distance(xs, ys) for xs, ys in combinations(of_domains, 2))
        total = mean(risk(network, domain) for domain in domains)
        return Losses(total + self.options["penalty"] * penalty, {"penalty": penalty})


class MMD(Matching):
    def distance(self, xs: list[Tensor], ys: list[Tensor]) -> Tensor:
        def kernel(a: Tensor, b: Tensor) -> Tensor:
            return sum(torch.exp(-(10.0**k) * ((a - b) ** 2).sum()) for k in range(-3, 4))

        def k(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
            return mean(kernel(x, y) for x in xs for y in ys)

        return k(xs, xs) + k(ys, ys) - 2 * k(xs, ys)


class CORAL(Matching):
    def distance(self, xs: list[Tensor], ys: list[Tensor]) -> Tensor:
        def covariance(xs: list[Tensor]) -> Tensor:
            return sum(torch.outer(x - mean(xs), x - mean(xs)) for x in xs) / (len(xs) - 1)

        m = len(xs[0])
        by_means = ((mean(xs) - mean(ys)) ** 2).sum() / m
        return by_means + ((covariance(xs) - covariance(ys)) ** 2).sum() / m**2


ORACLES = [
    IRM(penalty=30.0, anneal_steps=2),
    VREx(penalty=30.0, anneal_steps=2),
    Fishr(penalty=30.0, anneal_steps=2, ema=0.7),
    GroupDRO(eta=0.7),
    MMD(penalty=0.3),
    CORAL(penalty=0.3),
]
ANNEALED = ("IRM", "VREx", "Fishr")
PENALTIES = (*ANNEALED, "MMD", "CORAL")


def name_of(oracle: Oracle) -> str:
    return type(oracle).__name__


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("oracle", ORACLES, ids=name_of)
def test_steps_are_the_formulas(oracle: Oracle, dropout: float):
    network = make_network(dropout)
    algorithm = build_algorithm(name_of(oracle), network, 3, **oracle.options).double()
    oracle.start(network, 3)
    for step in range(4):
        batches, before = make_batches(seed=step), buffers(algorithm)
        prepared = algorithm.prepare(batches)
        images = images_of(batches, prepared.keep)

        losses, expected = algorithm(prepared), oracle(network, images)
        assert_equal_losses(algorithm, losses, expected)
        # An optimizer's second pass: other weights, what the first pass settled, no new state.
        move(network, seed=step)
        again = algorithm(prepared, "main", losses.aux)
        assert_equal_losses(algorithm, again, oracle(network, images, dict(expected.state)))
        assert all(torch.equal(b, before[name]) for name, b in buffers(algorithm).items())

        algorithm.commit(prepared, {"main": losses})
        oracle.state = dict(expected.state)
        assert buffers(algorithm).keys() == oracle.state.keys()
        for name, value in buffers(algorithm).items():
            torch.testing.assert_close(value, oracle.state[name], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", PENALTIES)
def test_no_weight_is_erm(name: str):
    options = {"penalty": 0.0} | ({"anneal_steps": 0} if name in ANNEALED else {})
    algorithm = build_algorithm(name, make_network(), 3, **options).double()
    erm = ERM(algorithm.network, 3)
    batches = make_batches((4, 4, 4))
    found, expected = (a(a.prepare(batches)).total for a in (algorithm, erm))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for a, b in zip(gradients(found, erm), gradients(expected, erm), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", ["VREx", "MMD", "CORAL", "Fishr"])
def test_equal_domains_have_no_penalty(name: str):
    algorithm = build_algorithm(name, make_network(), 3).double()
    batches = make_batches()
    different, same = (
        algorithm(algorithm.prepare(b)).parts["penalty"] for b in (batches, [batches[0]] * 3)
    )
    assert abs(same) < 1e-14 < 1e-6 < different


def test_groupdro_that_learns_nothing_takes_the_mean():
    algorithm = build_algorithm("GroupDRO", make_network(), 3, eta=0.0).double()
    for step in range(3):
        prepared = algorithm.prepare(make_batches(seed=step))
        losses = algorithm(prepared)
        torch.testing.assert_close(losses.total, losses.parts["risk"], rtol=1e-12, atol=0)
        algorithm.commit(prepared, {"main": losses})


@pytest.mark.parametrize("oracle", ORACLES, ids=name_of)
def test_the_optimizer_forgets_when_the_weight_changes(oracle: Oracle):
    algorithm = build_algorithm(name_of(oracle), make_network(), 3, **oracle.options)
    (objective,) = algorithm.objectives()
    expected = [2] if name_of(oracle) in ANNEALED else []
    assert [step for step in range(9) if objective.reset(step)] == expected
    assert all(map(objective.active, range(9)))
    assert list(map(id, objective.parameters)) == list(map(id, algorithm.parameters()))
