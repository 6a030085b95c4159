"""Stages compile as whole graphs, and compiled steps equal eager ones."""

import pytest
import torch

from steppe.optim import FAD
from tests.devices import GPU
from tests.optim.problems import METHODS, PROBLEMS, sgd, train

FIRST_ORDER = ["fad", "sam", "asam", "gam", "gam-release"]


def both(name, compiled, steps=3):
    results = []
    for wrap in (lambda stage: stage, compiled):
        problem = PROBLEMS["mlp"]()
        opt = METHODS[name](sgd(problem.groups()), model=problem.model)
        visits = opt.visits

        def wrapped(coefficients, visits=visits, wrap=wrap):
            return tuple(type(v)(wrap(v.then), v.loss) for v in visits(coefficients))

        opt.visits = wrapped
        train(problem, opt, steps)
        results.append(problem.weights())
    return results


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_stages_are_whole_graphs(name):
    """Traced and functionalized without a break; the code generator has its own test below."""
    torch._dynamo.reset()
    eager, traced = both(name, lambda s: torch.compile(s, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(traced, eager, rtol=0, atol=1e-12)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), GPU])
def test_generated_code_equals_eager(device):
    torch._dynamo.reset()
    plain, compiled = (PROBLEMS["mlp"]().to(device) for _ in range(2))
    train(plain, METHODS["fad"](sgd(plain.groups())), 4)
    train(compiled, METHODS["fad"](sgd(compiled.groups()), compile=True), 4)
    torch.testing.assert_close(compiled.weights(), plain.weights(), rtol=0, atol=1e-12)


def test_a_compiled_model_trains_as_an_eager_one():
    """Replayed randomness and still buffers work on compiled code, the watch on autocast too."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        problem = PROBLEMS["conv-batchnorm"]()
        if compiled:
            problem.model.compile(backend="aot_eager")
        train(problem, FAD(sgd(problem.groups()), model=problem.model), 3)
        results.append(problem.weights())
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
