"""What the tests of algorithms share: a small float64 network and the slow way through it.

Everything is computed from the raw pixels, one image at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from steppe.algorithms import Algorithm, Losses, Network
from steppe.domains.batches import Batch

SIZES = (5, 7, 4)
N_CLASSES, N_FEATURES, SIDE = 5, 6, 4
MEAN, STD = (0.25, 0.5, 0.375), (0.5, 0.25, 0.75)  # which float32 has without rounding


class Image(NamedTuple):
    """One image as the network sees it: pixels, class, and what its features are multiplied by."""

    pixels: Tensor
    label: int
    keep: Tensor | float


def make_network(dropout: float = 0.0, n_classes: int = N_CLASSES) -> Network:
    torch.manual_seed(0)
    featurizer = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, N_FEATURES), nn.Tanh())
    return Network(featurizer, N_FEATURES, n_classes, MEAN, STD, dropout=dropout).double()


def make_batches(sizes: Sequence[int] = SIZES, seed: int = 0) -> list[Batch]:
    """Random pixels and labels. The first images are nearly the same: narrow kernels see them."""
    rng = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=rng)

    batches = [Batch(draw(250, n, 3, SIDE, SIDE), draw(N_CLASSES, n)) for n in sizes]
    for batch in batches:
        batch.images[0] = batches[0].images[0] + draw(6, 3, SIDE, SIDE)
    return [Batch(images.to(torch.uint8), labels) for images, labels in batches]


def images_of(batches: Sequence[Batch], keep: Tensor | None) -> list[list[Image]]:
    """The images of each domain."""
    mean, std = (torch.tensor(x, dtype=torch.float64).view(3, 1, 1) for x in (MEAN, STD))
    rows = iter([1.0] * sum(len(b.labels) for b in batches) if keep is None else keep)
    return [
        [
            Image((x.double() / 255 - mean) / std, int(y), next(rows))
            for x, y in zip(*batch, strict=True)
        ]
        for batch in batches
    ]


def mean(values: Iterable[Tensor]) -> Tensor:
    values = list(values)
    return sum(values) / len(values)


def features(network: Network, image: Image) -> Tensor:
    """Of one image, a vector."""
    return network.featurizer(image.pixels[None])[0] * image.keep


def logits(network: Network, image: Image) -> Tensor:
    return network.classifier.weight @ features(network, image) + network.classifier.bias


def cross_entropy(logits: Tensor, label: int) -> Tensor:
    return logits.exp().sum().log() - logits[label]


def risk(network: Network, domain: Iterable[Image]) -> Tensor:
    return mean(cross_entropy(logits(network, image), image.label) for image in domain)


def gradients(value: Tensor, module: nn.Module) -> list[Tensor]:
    parameters = list(module.parameters())
    return list(torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True))


def move(module: nn.Module, seed: int) -> None:
    """Changes the parameters a little, as a step would, or an optimizer's other passes."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p += 0.1 * torch.randn(p.shape, dtype=p.dtype, generator=rng)


def buffers(algorithm: Algorithm) -> dict[str, Tensor]:
    """The algorithm's own state."""
    named = algorithm.named_buffers()
    return {name: b.clone() for name, b in named if not name.startswith("network.")}


def assert_equal_losses(
    algorithm: Algorithm, found: Losses, expected: Losses, by_hand: Sequence[Tensor] | None = None
) -> None:
    """Compares values, and gradients by every parameter: with those `by_hand`, where given."""
    assert found.total.dtype == torch.float64
    torch.testing.assert_close(found.total, expected.total, rtol=1e-9, atol=0)
    for name, value in expected.parts.items():
        torch.testing.assert_close(found.parts[name], value, rtol=1e-9, atol=1e-15)
    by_hand = gradients(expected.total, algorithm) if by_hand is None else by_hand
    for a, b in zip(gradients(found.total, algorithm), by_hand, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12 * float(b.abs().max()))
