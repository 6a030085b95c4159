"""What is not the same function every time is refused, and the culprit is named."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from steppe.curvature import CurvatureOperator, GaussNewtonOperator, HessianOperator
from steppe.curvature.determinism import same
from steppe.errors import UserError
from tests.curvature.nets import cross_entropy


class AlwaysDrops(nn.Module):
    """Dropout that evaluation mode does not switch off: Monte-Carlo dropout, or a mistake."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True)


class DropsInPlace(nn.Module):
    """Changes what it was given: by then its input is no longer known, and its parent is named."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True, inplace=True)


class Counts(nn.Module):
    """Two buffers that change with every call, one in place and one by another in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = torch.cat([self.seen, self.calls])
        return x


class Remembers(nn.Module):
    """Changes with every call and tells nobody."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls % 2)


def network(inner: nn.Module) -> nn.Sequential:
    """With a module in the middle that is not like the others."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 8), inner, nn.Dropout(0.9), nn.BatchNorm1d(8))
    return nn.Sequential(block, nn.Tanh(), nn.Linear(8, 3))


def data(n: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(n, 4), torch.randint(3, (n,))


def product(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] = cross_entropy,
    batches: Any = None,
    operator: type[CurvatureOperator] = HessianOperator,
    **options: Any,
) -> Tensor:
    op = operator(model, loss_fn, [data()] if batches is None else batches, **options)
    return op @ torch.ones(op.shape[0])


@pytest.mark.parametrize("operator", [HessianOperator, GaussNewtonOperator])
@pytest.mark.parametrize(
    ("inner", "culprit"),
    [
        (AlwaysDrops(), r"0\.1 \(AlwaysDrops\)"),
        (nn.Sequential(nn.Tanh(), AlwaysDrops(), nn.Tanh()), r"0\.1\.1 \(AlwaysDrops\)"),
        (nn.Sequential(nn.Linear(8, 8), DropsInPlace()), r"0\.1 \(Sequential\)"),
        (nn.RReLU(lower=0.1, upper=0.9).requires_grad_(False), None),
        (Remembers(), r"0\.1 \(Remembers\)"),
    ],
)
def test_the_innermost_module_is_named(
    operator: type[CurvatureOperator], inner: nn.Module, culprit: str | None
) -> None:
    model = network(inner)
    if culprit is None:  # random in training mode only
        product(model, operator=operator)
        return
    with pytest.raises(UserError, match=f"differs from one evaluation .*: {culprit} is random"):
        product(model, operator=operator)
    with pytest.raises(UserError, match="is random in evaluation mode"):
        operator(model, cross_entropy, [data()]).gradient()
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_draws_itself() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(3)

    with pytest.raises(UserError, match=r"the model \(Model\) is random"):
        product(Model(4, 3))


def noisy(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * (1 + 0.1 * torch.rand(()))


def mixed(model: nn.Module, batch: Any) -> Tensor:
    """Every module is given something else: none of them is to blame."""
    x, y = batch
    return cross_entropy(model, (x + torch.randn_like(x), y))


def turned(model: nn.Module, batch: Any) -> Tensor:
    """A loss with the same value each time, and another gradient."""
    loss = cross_entropy(model, batch)
    return loss.detach() + torch.rand(()) * (loss - loss.detach())


def bent(model: nn.Module, batch: Any) -> Tensor:
    """Alike, and only the gradient by the last parameter differs."""
    bias = model[-1].bias
    return cross_entropy(model, batch) + torch.rand(()) * (bias - bias.detach()).sum()


@pytest.mark.parametrize("loss_fn", [noisy, mixed, turned, bent])
def test_a_random_loss_function_is_named(loss_fn: Callable[..., Tensor]) -> None:
    with pytest.raises(UserError, match=": the loss function is random in evaluation mode. Remove"):
        product(network(nn.Identity()), loss_fn)


@pytest.mark.parametrize("inner", [AlwaysDrops(), nn.Identity()])
def test_check_false_lets_it_through(inner: nn.Module) -> None:
    assert product(network(inner), noisy, check=False).isfinite().all()


def test_randomness_seeded_in_the_loss_is_none() -> None:
    def seeded(model: nn.Module, batch: Any) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return cross_entropy(model, batch)

    model = network(AlwaysDrops())
    assert torch.equal(product(model, seeded), product(model, seeded))


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise that is drawn whenever an image is read."""

    def __init__(self) -> None:
        self.x, self.y = data()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + 0.1 * torch.randn(4), self.y[i]


class Growing:
    """Gives more at every pass, from the second on."""

    def __init__(self, *counts: int) -> None:
        self.counts = list(counts)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = data()
        for _ in range(self.counts.pop(0)):
            yield x, y


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (DataLoader(TensorDataset(*data()), 4, shuffle=True), "batches differ .* shuffle=False"),
        (DataLoader(Augmented(), 4), "batches differ from one pass to the next.*augmentation"),
        (Growing(2, 0, 2), "batches differ from one pass"),
        (Growing(2, 2, 2, 3), "yielded 24 samples in one pass and 36 in another: every pass"),
    ],
)
def test_other_batches_in_another_pass(batches: Any, message: str) -> None:
    op = HessianOperator(network(nn.Identity()), cross_entropy, batches)
    v = torch.ones(op.shape[0])
    with pytest.raises(UserError, match=message):
        op @ v
        op @ v


def test_a_loader_that_always_gives_the_same_is_read_in_peace() -> None:
    x, y = data()
    batches = DataLoader(TensorDataset(x, y), 5)
    torch.testing.assert_close(
        product(network(nn.Identity()), batches=batches),
        product(network(nn.Identity()), batches=[(x, y)]),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_a_buffer_that_counts_is_named_and_put_back(fails: bool) -> None:
    counts = Counts()
    model = network(counts)
    before = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in before.items()}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) / (0 if fails else 1)

    message = "the loss of batch 0 is inf" if fails else r"the model's buffer '0\.1\.calls' changes"
    with pytest.raises(UserError, match=message):
        product(model, loss_fn)
    after = dict(model.named_buffers())
    assert all(after[name] is buffer for name, buffer in before.items())
    assert all(torch.equal(after[name], value) for name, value in values.items())


def test_a_part_of_the_gradient_that_is_only_rounding() -> None:
    """Where sums are added up in another order each time, as some kernels of a GPU do."""
    model = nn.Linear(4, 3)
    calls = iter(range(1, 100))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        rounding = 1e-9 * next(calls) * model.bias.sum()
        return (batch[0] @ model.weight.T).square().mean() + rounding - rounding.detach()

    assert product(model, loss_fn).isfinite().all()


NAN = float("nan")


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), False),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.ones(2), torch.ones(2, device="meta"), False),
        (torch.ones(2), None, False),
        ({"a": [torch.ones(1), "x"]}, {"a": [torch.ones(1), "x"]}, True),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, False),
        ((torch.ones(1),), (torch.ones(1), torch.ones(1)), False),
        ((torch.ones(1), 0.5), (torch.ones(1), 0.6), False),
        ((torch.ones(1), NAN), (torch.ones(1), NAN), True),
        ((torch.ones(1), "a"), (torch.ones(1), "b"), False),
        (object(), object(), True),
    ],
)
def test_same(x: Any, y: Any, expected: bool) -> None:
    assert same(x, y) is expected
