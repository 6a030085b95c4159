"""ASAM under its own name is SAM with ``adaptive=True``."""

import torch

from steppe.optim import ASAM, SAM, build_optimizer, search_space, vectors
from tests.optim.problems import mlp, sgd, train


def test_it_is_adaptive_sam_to_the_last_bit():
    weights = []
    for make in (
        lambda base: ASAM(base, rho=0.7, eta=0.02),
        lambda base: SAM(base, rho=0.7, adaptive=True, eta=0.02),
        lambda base: SAM(base, rho=0.7),
    ):
        problem = mlp()
        train(problem, make(sgd(problem.model.parameters())), steps=5)
        weights.append(torch.nn.utils.parameters_to_vector(problem.model.parameters()).detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])


def test_blocks_change_only_the_rounding_of_the_norm(monkeypatch):
    weights = []
    for size in (64, 2**20):
        monkeypatch.setattr(vectors, "CPU_BLOCK", size)
        problem = mlp()
        train(problem, ASAM(sgd(problem.model.parameters())), steps=5)
        weights.append(problem.weights())
    torch.testing.assert_close(*weights, rtol=1e-12, atol=0)


def test_by_name_it_has_its_own_radii():
    optimizer = build_optimizer("asam", [torch.zeros(1)])
    assert isinstance(optimizer, ASAM)
    assert optimizer.adaptive
    drawn = search_space("asam")["rho"]
    assert drawn.default > search_space("sam")["rho"].default
    assert drawn.distribution.contains(drawn.default)
