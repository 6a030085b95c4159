"""Names of steppe's own and torchvision's backbones, available without importing torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from steppe.registry import Registry

RESNET50_V1 = "resnet50-v1"


@dataclass(frozen=True)
class BackboneSpec:
    """Facts about a backbone that do not require building it.

    Attributes:
        library: where its layers come from, torchvision or steppe.
        parameters: count without a classifier; for the small networks, on grayscale images of 8 and
            28 pixels.
    """

    name: str
    summary: str
    citation: str
    library: str
    parameters: int


_RESNET = "He et al., Deep Residual Learning for Image Recognition, CVPR 2016"
BACKBONES = Registry(
    "backbone",
    lambda: (
        BackboneSpec(
            "resnet18",
            "The small ResNet, with torchvision's ImageNet weights (V1).",
            _RESNET,
            "torchvision",
            11_176_512,
        ),
        BackboneSpec(
            "resnet50",
            "DomainBed's backbone, with torchvision's ImageNet weights (V1).",
            _RESNET,
            "torchvision",
            23_508_032,
        ),
        # For weights trained with this variant, such as those of Keras Applications.
        BackboneSpec(
            RESNET50_V1,
            "ResNet-50 with a stage's stride in its first 1x1 convolution; needs a weights file.",
            _RESNET,
            "torchvision",
            23_508_032,
        ),
        BackboneSpec(
            "small-cnn",
            "A few convolutions with batch norm, for small images; from scratch.",
            "",
            "steppe",
            4_848,
        ),
        BackboneSpec(
            "mnist-cnn",
            "DomainBed's network for 28 x 28 digits; from scratch.",
            "Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, ICLR 2021",
            "steppe",
            370_560,
        ),
    ),
)


def fixed_size(name: str) -> int | None:
    """The image size that a timm model is built for; None if it takes any, or is not timm's."""
    cfg = None if name in BACKBONES else timm_facts(name)
    return int(cfg.input_size[-1]) if cfg is not None and cfg.fixed_input_size else None


def timm_facts(name: str) -> Any | None:
    """What timm knows of a model without building it; None if it knows no such name or tag."""
    import timm

    with suppress(RuntimeError):  # an unknown tag
        return timm.models.get_pretrained_cfg(name)
    return None


def of_library(library: str) -> tuple[str, ...]:
    return tuple(spec.name for spec in BACKBONES.entries() if spec.library == library)
