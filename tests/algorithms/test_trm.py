"""TRM: heads that follow the features, the inverse of their Hessian, and the domains' weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.algorithms import Prepared, build_algorithm, trm
from steppe.algorithms.heads import Task
from tests.algorithms.oracles import make_batches, make_network, move

SIZES = (60, 70, 80)


def make(anneal_steps: int = 0, **options: Any) -> tuple[Any, Prepared]:
    network = make_network(n_classes=3)
    built = build_algorithm("TRM", network, 3, anneal_steps=anneal_steps, **options).double()
    batches = [batch._replace(labels=batch.labels % 3) for batch in make_batches(SIZES)]
    return built, built.prepare(batches)


def task_of(algorithm: Any, prepared: Prepared) -> Task:
    return Task.of(algorithm.network.features(prepared.images), prepared)


def risk_of(head: Tensor, task: Task, rows: slice) -> Tensor:
    return F.cross_entropy(task.inputs[rows] @ head.T, task.labels[rows])


def rows_of(domain: int) -> slice:
    return slice(sum(SIZES[:domain]), sum(SIZES[: domain + 1]))


def test_the_first_steps_are_erms() -> None:
    algorithm, prepared = make(anneal_steps=1)
    erm = build_algorithm("ERM", algorithm.network, 3)
    before = {name: value.clone() for name, value in algorithm.state_dict().items()}
    for step in range(2):
        losses = algorithm(prepared)
        assert torch.equal(losses.total, erm(prepared).total) == (step == 0)
        algorithm.commit(prepared, {"main": losses})
        for name in ("heads", "alpha"):
            assert torch.equal(algorithm.state_dict()[name], before[name]) == (step == 0)


def test_heads_take_30_gradient_steps_and_stay_where_they_are() -> None:
    algorithm, prepared = make()
    x = algorithm.network.features(prepared.images).detach()
    heads = []
    for number, kept in enumerate(algorithm.heads):
        rows = rows_of(number)
        weight, bias = (part.clone().requires_grad_() for part in (kept[:, :-1], kept[:, -1]))
        for _ in range(30):
            risk = F.cross_entropy(F.linear(x[rows], weight, bias), prepared.labels[rows])
            slopes = torch.autograd.grad(risk, (weight, bias))
            with torch.no_grad():
                weight -= 0.1 * slopes[0]
                bias -= 0.1 * slopes[1]
        heads.append(torch.cat([weight, bias[:, None]], 1).detach())
    algorithm.commit(prepared, {"main": algorithm(prepared)})
    torch.testing.assert_close(algorithm.heads, torch.stack(heads), rtol=1e-10, atol=1e-12)
    assert {"heads", "alpha", "steps"} <= algorithm.state_dict().keys()


def test_weights_follow_the_risks_and_not_their_products_with_the_weights() -> None:
    algorithm, prepared = make(eta=0.5)
    algorithm.alpha.copy_(torch.tensor([[0, 0.9, 0.1], [0.5, 0, 0.5], [0.2, 0.8, 0]]))
    before = algorithm.alpha.clone()
    algorithm.commit(prepared, {"main": algorithm(prepared)})
    risks = task_of(algorithm, prepared).risks(algorithm.heads).detach()

    def normalized(weights: Tensor) -> Tensor:
        return weights / weights.sum(1, keepdim=True)

    expected = normalized(before * (0.5 * risks).exp())
    torch.testing.assert_close(algorithm.alpha, expected, rtol=1e-12, atol=0)
    domainbeds = normalized(before * (0.5 * before * risks).exp())
    assert (domainbeds - expected).abs().max() > 0.01


def series(prepared: Prepared, algorithm: Any, number: int) -> tuple[Tensor, Tensor]:
    """The sum of (I - H)^k v, and what DomainBed makes of it, with matrices."""
    task = task_of(algorithm, prepared).frozen()
    head, weights = algorithm.heads[number], algorithm.alpha[number]

    def in_others(h: Tensor) -> Tensor:
        return torch.stack([weights[d] * risk_of(h, task, rows_of(d)) for d in range(3)]).sum()

    def in_own(h: Tensor) -> Tensor:
        return risk_of(h, task, rows_of(number))

    hessian = torch.autograd.functional.hessian(in_own, head)
    total = power = v = torch.autograd.functional.jacobian(in_others, head).flatten()
    contraction = torch.eye(len(v), dtype=v.dtype) - hessian.view(len(v), len(v))
    for _ in range(10):
        power = contraction @ power
        total = total + power
    overwritten = total - v + contraction @ v
    return total.view_as(head), overwritten.view_as(head)


def test_the_series_has_its_first_term() -> None:
    algorithm, prepared = make()
    task = task_of(algorithm, prepared).frozen()
    found, terms = algorithm._solve(task, algorithm.heads, None)
    assert terms.tolist() == [10, 10, 10]
    for number in range(3):
        expected, domainbeds = series(prepared, algorithm, number)
        torch.testing.assert_close(found[number], expected, rtol=1e-10, atol=1e-13)
        assert (domainbeds - expected).norm() > 0.02 * expected.norm()


def test_a_series_that_diverges_ends_where_the_first_pass_ended_it() -> None:
    algorithm, prepared = make()
    with torch.no_grad():
        algorithm.network.featurizer[1].weight.mul_(100)
    algorithm.network.featurizer[2] = nn.Identity()  # unbounded: eigenvalues far above 2
    first = algorithm(prepared)
    assert (first.aux["terms"] < 10).all()
    assert first.total.isfinite()
    task = task_of(algorithm, prepared).frozen()
    follow, _ = algorithm._solve(task, algorithm.heads, torch.zeros(3, dtype=torch.int64))
    v = task.slopes(algorithm.heads, algorithm.alpha @ task.means)
    assert torch.equal(follow, v)


def test_the_gradient_is_that_of_the_risk_of_optimal_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """At penalty 1, with heads and series that converge: against differences of the features."""
    monkeypatch.setattr(trm, "_STEPS", 600)
    monkeypatch.setattr(trm, "_TERMS", 600)
    monkeypatch.setattr(trm, "_LIMIT", 1e9)
    algorithm, prepared = make(penalty=1.0, inner_lr=1.0)
    generator = torch.Generator().manual_seed(1)
    weight = algorithm.network.featurizer[1].weight
    with torch.no_grad():
        weight.mul_(4)  # spreads the features, so that everything converges fast
    direction = torch.randn(weight.shape, dtype=weight.dtype, generator=generator)
    algorithm(prepared).parts["transfer"].backward()
    found = (weight.grad * direction).sum()

    def transfer_risk(move: float) -> Tensor:
        with torch.no_grad():
            kept = weight.clone()
            weight.add_(move * direction)
            algorithm.penalty = 0.0
            value = algorithm(prepared).parts["transfer"]
            weight.copy_(kept)
        return value

    expected = (transfer_risk(1e-5) - transfer_risk(-1e-5)) / 2e-5
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    algorithm.penalty, weight.grad = 0.0, None
    algorithm(prepared).parts["transfer"].backward()
    assert abs((weight.grad * direction).sum() - expected) > 0.05 * abs(expected)


def test_heads_are_trained_again_in_every_pass() -> None:
    algorithm, prepared = make()
    first = algorithm(prepared)
    move(algorithm.network, 1)
    later = algorithm(prepared, first=first.aux)
    assert not torch.equal(later.state["heads"], first.state["heads"])
