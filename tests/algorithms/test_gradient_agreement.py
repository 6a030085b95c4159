"""Fish, ANDMask and SANDMask: gradients that domains agree on, under any optimizer."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from steppe.algorithms import Algorithm, Network, Prepared, build_algorithm

from .oracles import SIZES, gradients, make_batches, make_network, move


def build(name: str, **options: object) -> tuple[Algorithm, Network, Prepared]:
    network = make_network()
    algorithm = build_algorithm(name, network, len(SIZES), **options)
    torch.manual_seed(3)
    return algorithm, network, algorithm.prepare(make_batches())


def of_domains(network: Network, algorithm: Algorithm, prepared: Prepared) -> list[list[Tensor]]:
    """The gradient of each domain, by parameter."""
    return [gradients(algorithm.risk(prepared, d), network) for d in range(len(SIZES))]


def test_the_gradient_of_fish_is_the_way_its_inner_steps_went() -> None:
    alpha = 0.3
    algorithm, network, prepared = build("Fish", inner_lr=alpha)
    order = list(prepared.draws["order"])
    assert sorted(order) == [0, 1, 2] != order, "a draw that DomainBed's fixed order is not"
    walker = copy.deepcopy(algorithm)
    sgd = torch.optim.SGD(walker.parameters(), lr=alpha)
    risks = []
    for domain in order:
        sgd.zero_grad()
        risks.append(walker.risk(prepared, domain))
        risks[-1].backward()
        sgd.step()
    losses = algorithm(prepared)
    torch.testing.assert_close(losses.total, sum(risks) / len(SIZES), rtol=1e-12, atol=0)
    ends = zip(network.parameters(), walker.parameters(), strict=True)
    for found, (before, after) in zip(gradients(losses.total, network), ends, strict=True):
        expected = (before - after) / (alpha * len(SIZES))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_fish_without_inner_steps_is_the_mean_risk() -> None:
    algorithm, network, prepared = build("Fish", inner_lr=0.0)
    risk = torch.stack([algorithm.risk(prepared, d) for d in prepared.draws["order"]]).mean()
    total = algorithm(prepared).total
    assert torch.equal(total, risk)
    assert all(map(torch.equal, gradients(total, network), gradients(risk, network)))


def test_fish_takes_its_inner_steps_anew_at_other_weights() -> None:
    algorithm, network, prepared = build("Fish", inner_lr=0.3)
    move(network, 1)
    there = gradients(algorithm(prepared, first={}).total, network)
    fresh = copy.deepcopy(algorithm)
    expected = gradients(fresh(prepared).total, fresh.network)
    assert all(map(torch.equal, there, expected))


@pytest.mark.parametrize(
    ("name", "options"),
    [("ANDMask", {"tau": 0.0}), ("ANDMask", {"tau": 0.3}), ("SANDMask", {"tau": 0.3, "k": 1e9})],
)
def test_where_any_majority_agrees_enough_nothing_is_masked(
    name: str, options: dict[str, float]
) -> None:
    """Signs of three domains add up to at least 1."""
    algorithm, network, prepared = build(name, **options)
    parts = [prepared.only(d) for d in range(len(SIZES))]
    risk = torch.stack(
        [torch.nn.functional.cross_entropy(network(p.images), p.labels) for p in parts]
    ).mean()
    losses = algorithm(prepared)
    assert losses.parts["updated"] == 1
    torch.testing.assert_close(losses.total, risk, rtol=1e-14, atol=0)
    found, expected = gradients(losses.total, network), gradients(risk, network)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-16)


def test_andmask_updates_where_all_signs_agree() -> None:
    """Exactly nothing elsewhere, and as much more here; the value is the mean risk's."""
    algorithm, network, prepared = build("ANDMask")
    each = of_domains(network, algorithm, prepared)
    losses = algorithm(prepared)
    torch.testing.assert_close(losses.total, algorithm.risks(prepared).mean(), rtol=1e-14, atol=0)
    kept = 0
    for found, *own in zip(gradients(losses.total, network), *each, strict=True):
        signs = torch.stack(own).sign().sum(0).abs()
        mask = signs == len(SIZES)
        assert 0 < mask.sum() < mask.numel()
        assert found[~mask].abs().max() == 0
        expected = (sum(own) / len(SIZES))[mask] / (mask.sum() / mask.numel())
        torch.testing.assert_close(found[mask], expected, rtol=1e-6, atol=0)
        kept += int(mask.sum())
    assert losses.parts["updated"] == kept / sum(p.numel() for p in network.parameters())


def test_the_first_pass_sets_the_mask() -> None:
    algorithm, network, prepared = build("ANDMask")
    first = algorithm(prepared).aux
    assert first.keys() == {f"factor.{name}" for name, _ in network.named_parameters()}
    move(network, 1)
    mean = gradients(algorithm.risks(prepared).mean(), network)
    found = gradients(algorithm(prepared, first=first).total, network)
    for a, b, factor in zip(found, mean, first.values(), strict=True):
        torch.testing.assert_close(a, factor * b, rtol=1e-12, atol=1e-16)
    own = algorithm(prepared).aux
    assert not all(torch.equal(own[key], first[key]) for key in first)


def test_a_masked_weight_stays_under_adam() -> None:
    """A rounding error instead of 0 would move it, since Adam divides by the gradient's size."""
    algorithm, network, prepared = build("ANDMask")
    algorithm.float()
    before = [p.detach().clone() for p in network.parameters()]
    adam = torch.optim.Adam(network.parameters(), lr=0.1)
    losses = algorithm(replace(prepared, images=prepared.images.float()))
    losses.total.backward()
    adam.step()
    for p, old, factor in zip(network.parameters(), before, losses.aux.values(), strict=True):
        assert torch.equal(p == old, factor == 0)


def test_sandmask_is_its_formula() -> None:
    tau, k = 0.2, 1e-4
    algorithm, network, prepared = build("SANDMask", tau=tau, k=k)
    each = of_domains(network, algorithm, prepared)
    found = gradients(algorithm(prepared).total, network)
    smooth = False
    for gradient, *own in zip(found, *each, strict=True):
        stacked = torch.stack(own)
        mean = stacked.mean(0)
        variance = (stacked - mean).square().sum(0) / (len(own) - 1)
        mask = torch.tanh(k / variance * (stacked.sign().mean(0).abs() - tau)).clamp(min=0)
        smooth |= bool(((mask > 0.05) & (mask < 0.95)).any())
        torch.testing.assert_close(gradient, mask * mean / mask.mean(), rtol=1e-9, atol=1e-14)
    assert smooth


def test_a_steep_sandmask_is_andmask() -> None:
    one, _, prepared = build("ANDMask", tau=0.5)
    other, _, _ = build("SANDMask", tau=0.5, k=1e12)
    ours, theirs = one(prepared), other(prepared)
    assert torch.equal(ours.total, theirs.total)
    for a, b in zip(gradients(ours.total, one), gradients(theirs.total, other), strict=True):
        assert torch.equal(a, b)


def test_domainbeds_default_of_sandmask_learns_nothing() -> None:
    algorithm, network, prepared = build("SANDMask", tau=0.999999)
    algorithm.tau = 1.0  # which is refused as an option
    assert all(not g.any() for g in gradients(algorithm(prepared).total, network))


@pytest.mark.parametrize("tau", [0.0, 0.5])
def test_sandmask_without_variance(tau: float) -> None:
    """Equal gradients agree, unless they are 0: there DomainBed may divide 0 by 0."""
    algorithm, _, _ = build("SANDMask", tau=tau)
    equal = torch.tensor([[1.0, -2.0, 0.0]]).expand(3, -1)
    assert algorithm.mask(equal).tolist() == [1, 1, 0]
