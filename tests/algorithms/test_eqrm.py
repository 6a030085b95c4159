"""EQRM: its quantile, whose gradient is not the one that DomainBed takes, and its burn-in."""

from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from steppe.algorithms import build_algorithm
from steppe.algorithms.algorithm import domain_risks
from steppe.algorithms.eqrm import kde_quantile
from tests.algorithms.oracles import gradients, make_batches, make_network, move

RISKS = {
    3: [0.2, 0.5, 0.9],
    2: [1.5, 0.1],
    6: [3.0, 0.31, 0.3, 0.29, 0.3, 0.8],
}
ALPHAS = (1e-6, 0.25, 0.5, 0.75, 0.99, 0.999999)


def bandwidth(risks: Tensor) -> Tensor:
    return 1.06 * risks.std() * len(risks) ** -0.2


def cdf(q: float, risks: Tensor) -> float:
    kernels = [NormalDist(r, bandwidth(risks).item()) for r in risks.tolist()]
    return sum(kernel.cdf(q) for kernel in kernels) / len(kernels)


@pytest.mark.parametrize("n", RISKS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_it_is_the_quantile_and_its_gradient_the_quantiles(n: int, alpha: float):
    risks = torch.tensor(RISKS[n], dtype=torch.float64, requires_grad=True)
    q = kde_quantile(risks, alpha)
    assert cdf(q.item(), risks.detach()) == pytest.approx(alpha, rel=1e-9)
    torch.testing.assert_close(kde_quantile(risks.float(), alpha).double(), q, rtol=1e-6, atol=0)
    # Against central differences, of the value and of the gradient: some optimizers need both.
    assert torch.autograd.gradcheck(lambda x: kde_quantile(x, alpha), risks, rtol=1e-6)
    assert torch.autograd.gradgradcheck(lambda x: kde_quantile(x, alpha), risks, rtol=1e-6)


def bisection(risks: Tensor, alpha: float) -> Tensor:
    """As DomainBed differentiates it: the middles depend on the ends, the comparisons on nothing.

    Its bandwidth is Scott's rule; the ends are quantiles of the outermost kernels.
    """
    reach = bandwidth(risks) * NormalDist().inv_cdf(alpha)
    low, high = risks.min() + reach, risks.max() + reach
    for _ in range(32):
        middle = (low + high) / 2
        if cdf(middle.item(), risks.detach()) > alpha:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def test_domainbed_takes_another_gradient_of_the_same_quantile():
    risks = torch.tensor(RISKS[3], dtype=torch.float64, requires_grad=True)
    ours, theirs = kde_quantile(risks, 0.75), bisection(risks, 0.75)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)
    found = [torch.autograd.grad(q, risks)[0].tolist() for q in (ours, theirs)]
    assert [[round(w, 2) for w in weights] for weights in found] == [
        [-0.08, 0.32, 0.76],
        [0.12, -0.03, 0.91],
    ]
    assert [sum(weights) for weights in found] == pytest.approx([1, 1])


def test_equal_risks_weigh_the_same():
    risks = torch.full((3,), 0.7, dtype=torch.float64, requires_grad=True)
    q = kde_quantile(risks, 0.9)
    torch.testing.assert_close(q.item(), 0.7, rtol=1e-7, atol=0)
    (weights,) = torch.autograd.grad(q, risks)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3), rtol=1e-6, atol=0)


def test_after_burn_in_the_quantile_replaces_the_mean():
    algorithm = build_algorithm("EQRM", make_network(), 3, burn_in_steps=2, quantile=0.8).double()
    for step in range(4):
        prepared = algorithm.prepare(make_batches(seed=step))
        losses = algorithm(prepared)
        risks = domain_risks(algorithm.network(prepared.images), prepared)
        expected = risks.mean() if step < 2 else kde_quantile(risks, 0.8)
        assert torch.equal(losses.total, expected)
        for ours, theirs in zip(
            gradients(losses.total, algorithm), gradients(expected, algorithm), strict=True
        ):
            assert torch.equal(ours, theirs)
        algorithm.commit(prepared, {"main": losses})
        move(algorithm, step)


def test_burn_in_ends_with_a_reset_and_a_lower_learning_rate():
    algorithm = build_algorithm("EQRM", make_network(), 3, burn_in_steps=2)
    (objective,) = algorithm.objectives()
    assert [step for step in range(9) if objective.reset(step)] == [2]
    assert objective.lr_steps == {2: 0.02}
