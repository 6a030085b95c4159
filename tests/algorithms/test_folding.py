"""Frozen batch norm inside the convolution before it: the same outputs and gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from steppe.algorithms import folding
from steppe.algorithms.folding import fold
from steppe.algorithms.network import Compiled, Network
from steppe.training.backbones import build_network

NORMS = {"resnet18": 20, "tf_efficientnet_lite0": 49, "small-cnn": 3}


def shaken(module: nn.Module) -> nn.Module:
    """In float64, with statistics and affine parameters that are far from those of a new norm."""
    torch.manual_seed(0)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.1, 2)
            if norm.affine:
                nn.init.uniform_(norm.weight, -1, 1)
                nn.init.normal_(norm.bias)
    return module.double()


def frozen(module: nn.Module) -> nn.Module:
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eval()
    return module


def folded(module: nn.Module) -> tuple[Callable[[Tensor], Tensor], list[int]]:
    """The module as dynamo traces it, folded but run by torch; and how many norms were."""
    counts: list[int] = []

    def backend(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        counts.append(fold(graph))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(lambda x: module(x), backend=backend), counts


def outcome(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradient of the input and of every parameter."""
    x = x.clone().requires_grad_()
    y = run(x)
    module.zero_grad()
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def assert_equal(module: nn.Module, x: Tensor, norms: int) -> None:
    run, counts = folded(module)
    for ours, plain in zip(outcome(run, module, x), outcome(module, module, x), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10 * plain.abs().max().item())
    assert sum(counts) == norms


@pytest.mark.parametrize("name", NORMS)
def test_every_frozen_norm_of_a_network_is_folded(name: str) -> None:
    network = build_network(name, n_classes=3, image_size=32)
    assert_equal(shaken(network.featurizer), torch.randn(2, 3, 32, 32).double(), NORMS[name])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"padding": 1, "stride": 2}, {"padding": "same", "dilation": 2}, {"groups": 2}],
    ids=str,
)
def test_every_kind_of_convolution(bias: bool, affine: bool, options: dict[str, Any]) -> None:
    module = nn.Sequential(
        nn.Conv2d(4, 6, 3, bias=bias, **options), nn.BatchNorm2d(6, affine=affine), nn.ReLU()
    )
    assert_equal(frozen(shaken(module)), torch.randn(2, 4, 9, 9).double(), 1)


class Read(nn.Module):
    """A network in which something else reads the input of the second norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.one, self.two = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.one(self.first(x))))
        return self.two(x) + x


def test_a_norm_whose_input_has_another_reader_stays() -> None:
    assert_equal(frozen(shaken(Read())), torch.randn(2, 3, 8, 8).double(), 1)


def test_a_norm_with_live_statistics_stays() -> None:
    module = shaken(Read()).train()
    module.one.eval()
    assert_equal(module, torch.randn(2, 3, 8, 8).double(), 1)
    module.one.train()
    assert_equal(module, torch.randn(2, 3, 8, 8).double(), 0)


def test_a_norm_before_its_convolution_stays() -> None:
    module = frozen(shaken(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))))
    assert_equal(module, torch.randn(2, 3, 8, 8).double(), 0)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many norms each call of `fold` folded."""
    found: list[int] = []
    monkeypatch.setattr(folding, "fold", lambda graph: found.append(fold(graph)) or found[-1])
    return found


def compiled(freeze_bn: bool) -> Network:
    network = build_network("small-cnn", n_classes=3, image_size=8, freeze_bn=freeze_bn)
    network.compiled = Compiled(4)
    return network


@pytest.mark.parametrize("freeze_bn", [True, False])
def test_a_run_folds_in_training_only(freeze_bn: bool, counts: list[int]) -> None:
    torch._dynamo.reset()
    network, images = compiled(freeze_bn), torch.randn(4, 3, 8, 8)
    network(images).sum().backward()
    assert counts == [2 if freeze_bn else 0]
    with torch.no_grad():
        network.eval()(images)
    assert len(counts) == 1


def test_runs_of_one_process_share_compiled_code(counts: list[int]) -> None:
    for network in (
        compiled(freeze_bn=True),
        build_network("small-cnn", n_classes=3, image_size=8),
    ):
        network.compiled = Compiled(4)
        network(torch.randn(4, 3, 8, 8)).sum().backward()
    assert counts == [2]
