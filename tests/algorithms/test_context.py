"""MTL and ARM, which see an image together with others of its domain, against their formulas."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.algorithms import Losses, Network, build_algorithm
from steppe.errors import UserError
from tests.algorithms.oracles import (
    MEAN,
    N_CLASSES,
    N_FEATURES,
    SIDE,
    SIZES,
    STD,
    Image,
    assert_equal_losses,
    buffers,
    cross_entropy,
    features,
    gradients,
    images_of,
    make_batches,
    make_network,
    mean,
    move,
)


def make_mtl(dropout: float = 0.0, **options: Any) -> Any:
    return build_algorithm("MTL", make_network(dropout), len(SIZES), **options).double()


def mtl_logits(mtl: Any, phi: Tensor, embedding: Tensor) -> Tensor:
    """The classifier has a block for the features and one for the domain."""
    own, context = mtl.network.classifier.weight.split(N_FEATURES, 1)
    return own @ phi + context @ embedding + mtl.network.classifier.bias


def mtl_step(mtl: Any, domains: list[list[Image]], memory: list[Tensor]) -> tuple[Tensor, Any]:
    """The loss, and what is to be remembered of each domain."""
    total, remembered = torch.zeros((), dtype=torch.float64), []
    for domain, before in zip(domains, memory, strict=True):
        phis = [features(mtl.network, image) for image in domain]
        embedding = mtl.ema * mean(phis) + (1 - mtl.ema) * before
        total = total + mean(
            cross_entropy(mtl_logits(mtl, phi, embedding), image.label)
            for phi, image in zip(phis, domain, strict=True)
        )
        remembered.append(embedding.detach())
    return total, remembered


@pytest.mark.parametrize(("dropout", "ema"), [(0.0, 0.99), (0.5, 0.6)])
def test_mtl_remembers_the_mean_features_of_each_domain(dropout, ema):
    mtl = make_mtl(dropout, ema=ema)
    memory: Any = [torch.zeros(N_FEATURES, dtype=torch.float64) for _ in SIZES]
    for step in range(3):
        batches = make_batches(seed=step)
        prepared = mtl.prepare(batches)
        expected, remembered = mtl_step(mtl, images_of(batches, prepared.keep), memory)
        losses = mtl(prepared)
        assert_equal_losses(mtl, losses, Losses(expected))
        torch.testing.assert_close(mtl.embeddings, torch.stack(memory), rtol=1e-9, atol=0)
        move(mtl, step)
        assert mtl(prepared, first=losses.aux).total != losses.total
        torch.testing.assert_close(mtl.embeddings, torch.stack(memory), rtol=1e-9, atol=0)
        mtl.commit(prepared, {"main": losses})  # of the first pass, at the weights before
        memory = remembered
        torch.testing.assert_close(mtl.embeddings, torch.stack(memory), rtol=1e-9, atol=0)
        assert not mtl.embeddings.requires_grad
    assert "embeddings" in mtl.state_dict()


@pytest.mark.parametrize("ema", [0.0, 1.0])
def test_mtl_at_the_ends_of_its_average(ema):
    mtl = make_mtl(ema=ema)
    batches = make_batches()
    prepared = mtl.prepare(batches)
    before = mtl(prepared)
    mtl.embeddings.normal_()
    after = mtl(prepared)
    assert torch.equal(after.total, before.total) == (ema == 1)  # history is ignored, or all
    assert torch.equal(after.state["embeddings"], mtl.embeddings) == (ema == 0)


def test_mtl_predicts_with_the_mean_of_what_it_is_shown():
    mtl = make_mtl(0.5, ema=0.5)
    mtl.embeddings.normal_()
    mtl.eval()
    (batch,) = make_batches((6,), seed=5)
    (domain,) = images_of([batch], None)
    kept = buffers(mtl)
    phis = [features(mtl.network, image) for image in domain]
    for shown in (range(6), range(4), [2]):
        indices = list(shown)
        embedding = mean(phis[i] for i in indices)
        expected = torch.stack([mtl_logits(mtl, phis[i], embedding) for i in indices])
        found = mtl.predict(batch.images[indices])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(value, kept[name]) for name, value in buffers(mtl).items())


def make_convolutional(dropout: float = 0.0) -> Network:
    torch.manual_seed(0)
    featurizer = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 3, 3, stride=2, padding=1, bias=False),  # three channels go in and come out
        nn.Tanh(),
        nn.Conv2d(3, 4, 2),
        nn.Tanh(),
        nn.Flatten(),
    )
    return Network(featurizer, 4, N_CLASSES, MEAN, STD, dropout).double()


def make_arm(dropout: float = 0.0, **options: Any) -> Any:
    arm = build_algorithm("ARM", make_convolutional(dropout), len(SIZES), **options).double()
    for module in arm.context:
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return arm


def contexts(arm: Any, pixels: Tensor) -> Tensor:
    """Three convolutions with batch norm and ReLUs between them, a channel for every image."""
    x = pixels
    for module in arm.context:
        if isinstance(module, nn.Conv2d):
            x = F.conv2d(x, module.weight, module.bias, padding=2)
        elif isinstance(module, nn.BatchNorm2d):
            centre, spread = module.running_mean, module.running_var
            if module.training:
                centre = x.mean((0, 2, 3))
                spread = ((x - centre[:, None, None]) ** 2).mean((0, 2, 3))
            scale = module.weight / (spread + 1e-5) ** 0.5
            x = (x - centre[:, None, None]) * scale[:, None, None] + module.bias[:, None, None]
        else:
            x = torch.where(x > 0, x, 0)
    assert x.shape == (len(pixels), 1, *pixels.shape[2:])
    return x


def arm_logits(arm: Any, domains: list[list[Image]], support: int) -> list[Tensor]:
    """Every image with the mean context of the `support` that it is among, in order."""
    pixels = torch.stack([image.pixels for image in chain(*domains)])
    context = iter(contexts(arm, pixels))
    found = []
    for domain in domains:
        own = [next(context) for _ in domain]
        for i, image in enumerate(domain):
            start = i // support * support
            seen = torch.cat([image.pixels, mean(own[start : start + support])])
            phi = features(arm.network, image._replace(pixels=seen))
            found.append(arm.network.classifier.weight @ phi + arm.network.classifier.bias)
    return found


@pytest.mark.parametrize(("dropout", "support"), [(0.0, 3), (0.5, 8)])
def test_arm_trains_both_networks(dropout, support):
    arm = make_arm(dropout, support=support)
    batches = make_batches()
    prepared = arm.prepare(batches)
    domains = images_of(batches, prepared.keep)
    labels = [image.label for image in chain(*domains)]
    outputs = arm_logits(arm, domains, support)
    expected = mean(cross_entropy(z, y) for z, y in zip(outputs, labels, strict=True))
    found = arm(prepared).total
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    (objective,) = arm.objectives()
    names = [name for name, _ in arm.named_parameters()]
    assert {*objective.parameters} == {*arm.parameters()}
    pairs = zip(names, gradients(found, arm), gradients(expected, arm), strict=True)
    for name, a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)
        if name not in ("context.0.bias", "context.3.bias"):  # which batch norm undoes
            assert b.abs().max() > 1e-6, name


def test_arm_predicts_in_support_sets_of_an_unseen_domain():
    arm = make_arm(0.5, support=4).eval()
    (batch,) = make_batches((10,), seed=5)
    domains = images_of([batch], None)
    kept = copy.deepcopy(arm.state_dict())
    expected = torch.stack(arm_logits(arm, domains, 4))  # sets of 4, 4 and 2
    torch.testing.assert_close(arm.predict(batch.images), expected, rtol=1e-9, atol=1e-12)
    pixels = torch.stack([image.pixels for image in domains[0]])
    torch.testing.assert_close(arm.predict(pixels), expected, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(value, kept[name]) for name, value in arm.state_dict().items())


def test_arm_widens_the_first_convolution():
    before, network = make_convolutional(), make_convolutional()
    build_algorithm("ARM", network, len(SIZES))
    old, new = (n.featurizer[0] for n in (before, network))
    assert new.in_channels == 4
    assert new.weight.requires_grad
    assert torch.equal(new.weight[:, :3], old.weight)
    assert torch.equal(new.weight[:, 3], old.weight[:, 0])
    assert torch.equal(new.bias, old.bias)
    kept, found = before.state_dict(), network.state_dict()
    assert all(
        torch.equal(found[name], kept[name]) for name in kept if name != "featurizer.0.weight"
    )
    # A context of zeros changes nothing.
    pixels = torch.rand(2, 3, SIDE, SIDE, dtype=torch.float64)
    torch.testing.assert_close(network(F.pad(pixels, (0, 0, 0, 0, 0, 1))), before(pixels))


def test_arm_needs_a_convolution():
    with pytest.raises(UserError, match=r"'ARM'.*convolution.*choose another backbone"):
        build_algorithm("ARM", make_network(), len(SIZES))
