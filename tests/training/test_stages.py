"""The stages that backbones have, and the algorithms that use them on real ones."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steppe.algorithms import Losses, Prepared, Stage, build_algorithm
from steppe.domains.batches import Batch
from steppe.errors import UserError
from steppe.training.backbones import build_network

LITE0 = "tf_efficientnet_lite0"
RESNET = {"maxpool": 64, "layer1": 64, "layer2": 128, "layer3": 256, "layer4": 512}
CASES: list[tuple[str, int, dict[str, int], int]] = [
    ("resnet18", 32, RESNET, 1),
    ("small-cnn", 8, {"2": 16, "5": 32}, 1),
    ("small-cnn", 32, {"2": 16, "5": 32, "8": 32}, 1),
    ("mnist-cnn", 28, {"2": 64, "5": 128, "8": 128, "11": 128}, 1),
    (LITE0, 64, {f"blocks.{i}": n for i, n in {0: 16, 1: 24, 2: 40, 4: 112, 6: 320}.items()}, 1),
    ("test_vit", 160, {f"blocks.{i}": 64 for i in range(6)}, -1),
    ("swin_tiny_patch4_window7_224", 224, {f"layers.{i}": 96 * 2**i for i in range(4)}, -1),
]
"""Names, sizes of images, channels of the stages, the dimension that counts them."""


def build(name: str, image_size: int, **options: Any) -> Any:
    torch.manual_seed(0)
    return build_network(name, n_classes=5, image_size=image_size, **options)


@pytest.mark.parametrize(("name", "size", "widths", "dim"), CASES)
def test_stages(name, size, widths, dim):
    network = build(name, size)
    assert network.stages == tuple(Stage(path, n, dim) for path, n in widths.items())
    seen: list[tuple[int, Tensor, Tensor]] = []

    def tap(number: int, output: Tensor) -> None:
        seen.append((number, output, output.clone()))

    with torch.no_grad():
        network.features(torch.rand(2, 3, size, size), tap=tap)
    assert [number for number, *_ in seen] == list(range(len(widths)))
    for number, output, copy in seen:
        assert output.dim() > 2
        assert output.shape[dim] == network.stages[number].channels
        assert torch.equal(output, copy)  # what follows a stage does not write over it


@pytest.mark.parametrize("channels", [1, 4])
def test_channels_of_the_images_change_no_stage(channels):
    for name, size in (("mnist-cnn", 28), (LITE0, 64)):
        assert build(name, size, channels=channels).stages == build(name, size).stages


def test_a_backbone_that_does_not_tell_has_no_stages():
    network = build("convmixer_768_32", 32)
    assert network.stages == ()
    with pytest.raises(UserError, match="'MIRO'.* choose a ResNet"):
        build_algorithm("MIRO", network, 2)


def learn(algorithm: str, backbone: str, **options: Any) -> tuple[Any, Prepared, Losses]:
    """One forward and backward pass; every parameter must get a gradient."""
    built: Any = build_algorithm(algorithm, build(backbone, 64), 2, **options)
    images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    batches = [Batch(images[:2], torch.tensor([0, 3])), Batch(images[2:], torch.tensor([4, 1]))]
    prepared = built.prepare(batches)
    losses = built(prepared)
    losses.total.backward()
    (objective,) = built.objectives()
    assert {*objective.parameters} >= {*built.network.parameters()}
    for parameter in objective.parameters:
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
    return built, prepared, losses


@pytest.mark.parametrize("backbone", ["resnet18", LITE0])
def test_miro_on_a_real_backbone(backbone):
    miro, prepared, losses = learn("MIRO", backbone)
    # No distance yet; the variances are 0.1, and one stage counts as much as another.
    assert losses.parts["penalty"].item() == pytest.approx(5 * math.log(0.1) / 2, rel=1e-5)
    assert [len(raw) for raw in miro.raw_variances] == [s.channels for s in miro.network.stages]
    with torch.no_grad():
        next(miro.network.parameters()).mul_(1.5)
    assert miro(prepared).parts["penalty"] > losses.parts["penalty"] + 1e-3


@pytest.mark.parametrize(
    ("backbone", "mixed"),
    [
        ("resnet18", ["layer1", "layer2", "layer3"]),  # conv2_x to conv4_x
        (LITE0, ["blocks.1", "blocks.2", "blocks.4"]),
    ],
)
def test_mixstyle_on_a_real_backbone(backbone, mixed):
    mixstyle, prepared, losses = learn("MixStyle", backbone, p=1.0)
    assert [mixstyle.network.stages[number].name for number in prepared.draws["mixes"]] == mixed
    # It leaves nothing behind.
    images, network = prepared.images, mixstyle.network
    with torch.no_grad():
        plain = nn.functional.cross_entropy(mixstyle.predict(images), prepared.labels)
        assert torch.equal(mixstyle.predict(images), network.classifier(network.featurizer(images)))
    assert plain != losses.total


@pytest.mark.parametrize(("backbone", "stem"), [("resnet18", "conv1"), (LITE0, "conv_stem")])
def test_arm_on_a_real_backbone(backbone, stem):
    arm, prepared, _ = learn("ARM", backbone)
    old, new = (n.featurizer.get_submodule(stem) for n in (build(backbone, 64), arm.network))
    assert torch.equal(new.weight, torch.cat([old.weight, old.weight[:, :1]], 1))
    assert new.weight.grad[:, 3].abs().max() > 0
    for convolution in (arm.context[0], arm.context[3], arm.context[6]):
        assert convolution.weight.grad.abs().max() > 0
    with torch.no_grad():
        assert arm.eval().predict(prepared.images[:3]).shape == (3, 5)
