"""IGA: its penalty differentiates gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from steppe.algorithms import ERM, Algorithm, Prepared, build_algorithm
from steppe.algorithms.iga import _ElementaryNorm
from tests.algorithms.oracles import gradients, make_batches, make_network, move

PENALTY = 0.7


def built(**options: float) -> tuple[Algorithm, Prepared]:
    network = make_network(dropout=0.5)
    algorithm = build_algorithm("IGA", network, 3, **{"penalty": PENALTY, **options}).double()
    torch.manual_seed(1)
    return algorithm, algorithm.prepare(make_batches())


def by_definition(algorithm: Algorithm, prepared: Prepared, constant: bool) -> Tensor:
    """With the mean gradient as a constant, as DomainBed has it, or not."""
    risks, rows = [], []
    for domain in range(3):
        own = prepared.only(domain)
        risks.append(F.cross_entropy(algorithm.network(own.images, own.keep), own.labels))
        parts = torch.autograd.grad(risks[-1], list(algorithm.parameters()), create_graph=True)
        rows.append(torch.cat([part.flatten() for part in parts]))
    middle = torch.stack(rows).mean(0)
    middle = middle.detach() if constant else middle
    return sum(risks) / 3 + PENALTY * sum(((row - middle) ** 2).sum() for row in rows)


@pytest.mark.parametrize("constant", [False, True])
def test_a_constant_mean_gradient_changes_nothing(constant: bool):
    algorithm, prepared = built()
    found, expected = algorithm(prepared).total, by_definition(algorithm, prepared, constant)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for a, b in zip(gradients(found, algorithm), gradients(expected, algorithm), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)


def test_its_gradient_is_that_of_its_value():
    """Central differences along a random direction, whose error is about 1e-5 ** 2."""
    algorithm, prepared = built()
    slopes = gradients(algorithm(prepared).parts["penalty"], algorithm)
    before = [p.detach().clone() for p in algorithm.parameters()]
    move(algorithm, seed=3)
    direction = [p.detach() - b for p, b in zip(algorithm.parameters(), before, strict=True)]
    sides = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            for p, b, d in zip(algorithm.parameters(), before, direction, strict=True):
                p.copy_(b + step * d)
        sides.append(algorithm(prepared).parts["penalty"])
    expected = sum((s * d).sum() for s, d in zip(slopes, direction, strict=True))
    torch.testing.assert_close((sides[0] - sides[1]) / 2e-5, expected, rtol=1e-7, atol=0)


def test_equal_domains_are_erm():
    algorithm = build_algorithm("IGA", make_network(), 3).double()
    prepared = algorithm.prepare([make_batches()[0]] * 3)
    found, expected = algorithm(prepared), ERM(algorithm.network, 3)(prepared).total
    assert found.parts["penalty"] < 1e-28
    for a, b in zip(gradients(found.total, algorithm), gradients(expected, algorithm), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_batch_norm_of_elementary_operations(training: bool, dtype: torch.dtype):
    """Values, gradients and running statistics are torch's, and a third derivative exists."""
    torch.manual_seed(0)
    tolerance = {torch.float64: 1e-12, torch.float16: 2e-3}[dtype]
    norms = [torch.nn.BatchNorm2d(3).double().train(training) for _ in range(2)]
    for norm in norms:
        torch.nn.init.constant_(norm.weight, 1.5)
        norm.running_mean.fill_(0.3)
        norm.to(torch.float32 if dtype == torch.float16 else dtype)
    x = (3 + torch.randn(4, 3, 2, 2)).to(dtype)
    inputs = [x.clone().requires_grad_() for _ in norms]
    expected = norms[0](inputs[0])
    with _ElementaryNorm():
        found = norms[1](inputs[1])
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(norms[0].running_var, norms[1].running_var)
    for output in (expected, found):
        output.pow(3).mean().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=10 * tolerance, atol=tolerance)
    if dtype == torch.float64:
        with _ElementaryNorm():
            slope = norms[1](inputs[1]).pow(3).sum()
        for _ in range(2):
            (slope,) = torch.autograd.grad(slope, inputs[1], create_graph=True)
            slope = slope.square().sum()
        assert torch.autograd.grad(slope, inputs[1])[0].isfinite().all()
