"""The fast optimizers against their equations, in float64, over 20 steps."""

import pytest
import torch

from tests.optim import reference
from tests.optim.problems import DIRECTED, METHODS, PROBLEMS, sgd

STEPS = 20


@pytest.mark.parametrize("problem_name", PROBLEMS)
@pytest.mark.parametrize("name", DIRECTED)
def test_agrees_with_the_equations(name, problem_name, device):
    method, problem = METHODS[name], PROBLEMS[problem_name]().to(device)
    opt = method(sgd(problem.groups(lr=0.03)), model=problem.model)
    lr = problem.per_weight(0.03, 0.1) if problem.split else 0.1
    start = expected = problem.weights()
    update = reference.SGD(lr, momentum=0.9, weight_decay=1e-2)
    memory = {"shapes": [p.shape for p in problem.model.parameters()]}
    for t in range(STEPS):
        torch.manual_seed(t)
        opt.step(problem.closure(opt))
        memory["momentum"] = update.v
        grad = lambda point, t=t: problem.gradient(point, seed=t)  # noqa: E731
        direction = method.direction(grad, expected, memory=memory)
        expected = update(expected, direction)
        torch.testing.assert_close(problem.weights(), expected, rtol=0, atol=1e-10)
    assert (expected - start).abs().max() > 0.01  # it went somewhere


PER_GROUP = [
    *("fad", "sam", "gam", "gsam", "sagm", "c-flat", "pgn"),
    *("f-sam", "vasso", "msam", "rwp"),
]


@pytest.mark.parametrize("name", PER_GROUP)
def test_hyper_parameters_per_group(name, device):
    method, problem = METHODS[name], PROBLEMS["mlp"]().to(device)
    override = {k: v * 0.5 for k, v in method.hyper.items()}
    opt = method(sgd(problem.groups(**override)), model=problem.model)
    vectors = {k: problem.per_weight(override[k], v) for k, v in method.hyper.items()}
    expected = problem.weights()
    update = reference.SGD(0.1, momentum=0.9, weight_decay=1e-2)
    memory = {"shapes": [p.shape for p in problem.model.parameters()]}
    for t in range(STEPS):
        torch.manual_seed(t)
        opt.step(problem.closure(opt))
        memory["momentum"] = update.v
        grad = lambda point, t=t: problem.gradient(point, seed=t)  # noqa: E731
        expected = update(expected, method.direction(grad, expected, memory=memory, **vectors))
        torch.testing.assert_close(problem.weights(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", METHODS)
def test_loss_is_that_of_the_unperturbed_weights(name):
    problem = PROBLEMS["mlp"]()
    opt = METHODS[name](sgd(problem.groups()), model=problem.model)
    before = problem.loss().item()
    assert opt.step(problem.closure(opt)).item() == before


@pytest.mark.parametrize("name", METHODS)
def test_batch_norm_sees_one_pass(name):
    """Running mean, variance and counter are those of a single pass at the unperturbed weights."""
    problem, plain = PROBLEMS["conv-batchnorm"](), PROBLEMS["conv-batchnorm"]()
    opt = METHODS[name](sgd(problem.groups()), model=problem.model)
    opt.step(problem.closure(opt))
    plain.loss()
    for (key, ours), theirs in zip(
        problem.model.named_buffers(), plain.model.buffers(), strict=True
    ):
        assert torch.equal(ours, theirs), key
