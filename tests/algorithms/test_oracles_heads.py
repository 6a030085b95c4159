"""URM, TRM and Transfer against their equations, by plain loops."""

from __future__ import annotations

import math
from itertools import chain, permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steppe.algorithms import Losses, Prepared, build_algorithm
from tests.algorithms.oracles import (
    SIZES,
    Image,
    buffers,
    cross_entropy,
    features,
    logits,
    make_batches,
    make_network,
    mean,
    move,
)
from tests.algorithms.stepping import (
    Domains,
    assert_losses,
    assert_predicts,
    linear,
    pooled,
    steps,
)


def bounded_logits(network: Any, image: Image) -> Tensor:
    return linear(network.classifier, torch.tanh(features(network, image)))


def realness(urm: Any, z: Tensor) -> Tensor:
    """The discriminator's logit of being noise, for one vector."""
    *hidden, last = [layer for layer in urm.discriminator if isinstance(layer, nn.Linear)]
    for layer in hidden:
        z = linear(layer, z)
        z = torch.where(z > 0, z, 0.01 * z)
    (logit,) = linear(last, z)
    return logit


def binary(logit: Tensor, noise: bool) -> Tensor:
    """Minus the log-probability of what it is."""
    return (1 + torch.exp(-logit if noise else logit)).log()


def urm_losses(urm: Any, prepared: Prepared, domains: Domains, objective: str) -> Losses:
    network, images = urm.network, list(chain(*domains))
    zs = [torch.tanh(features(network, image)) for image in images]
    if objective == "discriminator":
        noise = mean(binary(realness(urm, u), noise=True) for u in prepared.draws["noise"])
        real = mean(binary(realness(urm, z.detach()), noise=False) for z in zs)
        return Losses(noise + urm.penalty * real)
    misled = mean(binary(realness(urm, z), noise=True) for z in zs)
    plain = mean(cross_entropy(bounded_logits(network, x), x.label) for x in images)
    return Losses(plain + urm.penalty * misled, {"risk": plain, "adversary": misled})


@pytest.mark.parametrize(
    ("dropout", "options"), [(0.0, {}), (0.5, {"penalty": 0.7, "depth": 3, "lr": 0.3})]
)
def test_urm_is_its_two_losses(dropout: float, options: dict[str, Any]):
    network = make_network(dropout)
    urm: Any = build_algorithm("URM", network, 3, **options).double()
    linears = [layer for layer in urm.discriminator if isinstance(layer, nn.Linear)]
    assert len(linears) == 2 + options.get("depth", 1)
    assert {layer.in_features for layer in linears[1:]} == {100}
    learns = {"main": network, "discriminator": urm.discriminator}
    for step, (prepared, domains) in enumerate(steps(urm)):
        for objective, module in learns.items():
            losses = urm(prepared, objective)
            assert_losses(urm, losses, urm_losses(urm, prepared, domains, objective), module)
            assert (losses.aux, losses.state) == ({}, {})
        move(urm, step)
        for objective, module in learns.items():
            again = urm(prepared, objective, {})
            assert_losses(urm, again, urm_losses(urm, prepared, domains, objective), module)
        urm.commit(prepared, {})
        assert not buffers(urm)
    assert_predicts(urm, lambda image: bounded_logits(network, image))
    main, discriminator = urm.objectives()
    assert [o.name for o in (main, discriminator)] == [*learns]
    assert [{*o.parameters} for o in (main, discriminator)] == [
        {*module.parameters()} for module in learns.values()
    ]
    assert main.options == {}
    assert discriminator.options == ({"lr": 0.3} if options else {})


def test_urms_noise_is_uniform_and_new():
    urm = build_algorithm("URM", make_network(), 3).double()
    torch.manual_seed(0)
    draws = torch.stack([urm.prepare(make_batches()).draws["noise"] for _ in range(500)])
    assert draws.shape == (500, sum(SIZES), urm.network.n_features)
    assert draws.dtype == torch.float64
    assert draws.abs().max() <= 1
    n = draws.numel()
    assert draws.mean() == pytest.approx(0, abs=5 / math.sqrt(3 * n))
    assert draws.var() == pytest.approx(1 / 3, abs=5 * math.sqrt(4 / 45 / n))
    assert draws.flatten().unique().numel() == n


# TRM


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def head_risk(head: Tensor, phis: Tensor, labels: Tensor) -> Tensor:
    """A head's mean cross-entropy; its last column is the bias."""
    z = phis @ head[:, :-1].T + head[:, -1]
    return -(z.exp() / z.exp().sum(1, keepdim=True)).log()[range(len(z)), labels].mean()


def slope(value: Tensor, by: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(value, by, create_graph=True)
    return found


def series(hessian: Tensor, v: Tensor, terms: int | None) -> tuple[Tensor, int]:
    """By powers of the whole matrix: the sum, and its number of terms after the first."""
    total, count = v, 0
    for k in range(1, 11):
        if (total.abs().max() > 10) if terms is None else k > terms:
            break
        total = total + torch.linalg.matrix_power(torch.eye(len(v)).double() - hessian, k) @ v
        count = k
    return total, count


class SlowTRM:
    """Its losses, by derivatives of what they contain, and the state that they propose."""

    def __init__(self, trm: Any) -> None:
        self.trm = trm
        alpha = [[0.0 if p == q else 1 / 2 for p in range(3)] for q in range(3)]
        steps = torch.tensor(0)
        self.state = {"heads": trm.heads, "alpha": torch.tensor(alpha).double(), "steps": steps}

    def __call__(self, domains: Domains, given: list[int] | None = None) -> Losses:
        trm, state, swaps, counts, fits, alphas = self.trm, self.state, [], [], [], []
        started = int(state["steps"]) >= trm.anneal_steps
        plain = pooled(trm.network, domains)
        labels = [torch.tensor([image.label for image in domain]) for domain in domains]
        phis = [torch.stack([features(trm.network, x) for x in domain]) for domain in domains]
        for q, (w, alpha) in enumerate(zip(state["heads"], state["alpha"], strict=True)):
            still = phis[q].detach()
            for _ in range(30):
                w = w.detach().requires_grad_()
                w = w - 0.1 * slope(head_risk(w, still, labels[q]), w)
            w = w.detach().requires_grad_()
            risks = [head_risk(w, phis[p], labels[p]) for p in range(3)]
            others = sum(alpha[p] * risks[p] for p in range(3) if p != q)
            n = w.numel()
            hessian = torch.autograd.functional.hessian(
                lambda w, x=still, y=labels[q]: head_risk(w, x, y), w, vectorize=True
            ).view(n, n)
            v = slope(others, w).detach().flatten()
            solved, count = series(hessian, v, None if given is None else given[q])
            swaps.append(others - trm.penalty * solved @ slope(risks[q], w).flatten())
            grown = torch.stack(
                [a * math.exp(trm.eta * r.item()) for a, r in zip(alpha, risks, strict=True)]
            )
            counts.append(count)
            fits.append(w.detach())
            alphas.append(grown / sum(grown))
        transfer = mean(swaps) if started else 0 * plain.detach()
        new = {"heads": torch.stack(fits), "alpha": torch.stack(alphas)} if started else {}
        return Losses(
            plain + transfer,
            {"risk": plain, "transfer": transfer},
            {"terms": torch.tensor(counts)},
            {**state, **new, "steps": state["steps"] + 1},
        )


@pytest.mark.parametrize(("dropout", "factor", "few"), [(0.0, 1.0, False), (0.5, 6.0, True)])
def test_trm_is_its_formula(dropout: float, factor: float, few: bool):
    """With features of another scale, the series diverges and ends early."""
    network = make_network(dropout)
    network.featurizer.append(Times(factor))
    options = {"penalty": 0.6, "anneal_steps": 1, "eta": 0.7}
    trm: Any = build_algorithm("TRM", network, 3, **options).double()
    slow = SlowTRM(trm)
    for step, (prepared, domains) in enumerate(steps(trm)):
        losses, expected = trm(prepared), slow(domains)
        assert_losses(trm, losses, expected, network)
        assert torch.equal(losses.aux["terms"], expected.aux["terms"])
        assert bool((losses.aux["terms"] < 10).any()) == few
        move(network, step)
        for given in ([0, 1, 10], losses.aux["terms"].tolist()):  # whatever the first pass counted
            again = trm(prepared, "main", {"terms": torch.tensor(given)})
            assert_losses(trm, again, slow(domains, given), network)
            assert again.aux["terms"].tolist() == given
        before = buffers(trm)
        trm.commit(prepared, {"main": losses})
        slow.state = dict(expected.state)
        assert buffers(trm).keys() == slow.state.keys()
        for name, value in buffers(trm).items():
            torch.testing.assert_close(value, slow.state[name], rtol=1e-10, atol=1e-13)
            assert torch.equal(value, before[name]) == (step == 0 and name != "steps")
    assert_predicts(trm, lambda image: logits(network, image))


def test_heads_of_trm_start_apart_and_look_at_other_domains():
    """As any new linear layer does; they are no parameters, but part of a checkpoint."""
    trm: Any = build_algorithm("TRM", make_network(), 4)
    assert not torch.equal(trm.heads[0], trm.heads[1])
    bound = 1 / math.sqrt(trm.network.n_features)
    assert 0.7 * bound < trm.heads.abs().max() <= bound
    assert torch.equal(trm.alpha, (1 - torch.eye(4)) / 3)
    assert {"heads", "alpha", "steps"} <= trm.state_dict().keys()
    assert {*trm.parameters()} == {*trm.network.parameters()}


# Transfer


def gap_losses(transfer: Any, domains: Domains, picks: list[tuple[int, int]] | None) -> Losses:
    """Adversary and gap; in each of its risks, compared are the domains given or chosen here."""
    network, found = transfer.network, []
    center = [p.detach() for p in network.classifier.parameters()]
    adversary = [p.clone() for p in center]

    def gap(weight: Tensor, bias: Tensor, constant: bool) -> Tensor:
        risks = []
        for domain in domains:
            phis = [features(network, image) for image in domain]
            phis = [phi.detach() if constant else phi for phi in phis]
            pairs = zip(phis, domain, strict=True)
            risks.append(mean(cross_entropy(weight @ phi + bias, x.label) for phi, x in pairs))
        values = [float(r.detach()) for r in risks]
        chosen = values.index(max(values)), values.index(min(values))
        high, low = chosen if picks is None else picks[len(found)]
        found.append((high, low))
        return risks[high] - risks[low]

    for _ in range(transfer.d_steps):
        adversary = [p.detach().requires_grad_() for p in adversary]
        up = torch.autograd.grad(transfer.penalty * gap(*adversary, constant=True), adversary)
        adversary = [p + transfer.inner_lr * g for p, g in zip(adversary, up, strict=True)]
        apart = [p - c for p, c in zip(adversary, center, strict=True)]
        distance = math.sqrt(sum(float((a**2).sum().detach()) for a in apart))
        shrink = min(1.0, transfer.delta / distance)
        adversary = [c + shrink * a for c, a in zip(center, apart, strict=True)]
    value = gap(*(p.detach() for p in adversary), constant=False)
    signs = torch.zeros(len(found), len(domains)).double()
    for k, (high, low) in enumerate(found):
        signs[k, high], signs[k, low] = 1, -1
    return Losses(transfer.penalty * value, {"gap": value}, {"signs": signs})


@pytest.mark.parametrize(
    ("dropout", "options"),
    [
        (0.0, {}),
        (0.5, {"penalty": 0.3, "delta": 0.4, "d_steps": 5, "inner_lr": 3.0}),  # reaches the ball
        (0.0, {"penalty": 2.0, "delta": 3.0, "d_steps": 4, "inner_lr": 0.7}),
    ],
)
def test_transfer_is_its_two_losses(dropout: float, options: dict[str, Any]):
    network = make_network(dropout)
    transfer: Any = build_algorithm("Transfer", network, 3, **options).double()
    for step, (prepared, domains) in enumerate(steps(transfer)):
        plain = pooled(network, domains)
        assert_losses(transfer, transfer(prepared), Losses(plain), network)
        losses, expected = transfer(prepared, "gap"), gap_losses(transfer, domains, None)
        assert_losses(transfer, losses, expected, network.featurizer)
        assert losses.aux.keys() == {"signs"}
        assert torch.equal(losses.aux["signs"], expected.aux["signs"])
        move(network, step)
        pairs = list(permutations(range(3), 2))
        picks = [pairs[(step + 2 * k) % 6] for k in range(transfer.d_steps + 1)]
        expected = gap_losses(transfer, domains, picks)  # whatever the first pass chose
        again = transfer(prepared, "gap", expected.aux)
        assert_losses(transfer, again, expected, network.featurizer)
        assert_losses(transfer, transfer(prepared, "main", {}), Losses(pooled(network, domains)))
        transfer.commit(prepared, {"gap": losses})
        assert (losses.state, buffers(transfer)) == ({}, {})
    assert_predicts(transfer, lambda image: logits(network, image))


def test_transfer_makes_both_updates_with_one_optimizer():
    transfer = build_algorithm("Transfer", make_network(), 3)
    network, (main, gap) = transfer.network, transfer.objectives()
    assert ((main.name, main.optimizer), (gap.name, gap.optimizer)) == (
        ("main", None),
        ("gap", "main"),
    )
    assert {*main.parameters} == {*network.parameters()}
    assert {*gap.parameters} == {*network.featurizer.parameters()}
    assert all(o.active(step) for o in (main, gap) for step in range(5))
    prepared = transfer.prepare(make_batches())
    parameters = list(network.classifier.parameters())
    value = transfer(prepared, "gap").total
    assert torch.autograd.grad(value, parameters, allow_unused=True) == (None, None)
