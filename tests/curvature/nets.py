"""Small float64 models with losses and data, and the dense matrices of their curvature."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from steppe.curvature import CurvatureOperator

SIZES = (5, 2, 4)
"""Of the batches: unequal, so that a mean of means is not the mean."""


def curvlinops() -> Any:
    """The package that products are compared with; a test skips where it is not installed."""
    with warnings.catch_warnings():  # of torch, about what its dependencies use
        warnings.simplefilter("ignore")
        return pytest.importorskip("curvlinops")


@dataclass
class Case:
    """What an operator is made of.

    `whole` is all data in one batch; `params` are names, None where all are meant.
    """

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batches: list[Any]
    whole: Any
    params: Sequence[str] | None = None

    def chosen(self) -> list[nn.Parameter] | None:
        return None if self.params is None else [self.model.get_parameter(n) for n in self.params]

    def size(self) -> int:
        return sum(p.numel() for p in self.chosen() or self.model.parameters())

    def args(self) -> tuple[Any, ...]:
        return self.model, self.loss_fn, self.batches, self.chosen()

    def loss_at(self) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """The mean loss over all data as a function of a flat vector, and the weights."""
        call, theta = _functional(self.model, self.params)
        return lambda v: call(v, self.loss_fn, self.whole), theta


class _Called(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss_fn: Callable[..., Tensor], batch: Any) -> Tensor:
        return loss_fn(self.model, batch)


def _functional(
    model: nn.Module, params: Sequence[str] | None
) -> tuple[Callable[..., Tensor], Tensor]:
    """Any function of a copy of a model, in evaluation mode, at given flat weights."""
    called = _Called(copy.deepcopy(model)).eval()
    named = dict(called.model.named_parameters())
    chosen = list(named) if params is None else list(params)
    shapes = [named[name].shape for name in chosen]

    def call(theta: Tensor, *args: Any) -> Tensor:
        parts = theta.split([shape.numel() for shape in shapes])
        point = {
            f"model.{name}": part.view(shape)
            for name, part, shape in zip(chosen, parts, shapes, strict=True)
        }
        with sdpa_kernel(SDPBackend.MATH):  # the others cannot be differentiated twice
            return functional_call(called, point, args)

    return call, torch.cat([named[name].detach().reshape(-1) for name in chosen])


def dense_hessian(case: Case) -> Tensor:
    loss, theta = case.loss_at()
    return jacrev(grad(loss))(theta)


def dense_gradient(case: Case) -> tuple[float, Tensor]:
    loss, theta = case.loss_at()
    return float(loss(theta).detach()), grad(loss)(theta)


def dense_gauss_newton(
    case: Case, outputs: Callable[[nn.Module, Any], Tensor], loss: Callable[[Tensor], Tensor]
) -> Tensor:
    """J' H J of all data, from the outputs as a function of the weights and the loss of them."""
    call, theta = _functional(case.model, case.params)
    jacobian = jacrev(lambda v: call(v, outputs, case.whole).flatten())(theta)
    z = call(theta, outputs, case.whole)
    curvature = jacrev(grad(lambda flat: loss(flat.view(z.shape))))(z.detach().flatten())
    return jacobian.T @ curvature @ jacobian


def block(n: int, *columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, *columns, dtype=dtype, generator=torch.Generator().manual_seed(9))


def identity(op: CurvatureOperator) -> Tensor:
    return torch.eye(op.shape[0], dtype=op.dtype)


def assert_same(found: Tensor, expected: Tensor, rtol: float = 1e-12) -> None:
    """Relative to the largest number: rounding in float64 is 1e-16 of it, times a few sums."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= rtol * expected.abs().max()


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def labelled(*shape: int, classes: int = 3) -> tuple[list[tuple[Tensor, Tensor]], Any]:
    """Batches of random inputs and labels, and all of them in one."""
    x = torch.randn(sum(SIZES), *shape, dtype=torch.float64)
    y = torch.randint(classes, (sum(SIZES),))
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True)), (x, y)


def mlp() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return Case(model, cross_entropy, *labelled(4))


def lists() -> Case:
    case = mlp()
    return Case(case.model, cross_entropy, [list(b) for b in case.batches], case.whole)


def bare_tensors() -> Case:
    """An autoencoder: the batch is a tensor."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 2), nn.Sigmoid(), nn.Linear(2, 4)).double()
    x = torch.randn(sum(SIZES), 4, dtype=torch.float64)
    return Case(model, lambda model, x: F.mse_loss(model(x), x), list(x.split(SIZES)), x)


def mappings() -> Case:
    """Batches with a name and a nested tuple before the tensors are found."""
    case = mlp()

    def wrap(batch: Any) -> dict[str, Any]:
        return {"name": "train", "data": (None, batch[0]), "labels": batch[1]}

    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(model(batch["data"][1]), batch["labels"])

    return Case(case.model, loss_fn, [wrap(b) for b in case.batches], wrap(case.whole))


def conv() -> Case:
    """Batch norm with statistics that are not those of the data, and dropout."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ELU(inplace=True),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(12, 3),
    ).double()
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    return Case(model, cross_entropy, *labelled(2, 4, 4))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        return self.head(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


def attention() -> Case:
    torch.manual_seed(3)
    return Case(Attention().double(), cross_entropy, *labelled(3, 4))


def transformer() -> Case:
    """Torch's own layer, which has a fused path for evaluation mode."""
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.2, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(8, 3)).double()
    return Case(model, cross_entropy, *labelled(2, 4))


def tied() -> Case:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[2].weight = model[0].weight
    return Case(model, cross_entropy, *labelled(3))


class Partial(nn.Module):
    """One parameter is in the middle of the vector and not in the loss, one enters linearly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.unused = nn.Parameter(torch.ones(2))
        self.slope = nn.Parameter(torch.ones(2))
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def partial() -> Case:
    torch.manual_seed(6)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) + (batch[0][:, :2] @ model.slope).mean()

    return Case(Partial().double(), loss_fn, *labelled(4))


def linear_loss() -> Case:
    """No curvature at all."""
    torch.manual_seed(7)
    model = nn.Linear(4, 1).double()
    return Case(model, lambda model, batch: model(batch[0]).mean(), *labelled(4))


def frozen() -> Case:
    """Parameters that take no gradient, but are asked for."""
    case = mlp()
    case.model.requires_grad_(False)
    case.params = ["0.weight", "2.bias"]
    return case


def one_layer() -> Case:
    case = conv()
    case.params = ["1.weight", "1.bias"]
    return case


def another_order() -> Case:
    case = mlp()
    case.params = ["2.bias", "0.weight", "2.weight"]
    return case


CASES = [
    mlp,
    lists,
    bare_tensors,
    mappings,
    conv,
    attention,
    transformer,
    tied,
    partial,
    linear_loss,
    frozen,
    one_layer,
    another_order,
]
