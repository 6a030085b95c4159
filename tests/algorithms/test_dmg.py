"""DMG: the masks' values, gradients and overlap, and predictions against explicit passes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from steppe.algorithms import build_algorithm
from steppe.errors import UserError
from steppe.training.backbones import build_network
from tests.algorithms.oracles import N_CLASSES, SIZES, gradients, make_batches, make_network


def make(**options: Any) -> Any:
    return build_algorithm("DMG", make_network(), len(SIZES), **options).double()


def make_staged(stages: int) -> Any:
    torch.manual_seed(0)
    network = build_network("small-cnn", n_classes=N_CLASSES, image_size=4, freeze_bn=False)
    return build_algorithm("DMG", network, len(SIZES), stages=stages).double()


def test_with_every_feature_and_no_penalty_it_is_erm() -> None:
    dmg = make(penalty=0.0)
    for logits in dmg.mask_logits:
        torch.nn.init.constant_(logits, 40.0)
    prepared = dmg.prepare(make_batches())
    erm = build_algorithm("ERM", dmg.network, len(SIZES))
    found, expected = dmg(prepared).total, erm(prepared).total
    assert torch.equal(found, expected)
    assert all(map(torch.equal, gradients(found, dmg.network), gradients(expected, dmg.network)))


def test_the_overlap_of_equal_masks() -> None:
    dmg = make(penalty=2.0)
    p = torch.tensor(0.3, dtype=torch.float64)
    torch.nn.init.constant_(dmg.mask_logits[0], p.logit().item())
    losses = dmg(dmg.prepare(make_batches()))
    torch.testing.assert_close(losses.parts["overlap"], p / (2 - p))
    torch.testing.assert_close(losses.total, losses.parts["risk"] + 2 * p / (2 - p))


def test_masks_are_zeros_and_ones_with_the_gradient_of_their_probability() -> None:
    dmg = make(penalty=0.0)
    prepared = dmg.prepare(make_batches())
    (logits,), (uniforms,) = dmg.mask_logits, prepared.draws["uniforms"]
    domains = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    p = logits.detach().sigmoid()[domains]
    mask = (uniforms < p).double().requires_grad_()
    assert 0.4 < mask.mean() < 0.8
    features = dmg.network.features(prepared.images)
    loss = F.cross_entropy(dmg.network.classifier(features * mask), prepared.labels)
    found = dmg(prepared).total
    torch.testing.assert_close(found, loss, rtol=1e-14, atol=0)
    (by_mask,) = torch.autograd.grad(loss, mask)
    expected = torch.zeros_like(logits).index_add(0, domains, by_mask * p * (1 - p))
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], expected)


@pytest.mark.parametrize("stages", [0, 1])
def test_later_passes_keep_the_first_ones_masks(stages: int) -> None:
    dmg = make_staged(stages)
    prepared = dmg.prepare(make_batches())
    first = dmg(prepared)
    assert len(first.aux) == stages + 1
    for logits in dmg.mask_logits:
        torch.nn.init.constant_(logits, -5.0)
    again = dmg(prepared, first=first.aux)
    assert torch.equal(again.parts["risk"], first.parts["risk"])
    assert not torch.equal(again.parts["overlap"], first.parts["overlap"])
    assert not torch.equal(dmg(prepared).parts["risk"], first.parts["risk"])


def masked(dmg: Any, images: Tensor, masks: list[Tensor]) -> Tensor:
    """One explicit pass, by the layers of the small network."""
    x = images.double() / 255
    for number, layer in enumerate(dmg.network.featurizer):
        x = layer(x)
        if number == 2 and len(masks) == 2:
            x = x * masks[0][:, None, None]
    return dmg.network.classifier(x * masks[-1])


@pytest.mark.parametrize("stages", [0, 1])
def test_predictions(stages: int) -> None:
    """Soft masks of all domains for unseen ones, and hard ones for a source domain."""
    dmg = make_staged(stages).eval()
    with torch.no_grad():
        for logits in dmg.mask_logits:
            logits.sub_(0.5)
    images = torch.randint(256, (4, 3, 4, 4), dtype=torch.uint8)
    soft = [[m[d].sigmoid() for m in dmg.mask_logits] for d in range(3)]
    expected = torch.stack([masked(dmg, images, masks) for masks in soft]).mean(0)
    torch.testing.assert_close(dmg.predict(images), expected)
    hard = [(m[1] > 0).double() for m in dmg.mask_logits]
    torch.testing.assert_close(dmg.predict_source(images, 1), masked(dmg, images, hard))


def test_more_stages_than_there_are() -> None:
    with pytest.raises(UserError, match="stages must be <= 1, .* got 2"):
        make_staged(2)
