"""pAdaIN: what a swap does, and where."""

from dataclasses import replace

import pytest
import torch

from steppe.algorithms import build_algorithm
from steppe.algorithms.padain import swap_styles
from steppe.errors import UserError
from steppe.training.backbones import build_network
from tests.algorithms.oracles import N_CLASSES, SIZES, gradients, make_batches, make_network


def make(p: float):
    torch.manual_seed(0)
    network = build_network("small-cnn", n_classes=N_CLASSES, image_size=4)
    return build_algorithm("pAdaIN", network, len(SIZES), p=p).double()


def test_without_swaps_it_is_erm() -> None:
    padain = make(p=0.0)
    prepared = padain.prepare(make_batches())
    assert prepared.draws["partners"] == {}
    erm = build_algorithm("ERM", padain.network, len(SIZES))
    found, expected = padain(prepared).total, erm(prepared).total
    assert torch.equal(found, expected)
    assert all(map(torch.equal, gradients(found, padain), gradients(expected, padain)))


def test_a_map_takes_its_partners_statistics() -> None:
    rng = torch.Generator().manual_seed(0)
    maps = torch.randn(4, 3, 5, 6, dtype=torch.float64, generator=rng) * 2 + 1
    same = swap_styles(maps, torch.arange(4))
    torch.testing.assert_close(same, maps, rtol=0, atol=1e-4)
    partner = torch.tensor([2, 0, 3, 1])
    swapped = swap_styles(maps, partner)
    torch.testing.assert_close(swapped.mean((2, 3)), maps.mean((2, 3))[partner])
    std = swapped.std((2, 3), correction=1)
    torch.testing.assert_close(std, maps.std((2, 3), correction=1)[partner], rtol=1e-4, atol=0)
    pixel = maps[:, :, :1, :1]
    assert torch.equal(swap_styles(pixel, partner), pixel)


def test_styles_get_no_gradient() -> None:
    maps = torch.randn(2, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    content = torch.randn(3, 3, dtype=torch.float64)
    swapped = swap_styles(maps, torch.tensor([1, 0]))
    (slopes,) = torch.autograd.grad((swapped[0, 0] * content).sum(), maps)
    assert slopes[0].abs().max() > 0
    assert torch.equal(slopes[1], torch.zeros_like(slopes[1]))


def test_swaps_follow_the_chosen_convolutions() -> None:
    padain = make(p=1.0).eval()
    prepared = padain.prepare(make_batches())
    assert list(prepared.draws["partners"]) == [0, 1]
    partner = prepared.draws["partners"][1]
    found = padain(replace(prepared, draws={"partners": {1: partner}})).logits
    layers = padain.network.featurizer
    middle = swap_styles(layers[:4](prepared.images), partner)
    torch.testing.assert_close(found, padain.network.classifier(layers[4:](middle)))


def test_shortcuts_are_left_alone() -> None:
    network = build_network("resnet18", n_classes=2, image_size=32)
    names = [stage.name for stage in build_algorithm("pAdaIN", network, 3).convolutions]
    assert len(names) == 17
    assert {"conv1", "layer2.0.conv1", "layer4.1.conv2"} < set(names)


def test_backbones_without_convolutions_are_refused() -> None:
    with pytest.raises(UserError, match="no 2D convolutions: choose a ResNet"):
        build_algorithm("pAdaIN", make_network(), len(SIZES))
