"""Averages against plain means of stored weights, and the contract that trainers rely on."""

import copy
import random
import weakref

import pytest
import torch
from scipy.stats import beta as beta_distribution
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from steppe.averaging import BMA, SMA, SWAD, NoAveraging
from steppe.averaging.valley import VALLEYS
from steppe.errors import UserError
from steppe.training import tree
from tests.averaging.oracles import ORACLES


def network():
    """A frozen layer, a frozen batch norm and one that is not, weights in channels-last order."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 2), nn.BatchNorm2d(5), nn.Flatten(),
        nn.Linear(5, 2), nn.Linear(2, 2),
    ).double().to(memory_format=torch.channels_last)  # fmt: skip
    model[1].eval()
    model[-1].requires_grad_(False)
    return model


PARAMETERS = {
    "0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias",
    "5.weight", "5.bias",
}  # fmt: skip
STATISTICS = {"3.running_mean", "3.running_var"}


def move(model, step):
    """Stands in for an optimizer step: everything that may move does, in place."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            if x.is_floating_point():
                x.copy_(torch.randn(x.shape, dtype=torch.float64, generator=generator))
            else:
                x += 1


def weights(model):
    """A copy of everything, by name."""
    return copy.deepcopy(dict(model.state_dict()))


def mean(iterates, names):
    """The obvious formula."""
    return {name: sum(iterate[name] for iterate in iterates) / len(iterates) for name in names}


def assert_serves(averaging, model, expected):
    """The average is in the module inside `applied`, everything else stays, and it comes back."""
    before = weights(model)
    with averaging.applied():
        inside = weights(model)
    for name, value in before.items():
        torch.testing.assert_close(inside[name], expected.get(name, value), rtol=0, atol=1e-13)
        assert torch.equal(model.state_dict()[name], value)
    assert set(averaging.state_dict()["served"]) == set(expected)


@pytest.mark.parametrize("start", [0, 1, 2, 5, 100])
def test_sma_is_the_mean_from_its_start(start):
    model = network()
    averaging = SMA(model, start)
    assert not averaging.serving
    iterates = []
    for t in range(1, 10):
        move(model, t)
        iterates.append(weights(model))
        averaging.update()
        assert averaging.serving
        # Iterate t is at t - 1; before the start, the last iterate is all there is.
        first = min(t, max(start, 1))
        expected = mean(iterates[first - 1 :], PARAMETERS | STATISTICS)
        assert_serves(averaging, model, expected)
    assert not averaging.due(0, last=True)
    assert not averaging.finished
    assert not averaging.needs_statistics


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.5])
def test_bma_weighs_every_iterate_by_a_beta_distribution(beta):
    model, steps = network(), 7
    averaging = BMA(model, beta, steps=steps)
    iterates = [weights(model)]
    assert_serves(averaging, model, mean(iterates, PARAMETERS | STATISTICS))
    density = beta_distribution(beta, beta).pdf
    for t in range(1, steps + 1):
        move(model, t)
        iterates.append(weights(model))
        averaging.update()
        a = [density((i + 0.5) / (steps + 1)) for i in range(t + 1)]
        expected = {
            name: sum(w * x[name] for w, x in zip(a, iterates, strict=True)) / sum(a)
            for name in PARAMETERS | STATISTICS
        }
        assert_serves(averaging, model, expected)
    with pytest.raises(RuntimeError, match="more than steps=7 times"):
        averaging.update()
    with pytest.raises(UserError, match="pass steps="):
        BMA(model)


def curve(seed):
    """A random curve of validation losses: down, along, up."""
    rng = random.Random(seed)
    parts = [rng.randint(0, 6), rng.randint(1, 8), rng.randint(0, 9)]
    levels = [3 - 0.3 * i for i in range(parts[0])] + [1.0] * parts[1] + [1.5] * parts[2]
    return [level + rng.uniform(-0.2, 0.2) for level in levels]


def train(averaging, model, losses, every, steps, first=0, early_stop=True):
    """Yields each step twice, before and after its look, the way a trainer would go on."""
    looks = [step for step in range(steps) if step % every == 0 or step == steps - 1]
    for step in range(first, steps):
        if averaging.finished and early_stop:
            return
        move(model, step)
        averaging.update()
        yield step, False
        if averaging.due(step, step == steps - 1):
            averaging.observe(step, losses[looks.index(step)])
        yield step, True


def case(seed):
    losses, rng = curve(seed), random.Random(-seed - 1)
    every = rng.randint(1, 4)
    # The last step is a look of its own, unless it falls on one anyway.
    steps = (len(losses) - 1) * every + (1 if len(losses) < 2 else rng.randint(2 - every, 1))
    n_s, n_e = (3, 6) if seed % 2 else (rng.randint(1, 4), rng.randint(1, 5))
    return losses, every, steps, n_s, n_e


@pytest.mark.parametrize("counting", VALLEYS)
def test_swad_is_the_mean_of_its_segments(counting):
    deaths = 0
    for seed in range(60):
        losses, every, steps, n_s, n_e = case(seed)
        model = network()
        averaging = SWAD(model, every, n_s, n_e, 0.3, counting)
        segments = [[]]
        early_stop = bool(seed % 3)  # where it goes on, nothing changes any more
        for step, looked in train(averaging, model, losses, every, steps, early_stop=early_stop):
            assert not averaging.serving
            assert averaging.state_dict()["served"] is None
            if not looked:
                segments[-1].append(weights(model))
            elif step % every == 0:
                segments.append([])
        chosen, dead_at = ORACLES[counting](losses, n_s, n_e, 0.3)
        assert averaging.finished == (dead_at is not None)
        deaths += averaging.finished
        averaging.finish()
        assert averaging.serving
        if counting == "paper":
            expected = mean([w for number in chosen for w in segments[number]], PARAMETERS)
        else:
            expected = mean([mean(segments[number], PARAMETERS) for number in chosen], PARAMETERS)
        assert_serves(averaging, model, expected)
    assert 5 < deaths < 55


@pytest.mark.parametrize("counting", VALLEYS)
def test_swad_before_its_first_look(counting):
    """Nothing to serve without an update; one segment, should training end without a look."""
    model = network()
    averaging = SWAD(model, counting=counting)
    averaging.finish()
    assert not averaging.serving
    assert averaging.state_dict()["served"] is None
    averaging = SWAD(model, counting=counting)
    iterates = []
    for step in range(3):
        move(model, step)
        iterates.append(weights(model))
        averaging.update()
    averaging.finish()
    averaging.finish()
    assert_serves(averaging, model, mean(iterates, PARAMETERS))


def test_swad_refuses_what_makes_no_sense():
    averaging = SWAD(network())
    with pytest.raises(RuntimeError, match="at step 7 without an update"):
        averaging.observe(7, 1.0)
    averaging.update()
    averaging.finish()
    with pytest.raises(RuntimeError, match="update.. after finish"):
        averaging.update()


def test_no_averaging_never_serves():
    model = network()
    averaging = NoAveraging(model)
    averaging.update()
    averaging.finish()
    assert not averaging.tensors
    assert not averaging.serving
    assert not averaging.due(0, last=True)
    assert averaging.state_dict() == {"served": None}
    averaging.load_state_dict({"served": None})
    before = model[0].weight.data_ptr()
    with averaging.applied():
        assert model[0].weight.data_ptr() == before


BUILT = {
    "sma": lambda model: SMA(model, start=4),
    "bma": lambda model: BMA(model, steps=100),
    "swad, reference": lambda model: SWAD(model, every=2),
    "swad, paper": lambda model: SWAD(model, every=2, counting="paper"),
    "swad, reference, one length": lambda model: SWAD(model, 2, n_converge=3, n_tolerance=3),
}


def saved(averaging):
    """The state after a trip through a checkpoint's files."""
    tensors = {}
    node = tree.to_json(averaging.state_dict(), tensors)
    return tree.from_json(node, tensors)


@pytest.mark.parametrize("losses", [
    (3.0, 2.0, 1.2, 1.1, 1.0, 1.1, 1.1, 1.0, 1.1, 2.0, 1.0, 2.0),
    (1.2, 1.0, 1.1, 1.1, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0),
    (9.0, 8.0, 7.0, 6.0, 5.0, 4.5, 4.0, 3.5, 3.0, 2.5, 2.0, 1.5),
], ids=["valley", "dead", "never"])  # fmt: skip
@pytest.mark.parametrize("name", BUILT)
def test_resuming_at_any_point_gives_the_same_bits(name, losses):
    steps = 22  # a look at 0, 2, ..., 20 and at 21
    model = network()
    averaging = BUILT[name](model)
    states = [(0, saved(averaging), weights(model))]
    for step, looked in train(averaging, model, losses, 2, steps):
        if looked:
            states.append((step + 1, saved(averaging), weights(model)))
        else:
            before_look = saved(averaging)  # resumed here, the look comes first
            other = BUILT[name](copy.deepcopy(model))
            other.load_state_dict(before_look)
            assert same(other.state_dict(), averaging.state_dict())
    averaging.finish()
    expected = averaging.state_dict()
    assert expected["served"] is not None
    for done, state, live in states:
        other_model = network()
        other_model.load_state_dict(live)
        other = BUILT[name](other_model)
        other.load_state_dict(state)
        assert same(other.state_dict(), state)
        for _ in train(other, other_model, losses, 2, steps, first=done):
            pass
        assert other.finished == averaging.finished
        other.finish()
        assert same(other.state_dict(), expected)

    # After the end: predictions are all that is left.
    last = BUILT[name](copy.deepcopy(model))
    last.load_state_dict(saved(averaging))
    assert last.serving
    assert same(last.state_dict(), expected)
    last.finish()
    assert same(last.state_dict(), expected)


def same(a, b):
    """Equal structures, equal bits, equal layouts."""
    leaves, shape = tree_flatten(a)
    others, other_shape = tree_flatten(b)
    return shape == other_shape and all(
        torch.equal(x, y) and x.stride() == y.stride() if torch.is_tensor(x) else x == y
        for x, y in zip(leaves, others, strict=True)
    )


def test_a_loaded_state_is_a_copy():
    model = network()
    averaging, other = SMA(model, 0), SMA(model, 0)
    averaging.update()
    other.load_state_dict(averaging.state_dict())
    kept = copy.deepcopy(averaging.state_dict())
    move(model, 1)
    other.update()
    assert same(averaging.state_dict(), kept)


@pytest.mark.parametrize("name", ["sma", "swad, reference"])
def test_the_state_of_another_model_is_refused(name):
    averaging = BUILT[name](network())
    averaging.update()
    state = averaging.state_dict()
    wider = network()
    wider[5] = nn.Linear(5, 3).double()
    with pytest.raises(UserError, match=r"5.weight it has \(2, 5\), but the model has \(3, 5\)"):
        BUILT[name](wider).load_state_dict(state)
    thawed = network().requires_grad_(True)
    with pytest.raises(UserError, match="6.weight it has nothing"):
        BUILT[name](thawed).load_state_dict(state)
    frozen = network()
    frozen[0].requires_grad_(False)
    with pytest.raises(UserError, match="0.weight is not averaged here"):
        BUILT[name](frozen).load_state_dict(state)


def serving(model):
    averaging = SMA(model, 0)
    for step in range(3):
        move(model, step)
        averaging.update()
    return averaging


def pointers(model):
    return [x.data_ptr() for x in (*model.parameters(), *model.buffers())]


def test_applied_exchanges_memory_and_puts_it_back():
    model = network()
    averaging = serving(model)
    before, served = pointers(model), averaging.state_dict()["served"]
    theirs = {name: x.data_ptr() for name, x in served.items()}
    with averaging.applied():
        inside = dict((*model.named_parameters(), *model.named_buffers()))
        assert {name: inside[name].data_ptr() for name in theirs} == theirs
        within = pointers(model)
        with averaging.applied():
            assert pointers(model) == within
        assert pointers(model) == within  # leaving the inner one does not swap either
    assert pointers(model) == before
    with pytest.raises(ZeroDivisionError), averaging.applied():
        assert pointers(model) == within
        1 / 0  # noqa: B018
    assert pointers(model) == before
    with averaging.applied():
        assert pointers(model) == within


@pytest.mark.parametrize("call", [
    lambda a, state: a.update(),
    lambda a, state: a.state_dict(),
    lambda a, state: a.load_state_dict(state),
], ids=["update", "state_dict", "load_state_dict"])  # fmt: skip
def test_inside_applied_the_average_cannot_change(call):
    model = network()
    swad = SWAD(model)
    swad.update()
    swad.finish()
    for averaging in (serving(model), swad):
        state = averaging.state_dict()
        with averaging.applied(), pytest.raises(RuntimeError, match="leave the context"):
            call(averaging, state)


def test_training_goes_on_after_applied():
    """The optimizer's parameters are the module's, before, inside and after."""
    models = [network(), network()]
    averages = [SMA(model, 0) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    for _ in range(4):
        for model, averaging, optimizer in zip(models, averages, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            averaging.update()
        with averages[0].applied(), torch.no_grad():
            models[0].eval()(x)
        models[0].train()
        models[0][1].eval()
    assert same(weights(models[0]), weights(models[1]))
    assert same(averages[0].state_dict(), averages[1].state_dict())


def test_layouts_are_kept():
    model = network()
    averaging = serving(model)
    assert not model[0].weight.is_contiguous()
    average = averaging.state_dict()["served"]["0.weight"]
    assert average.stride() == model[0].weight.stride()
    other = SMA(model, 0)
    state = averaging.state_dict()
    state["served"] = {name: x.contiguous() for name, x in state["served"].items()}
    other.load_state_dict(state)
    assert other.state_dict()["served"]["0.weight"].stride() == model[0].weight.stride()


def test_mixed_types():
    model = nn.ModuleList(nn.Linear(3, 2, dtype=t) for t in (torch.float32, torch.float64))
    model.append(nn.Linear(3, 2, dtype=torch.bfloat16))
    averaging, iterates = SMA(model, 0), []
    for step in range(4):
        move(model, step)
        iterates.append(weights(model))
        averaging.update()
    served = averaging.state_dict()["served"]
    for name, x in served.items():
        assert x.dtype == iterates[0][name].dtype
        expected = sum(iterate[name].double() for iterate in iterates) / 4
        torch.testing.assert_close(x.double(), expected, rtol=0, atol=4 * torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("build", [NoAveraging, lambda m: SMA(m, 0), lambda m: SWAD(m, 1, 1, 1)])
def test_nothing_to_average(build):
    averaging = build(network().requires_grad_(False).eval())
    for step in range(4):
        averaging.update()
        averaging.update()
        averaging.observe(step, 1.0)
    averaging.finish()
    with averaging.applied():
        pass
    assert not averaging.state_dict()["served"]


def test_what_is_averaged():
    model = network()
    assert set(SMA(model).tensors) == PARAMETERS | STATISTICS
    assert set(SWAD(model).tensors) == PARAMETERS
    tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    tied[1].weight = tied[0].weight
    assert set(SWAD(tied).tensors) == {"0.weight", "0.bias", "1.bias"}


def test_swad_needs_statistics_where_batch_norm_moves():
    model = network()
    averaging = SWAD(model)
    model.eval()  # for an evaluation: what moved in training counts
    assert averaging.needs_statistics
    assert not SWAD(model).needs_statistics


N = 10_007  # no other tensor here has this many elements


class Live(TorchDispatchMode):
    """Counts parameter-sized memory blocks alive after each operation, beside the weights."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights.data_ptr()
        self.tensors = []
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_flatten(out)[0] if torch.is_tensor(t) and t.numel() == N]
        self.tensors += [weakref.ref(t) for t in made]
        self.peak = max(self.peak, self.alive())
        return out

    def alive(self):
        alive = [t for ref in self.tensors if (t := ref()) is not None]
        return len({t.untyped_storage().data_ptr() for t in alive} - {self.weights})


def blocks(build, losses):
    """The most blocks at any time, and those left at the end."""
    module = nn.ParameterList([torch.zeros(N)])
    averaging = build(module)
    with Live(module[0]) as live:
        for step, loss in enumerate(losses):
            averaging.update()
            averaging.update()
            averaging.observe(step, loss)
        averaging.finish()
        with averaging.applied():
            pass
    state = tree_flatten(averaging.state_dict())[0]
    assert sum(x.numel() for x in state if torch.is_tensor(x)) == live.alive() * N
    return live.peak, live.alive()


# N_s, N_e, and the buffers of each way to count; SWAD's documentation has the largest.
BUFFERS = [(3, 6, 7, 7), (6, 3, 6, 7), (3, 3, 4, 4), (1, 4, 5, 5), (4, 1, 4, 5), (1, 1, 2, 2)]


@pytest.mark.parametrize("counting", VALLEYS)
@pytest.mark.parametrize(("n_s", "n_e", "reference", "paper"), BUFFERS)
def test_swad_keeps_as_many_buffers_as_it_says(n_s, n_e, reference, paper, counting):
    late = [9 - 0.1 * i for i in range(12)] + [8.0] * 12
    curves = [late, [1.0] * 12, [9.0 - i / 10 for i in range(12)], [1.0] * 3 + [2.0] * 12]
    curves += [[1.0] * n_s + [1.5] * (n_e - 1) + [1.0] + [1.5] * 12, curve(3), curve(4)]
    found = [blocks(lambda m: SWAD(m, 1, n_s, n_e, 0.3, counting), losses) for losses in curves]
    expected = {"reference": reference, "paper": paper}[counting]
    assert max(peak for peak, _ in found) == expected
    assert max(reference, paper) == max(n_s, n_e) + 1
    assert {left for _, left in found} == {1}


def test_a_dead_valley_keeps_only_the_average():
    module = nn.ParameterList([torch.zeros(N)])
    averaging = SWAD(module, 1, 2, 2)
    with Live(module[0]) as live:
        for step, loss in enumerate([1.0, 1.0, 2.0, 2.0, 2.0]):
            averaging.update()
            averaging.observe(step, loss)
        assert averaging.finished
        averaging.update()
    assert live.alive() == 1


def test_sma_keeps_one_buffer_and_none_keeps_none():
    assert blocks(lambda m: SMA(m, 3), [0.0] * 8) == (1, 1)
    assert blocks(NoAveraging, [0.0] * 8) == (0, 0)
