"""Stages compile as whole graphs, and compiled steps equal eager ones."""

import pytest
import torch
from torch import nn

from steppe.optim import FAD
from tests.devices import GPU
from tests.optim.problems import METHODS, PROBLEMS, sgd, train

FIRST_ORDER = [name for name in METHODS if name != "gam-exact" and not METHODS[name].make.draws]


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
    """Replayed randomness and still buffers work on compiled code."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        problem = PROBLEMS["conv-batchnorm"]()
        if compiled:
            problem.model.compile(backend="aot_eager")
        train(problem, FAD(sgd(problem.groups()), model=problem.model), 3)
        results.append(problem.weights())
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own look
@pytest.mark.parametrize("api", ["closure", "phases"])
@pytest.mark.parametrize("name", ["fad", "sam", "gam-release"])
def test_a_training_step_compiled_as_a_whole_equals_an_eager_one(name, api):
    """Again and again, and with a last batch of another size."""
    torch._dynamo.reset()
    pytest.importorskip("lightning.pytorch")  # a loaded framework is looked for on the call stack
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        opt = METHODS[name](sgd(model.parameters()), model=model)

        def train_step(x, y, model=model, opt=opt):
            def closure():
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            if api == "closure":
                return opt.step(closure)
            for phase in opt.phases():
                with phase:
                    loss = closure()
                    if phase.index == 0:
                        first = loss.detach()
            opt.step()
            return first

        step = torch.compile(train_step, backend="aot_eager") if compiled else train_step
        sizes = (32, 32, 32, 17)
        losses = [step(torch.randn(n, 6), torch.randint(3, (n,))) for n in sizes]
        results.append((torch.stack(losses), *map(torch.clone, model.state_dict().values())))
    for eager, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, eager)
    assert model[1].num_batches_tracked == len(sizes)


def test_a_compiled_model_stays_compiled_inside_a_step():
    torch._dynamo.reset()
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    model = nn.Linear(3, 1)
    compiled = torch.compile(model, backend=backend)
    opt = FAD(sgd(model.parameters()), model=model)

    def closure():
        loss = compiled(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
    assert len(traced) == 1
