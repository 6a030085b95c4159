"""Steps of algorithms with several objectives, compared with slow versions of their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from steppe.algorithms import Algorithm, Losses, Network, Prepared
from steppe.domains.batches import Batch
from tests.algorithms.oracles import SIZES, Image, images_of, make_batches, risk

Domains = list[list[Image]]


def without_classes(seed: int, sizes: Sequence[int] = SIZES) -> list[Batch]:
    """Batches without classes 1 and 4."""
    batches = make_batches(sizes, seed)
    return [batch._replace(labels=batch.labels * (batch.labels % 3 != 1)) for batch in batches]


def assert_losses(
    algorithm: Algorithm, found: Losses, expected: Losses, *learns: nn.Module
) -> None:
    """Compares values and gradients; all parameters of the modules that learn should have one."""
    assert found.total.dtype == torch.float64
    torch.testing.assert_close(found.total, expected.total, rtol=1e-10, atol=1e-13)
    assert found.parts.keys() == expected.parts.keys()
    for name, value in expected.parts.items():
        torch.testing.assert_close(found.parts[name], value, rtol=1e-10, atol=1e-13)
    parameters = list(algorithm.parameters())
    ours, theirs = (
        torch.autograd.grad(total, parameters, materialize_grads=True, allow_unused=True)
        for total in (found.total, expected.total)
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12 * float(b.abs().max()))
    learned = {p for module in learns for p in module.parameters()}
    for p, gradient in zip(parameters, ours, strict=True):
        assert (gradient.abs().max() > 0) or p not in learned


def steps(algorithm: Algorithm, n: int = 3) -> Iterator[tuple[Prepared, Domains]]:
    """Prepared batches and their images, without class 1, and class 4 in one domain only."""
    torch.manual_seed(2)
    for step in range(n):
        batches = without_classes(step)
        batches[0].labels[:2] = 4
        prepared = algorithm.prepare(batches)
        yield prepared, images_of(batches, prepared.keep)


def pooled(network: Network, domains: Domains) -> Tensor:
    return risk(network, chain(*domains))


def assert_predicts(algorithm: Algorithm, predict: Callable[[Image], Tensor]) -> None:
    """For any domain, without dropout."""
    algorithm.eval()
    (batch,) = make_batches((6,), seed=9)
    (images,) = images_of([batch], None)
    expected = torch.stack([predict(image) for image in images])
    for found in (algorithm.predict(batch.images), algorithm.predict_source(batch.images, 1)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    algorithm.train()


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer.weight @ x + layer.bias
