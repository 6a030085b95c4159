"""Yogi, AdaBelief and AdaHessian against their papers' equations, and AdaHessian's manners."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from steppe.optim import adahessian as adahessian_module
from steppe.optim.adahessian import AdaHessian, hessian_diagonal, rademacher, spatial_average
from steppe.optim.registry import build_optimizer
from steppe.optim.yogi import Yogi

from . import reference_peers as reference

# torch tells everybody who calls backward(create_graph=True) of a leak that these tests rule out.
pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")

STEPS = 20
# Both sides do the same float64 arithmetic in another order over 20 steps.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 2, 2, padding=1),
        nn.Tanh(),
        nn.Flatten(2),
        nn.Conv1d(2, 2, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(14, 3),
    ).double()


NETS = {"mlp": mlp, "convnet": convnet}


def batch(t: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (8,), generator=generator)


def loss_of(model: nn.Module) -> reference.Loss:
    names = [name for name, _ in model.named_parameters()]

    def loss(t: int, theta: list[Tensor]) -> Tensor:
        x, y = batch(t)
        weights = dict(zip(names, theta, strict=True))
        return nn.functional.cross_entropy(functional_call(model, weights, (x,)), y)

    return loss


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def groups_of(model: nn.Module, hyper: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two parameter groups, split after the first two tensors, with options of their own."""
    params = list(model.parameters())
    return [{"params": params[:2], **hyper[0]}, {"params": params[2:], **hyper[1]}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for t in steps:

        def closure(t: int = t) -> Tensor:
            optimizer.zero_grad()
            x, y = batch(t)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward(create_graph=optimizer.needs_graph)
            return loss

        optimizer.step(closure)


def assert_agrees(model: nn.Module, expected: list[Tensor]) -> None:
    for ours, theirs in zip(weights_of(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def spread(model: nn.Module, hyper: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count = len(list(model.parameters()))
    return [hyper[0]] * 2 + [hyper[1]] * (count - 2)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("v0", [0.0, 1e-6])
def test_yogi_is_algorithm_2(net: str, weight_decay: float, v0: float) -> None:
    model = NETS[net]()
    hyper = [
        {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": weight_decay},
        {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-2, "weight_decay": 2 * weight_decay},
    ]
    expected = reference.yogi(
        loss_of(model),
        weights_of(model),
        [{**h, "v0": v0} for h in spread(model, hyper)],
        STEPS,
    )
    train(model, Yogi(groups_of(model, hyper), initial_accumulator=v0), range(1, STEPS + 1))
    assert_agrees(model, expected)


def test_pytorch_optimizers_yogi_is_not_algorithm_2() -> None:
    """Why Yogi is ours; the day this fails the registry may take theirs."""
    package = pytest.importorskip("pytorch_optimizer")
    for v0, debias in itertools.product([0.0, 1e-6], [False, True]):
        model = mlp()
        hyper = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.0}
        expected = reference.yogi(
            loss_of(model), weights_of(model), [{**hyper, "v0": v0}] * 4, STEPS
        )
        theirs = package.Yogi(
            model.parameters(), **hyper, initial_accumulator=v0, adam_debias=debias
        )
        theirs.needs_graph = False
        train(model, theirs, range(1, STEPS + 1))
        gaps = [(a - b).abs().max() for a, b in zip(weights_of(model), expected, strict=True)]
        assert max(gaps) > 1e-3


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("foreach", [False, True])
def test_adabelief_is_algorithm_2(net: str, weight_decay: float, foreach: bool) -> None:
    pytest.importorskip("pytorch_optimizer")
    model = NETS[net]()
    hyper = [
        {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay},
        {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 2 * weight_decay},
    ]
    expected = reference.adabelief(loss_of(model), weights_of(model), spread(model, hyper), STEPS)
    optimizer = build_optimizer("adabelief", groups_of(model, hyper), foreach=foreach)
    train(model, optimizer, range(1, STEPS + 1))
    assert_agrees(model, expected)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The probes that AdaHessian draws, as it draws them."""
    drawn: list[list[Tensor]] = []

    def recording(like: list[Tensor]) -> list[Tensor]:
        drawn.append(rademacher(like))
        return drawn[-1]

    monkeypatch.setattr(adahessian_module, "rademacher", recording)
    return drawn


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("average_kernels", [True, False])
def test_adahessian_is_the_papers_algorithm(
    net: str, weight_decay: float, average_kernels: bool, probes: list[list[Tensor]]
) -> None:
    model = NETS[net]()
    start = weights_of(model)
    common = {"average_kernels": average_kernels, "eps": 1e-4}
    hyper = [
        {"lr": 5e-3, "betas": (0.9, 0.999), "weight_decay": weight_decay, "hessian_power": 1.0},
        {"lr": 2e-3, "betas": (0.8, 0.95), "weight_decay": 2 * weight_decay, "hessian_power": 0.5},
    ]
    hyper = [{**common, **h} for h in hyper]
    train(model, AdaHessian(groups_of(model, hyper)), range(1, STEPS + 1))
    assert len(probes) == STEPS
    expected = reference.adahessian(loss_of(model), start, spread(model, hyper), STEPS, probes)
    assert_agrees(model, expected)


def test_pytorch_optimizers_adahessian_lacks_spatial_averaging_and_leaks() -> None:
    """Why AdaHessian is ours; the day this fails the registry may take theirs."""
    package = pytest.importorskip("pytorch_optimizer")
    model = convnet()
    optimizer = package.AdaHessian(model.parameters(), lr=5e-3, eps=1e-4)
    optimizer.needs_graph = True
    train(model, optimizer, range(1, 2))
    kernel = next(model.parameters())
    diagonal = optimizer.state[kernel]["hessian"]
    assert not torch.allclose(diagonal, spatial_average(diagonal))
    assert all(p.grad.grad_fn is not None for p in model.parameters())


def test_rademacher_draws_both_signs_alike_and_independently() -> None:
    torch.manual_seed(0)
    a, b = rademacher([torch.empty(100, 100), torch.empty(10_000, dtype=torch.float64)])
    assert a.dtype == torch.float32
    assert b.dtype == torch.float64
    for z in (a, b):
        assert z.unique().tolist() == [-1.0, 1.0]
        assert abs(float(z.mean())) < 0.05  # five standard deviations
    assert abs(float((a.reshape(-1) * b).mean())) < 0.05


def test_the_mean_over_all_probes_is_the_hessians_diagonal() -> None:
    theta = [torch.randn(2, 2, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]

    def loss(t: int, theta: list[Tensor]) -> Tensor:
        a, b = theta
        return (a @ b[:2]).sin().sum() * b.prod() + (a**3).sum()

    total = [torch.zeros_like(x) for x in theta]
    for signs in itertools.product([-1.0, 1.0], repeat=7):
        z = torch.tensor(signs, dtype=torch.float64)
        leaves = [x.clone().requires_grad_() for x in theta]
        gradients = torch.autograd.grad(loss(0, leaves), leaves, create_graph=True)
        estimate = hessian_diagonal(gradients, leaves, [z[:4].reshape(2, 2), z[4:]])
        total = [a + b for a, b in zip(total, estimate, strict=True)]
    mean = torch.cat([x.reshape(-1) for x in total]) / 2**7
    torch.testing.assert_close(mean, reference.hessian(loss, 0, theta).diagonal(), **TOLERANCE)


def test_a_constant_gradient_has_no_curvature() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    y = torch.tensor([3.0], requires_grad=True)
    loss = (x**3).sum() + y.sum()
    gradients = torch.autograd.grad(loss, [x, y], create_graph=True)
    diagonal = hessian_diagonal(gradients, [x, y], [torch.ones(1), torch.ones(1)])
    assert [d.item() for d in diagonal] == [12.0, 0.0]


def test_all_parameters_share_one_differentiation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    grad = torch.autograd.grad

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counting)
    model = convnet()
    hyper: list[dict[str, Any]] = [{"lr": 1e-3}, {"lr": 1e-2}]
    train(model, AdaHessian(groups_of(model, hyper)), range(1, 4))
    assert len(calls) == 3


def test_plain_backward_gets_an_error_that_names_create_graph() -> None:
    model = mlp()
    before = weights_of(model)
    optimizer = AdaHessian(model.parameters())
    x, y = batch(0)

    def closure() -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="create_graph=True"):
        optimizer.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True))
    assert not optimizer.state


def test_the_step_clears_gradients_before_the_closure_and_accepts_those_already_there() -> None:
    models = [mlp(), mlp()]
    for model, with_closure in zip(models, [True, False], strict=True):
        optimizer = AdaHessian(model.parameters(), lr=1e-2)
        for t in range(3):
            x, y = batch(t)

            def closure(model: nn.Module = model, x: Tensor = x, y: Tensor = y) -> Tensor:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward(create_graph=True)
                return loss

            torch.manual_seed(t)
            if with_closure:
                assert optimizer.step(closure).grad_fn is None
            else:
                optimizer.zero_grad()
                closure()
                assert optimizer.step() is None
    a, b = map(weights_of, models)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("with_closure", [True, False])
def test_no_graph_outlives_the_step(with_closure: bool) -> None:
    model = convnet()
    optimizer = AdaHessian(model.parameters(), lr=1e-3)
    alive: list[weakref.ref[Tensor]] = []
    losses = []

    def closure() -> Tensor:
        x, y = batch(len(alive))
        logits = model(x)
        alive.append(weakref.ref(logits))
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward(create_graph=True)
        return loss

    gc.collect()
    gc.disable()  # a reference cycle must not be saved by the collector
    try:
        for _ in range(20):
            if with_closure:
                losses.append(optimizer.step(closure))  # as people do who plot their losses
            else:
                optimizer.zero_grad()
                closure()
                optimizer.step()
            assert all(p.grad.grad_fn is None for p in model.parameters())
        assert len(alive) == 20
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["yogi", "adabelief", "adahessian"])
def test_resuming_is_bit_identical(name: str) -> None:
    model = convnet()
    optimizer = build_optimizer(name, model.parameters(), lr=1e-3)
    train(model, optimizer, range(5))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    rng = torch.get_rng_state()
    train(model, optimizer, range(5, 10))

    resumed = convnet()
    resumed.load_state_dict(weights)
    other = build_optimizer(name, resumed.parameters())
    other.load_state_dict(state)
    torch.set_rng_state(rng)
    train(resumed, other, range(5, 10))
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["yogi", "adabelief", "adahessian"])
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies_go_on_as_the_original_does(name: str, clone: Callable[[Any], Any]) -> None:
    model = convnet()
    optimizer = build_optimizer(name, model.parameters(), lr=1e-3)
    train(model, optimizer, range(3))
    twin, twins_optimizer = clone((model, optimizer))
    for pair in ((model, optimizer), (twin, twins_optimizer)):
        torch.manual_seed(1)
        train(*pair, range(3, 6))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cls", [Yogi, AdaHessian])
def test_parameters_without_gradient_stay_as_they_are(cls: type) -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = cls([used, unused], weight_decay=0.1)
    (used**3).sum().backward(create_graph=True)
    optimizer.step()
    assert not torch.equal(used, torch.ones(3))
    assert torch.equal(unused, torch.ones(3))
    assert unused not in optimizer.state


@pytest.mark.parametrize("cls", [Yogi, AdaHessian])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr"),
        ({"eps": -1.0}, "eps"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"lr": float("nan")}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ],
)
def test_bad_options_are_named(cls: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls([nn.Parameter(torch.ones(1))], **options)


@pytest.mark.parametrize("power", [0.0, 1.5])
def test_bad_hessian_power_is_named(power: float) -> None:
    with pytest.raises(ValueError, match="hessian_power"):
        AdaHessian([nn.Parameter(torch.ones(1))], hessian_power=power)


@pytest.mark.parametrize("cls", [Yogi, AdaHessian])
def test_sparse_and_complex_are_refused(cls: type) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    complex_weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    (complex_weight.abs() ** 2).sum().backward(create_graph=True)
    for weight in (table.weight, complex_weight):
        with pytest.raises(RuntimeError, match="neither sparse gradients nor complex weights"):
            cls([weight]).step()
    complex_weight.grad = None


@pytest.mark.parametrize("cls", [Yogi, AdaHessian])
def test_schedulers_drive_the_learning_rate(cls: type) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = cls([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.0 if epoch else 1.0)
    for expected_to_move in (True, False):
        before = weight.detach().clone()
        optimizer.zero_grad()
        (weight**4).sum().backward(create_graph=True)
        optimizer.step()
        scheduler.step()
        assert torch.equal(before, weight) != expected_to_move
