"""`passes`: the loop over micro-batches inside every phase, for loops that accumulate."""

import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader

from steppe.optim import FAD
from tests.optim.problems import EVERY, PROBLEMS, named, sgd, train

every_method = pytest.mark.parametrize("name", [name for name in EVERY if name != "sam-on"])
MICRO = 4


def setup(name, problem_name="mlp"):
    problem = PROBLEMS[problem_name]()
    return problem, EVERY[name](sgd(problem.groups()), model=problem.model)


def micro_batches(problem):
    return list(zip(problem.x.chunk(MICRO), problem.y.chunk(MICRO), strict=True))


def accumulate(problem, opt, batches, scale=lambda loss: loss, scaler=None):
    """What a loop runs before its step; returns the phase that each backward was in."""
    places = []
    for phase, (x, y) in opt.passes(batches, scaler):
        each = nn.functional.cross_entropy(problem.model(x), y, reduction="none")
        loss = named(each, phase.loss) / MICRO
        scale(loss).backward(create_graph=opt.needs_graph)
        places.append(phase.index)
    return places


def whole_steps(problem, opt, steps):
    def closure(name="main"):
        each = nn.functional.cross_entropy(problem.model(problem.x), problem.y, reduction="none")
        named(each, name).backward(create_graph=opt.needs_graph)
        return each.mean()

    for _ in range(steps):
        opt.step(closure)


@every_method
def test_passes_are_a_step_over_the_joint_batch(name):
    (problem, opt), (parts, opt2) = setup(name), setup(name)
    whole_steps(problem, opt, 3)
    for t in range(3):
        places = accumulate(parts, opt2, micro_batches(parts))
        assert places == [i for i in range(EVERY[name].passes_at(t)) for _ in range(MICRO)]
        opt2.step()
    torch.testing.assert_close(parts.weights(), problem.weights(), rtol=0, atol=1e-12)


def test_an_iterator_gives_its_batches_to_every_pass():
    (problem, opt), (parts, opt2) = setup("fad"), setup("fad")
    train(problem, opt, 2)
    stream = iter(2 * micro_batches(parts))
    for _ in range(2):
        accumulate(parts, opt2, islice(stream, MICRO))
        opt2.step()
    assert not list(stream)
    torch.testing.assert_close(parts.weights(), problem.weights(), rtol=0, atol=1e-12)


def test_a_step_without_data_is_refused():
    problem, opt = setup("fad")
    with pytest.raises(ValueError, match="at least one micro-batch"):
        accumulate(problem, opt, [])


@pytest.mark.parametrize("n", [1, MICRO])
def test_a_phase_is_already_entered(n):
    problem, opt = setup("fad")
    before = problem.weights()
    with pytest.raises(RuntimeError, match="Inside opt.passes, do not write 'with phase:'"):
        for phase, (x, y) in opt.passes(micro_batches(problem)[:n]):
            with phase:
                nn.functional.cross_entropy(problem.model(x), y).backward()
    assert torch.equal(problem.weights(), before)


@pytest.mark.parametrize("how", ["break", "exception"])
@pytest.mark.parametrize("stop_at", range(0, 4 * MICRO, 3))
def test_leaving_early_restores_the_weights(how, stop_at):
    (problem, opt), (other, opt2) = setup("fad"), setup("fad")
    before = problem.weights()

    def loop():
        for number, (phase, (x, y)) in enumerate(opt.passes(micro_batches(problem))):
            assert torch.equal(problem.weights(), before) == (phase.index == 0)
            (nn.functional.cross_entropy(problem.model(x), y) / MICRO).backward()
            if number == stop_at:
                if how == "exception":
                    raise KeyError
                break

    if how == "exception":
        with pytest.raises(KeyError):
            loop()
    else:
        loop()
    assert torch.equal(problem.weights(), before)
    with pytest.raises(RuntimeError, match="closure"):
        opt.step()
    train(problem, opt, 2)
    train(other, opt2, 2)
    assert torch.equal(problem.weights(), other.weights())


@every_method
def test_a_scaler_by_hand(name):
    """The code of torch's AMP examples after the passes; the loss scale cancels."""
    (problem, opt), (scaled, opt2) = setup(name), setup(name)
    opt.max_norm = 0.05
    whole_steps(problem, opt, 3)
    scaler = GradScaler("cpu", init_scale=2.0**12)
    for _ in range(3):
        accumulate(scaled, opt2, micro_batches(scaled), scaler.scale, scaler)
        scaler.unscale_(opt2)
        nn.utils.clip_grad_norm_(scaled.model.parameters(), 0.05)
        scaler.step(opt2)
        scaler.update()
    torch.testing.assert_close(scaled.weights(), problem.weights(), rtol=0, atol=1e-12)


def test_batch_norm_counts_each_micro_batch_once():
    problem, opt = setup("fad", "conv-batchnorm")
    accumulate(problem, opt, micro_batches(problem))
    opt.step()
    assert problem.model[1].num_batches_tracked == MICRO


# What docs/guide/loops.md says of loops that fetch inside the passes.


def fetched_inside(fetch):
    """The batches that one step of one micro-batch fetches, and the one that comes next."""
    w = nn.Parameter(torch.ones(()))
    opt = FAD(sgd([w]))
    seen = []
    for _ in opt.passes([None]):
        seen.append(fetch())
        (w**2).backward()
    return [batch.tolist() for batch in seen], fetch().tolist()


def test_an_iterator_fetched_inside_moves_on_with_every_pass():
    torch.manual_seed(0)
    loader = iter(DataLoader(torch.arange(40), batch_size=4, shuffle=True))
    seen, after = fetched_inside(lambda: next(loader))
    assert len({*map(tuple, [*seen, after])}) == 5


def test_draws_from_the_global_generator_are_the_same_in_every_pass():
    torch.manual_seed(0)
    expected = [torch.randint(1000, (4,)).tolist() for _ in range(2)]
    torch.manual_seed(0)
    seen, after = fetched_inside(lambda: torch.randint(1000, (4,)))
    assert seen == 4 * expected[:1]
    assert after == expected[1]


def test_a_prefetch_inside_the_passes_gives_the_first_pass_other_data():
    """nanoGPT's order: the batch of a forward was fetched after the forward before it."""
    torch.manual_seed(0)
    left, first, second = (torch.randint(1000, (4,)).tolist() for _ in range(3))
    torch.manual_seed(0)
    w = nn.Parameter(torch.ones(()))
    opt, used = FAD(sgd([w])), []
    batch = torch.randint(1000, (4,)).tolist()
    for _ in opt.passes(range(2)):
        used.append(batch)
        batch = torch.randint(1000, (4,)).tolist()
        (w**2).backward()
    assert used == [left, first] + 3 * [second, first]


def test_the_changes_to_other_peoples_loops_are_small():
    page = (Path(__file__).parents[2] / "docs" / "guide" / "loops.md").read_text()
    changes = re.findall(r"^``` ?diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(changes) == 2
    for change in changes:
        assert 0 < len(re.findall(r"^\+", change, re.MULTILINE)) <= 12
