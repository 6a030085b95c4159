"""A convolutional network for tests in float64, and the slow way through it, image by image."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.algorithms import Network, Prepared, Stage, build_algorithm
from tests.algorithms.oracles import (
    MEAN,
    N_CLASSES,
    SIZES,
    STD,
    Image,
    cross_entropy,
    images_of,
    make_batches,
    move,
)

WIDTHS = {"stem": 4, "one": 5, "two": 6, "last": 7}
CONVOLUTIONS = ("stem", "one.conv", "two.conv", "last")  # maps of 4 x 4, 4 x 4, 3 x 3 and 1 x 1
NORMS = ("one.norm", "two.norm")
Maps = list[Tensor]
Domains = list[list[Image]]


class Block(nn.Module):
    def __init__(self, n: int, m: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(n, m, kernel, padding=1, bias=False)  # which norms undo
        self.norm = nn.BatchNorm2d(m, eps=0.125, momentum=0.3)
        self.downsample = nn.Conv2d(n, m, kernel - 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.conv(x)) + self.downsample(x))


def make_convolutional(dropout: float = 0.0) -> Network:
    torch.manual_seed(0)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        stem=nn.Conv2d(3, 4, 3, padding=1, bias=False)
    )
    layers["one"], layers["two"] = Block(4, 5, 3), Block(5, 6, 4)
    layers["last"], layers["flat"] = nn.Conv2d(6, 7, 3), nn.Flatten()
    network = Network(
        nn.Sequential(layers),
        *(7, N_CLASSES, MEAN, STD, dropout),
        stages=[Stage(name, width) for name, width in WIDTHS.items()],
    )
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):  # statistics of somewhere else
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
    return network.double()


def make(name: str, dropout: float = 0.0, /, **options: Any) -> Any:
    algorithm = build_algorithm(name, make_convolutional(dropout), len(SIZES), **options).double()
    move(algorithm, 1)  # no two parameters alike
    return algorithm


def make_prepared(algorithm: Any, seed: int = 0) -> tuple[Prepared, Domains]:
    """A step's, with no image of classes 1 and 4."""
    batches = [b._replace(labels=b.labels * (b.labels % 3 != 1)) for b in make_batches(seed=seed)]
    torch.manual_seed(seed)
    prepared = algorithm.prepare(batches)
    return prepared, images_of(batches, prepared.keep)


def normalized(norm: Any, x: Tensor, mu: Tensor, var: Tensor, d: int | None = None) -> Tensor:
    """One image's maps, with the scale and shift of a domain, if there are several."""
    scale, shift = (p if d is None else p[d] for p in (norm.weight, norm.bias))
    rows = zip(x, mu, var, scale, shift, strict=True)
    return torch.stack([a * (z - m) / (v + norm.eps) ** 0.5 + b for z, m, v, a, b in rows])


def frozen(norm: Any, xs: Maps) -> Maps:
    return [normalized(norm, x, norm.running_mean, norm.running_var) for x in xs]


def by_hand(
    network: Any,
    images: Sequence[Image],
    after: Callable[[str, Maps], Maps] = lambda name, xs: xs,
    norms: Callable[[Any, Maps], Maps] = frozen,
) -> Maps:
    """Features, with something done to all maps that come out of a place."""

    def convolved(name: str, xs: Maps) -> Maps:
        conv = network.featurizer.get_submodule(name)
        padding = conv.padding
        outputs = [F.conv2d(x[None], conv.weight, conv.bias, padding=padding)[0] for x in xs]
        return after(name, outputs)

    xs = convolved("stem", [image.pixels for image in images])
    for name in ("one", "two"):
        block = network.featurizer.get_submodule(name)
        main = norms(block.norm, convolved(f"{name}.conv", xs))
        beside = convolved(f"{name}.downsample", xs)
        xs = after(name, [torch.tanh(a + b) for a, b in zip(main, beside, strict=True)])
    outputs = convolved("last", xs)
    return [x.flatten() * image.keep for x, image in zip(outputs, images, strict=True)]


def classified(network: Network, phis: Maps) -> Maps:
    return [network.classifier.weight @ phi + network.classifier.bias for phi in phis]


def losses_of(network: Network, phis: Maps, images: Sequence[Image]) -> Maps:
    pairs = zip(classified(network, phis), images, strict=True)
    return [cross_entropy(z, image.label) for z, image in pairs]


def domain_numbers(domains: Domains) -> list[int]:
    return [d for d, domain in enumerate(domains) for _ in domain]


def assert_close(found: Tensor, expected: Maps) -> None:
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-11, atol=1e-13)
