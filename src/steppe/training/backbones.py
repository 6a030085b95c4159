"""Backbones by name: torchvision's ResNets, two networks for small images, and all of timm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from steppe.algorithms import Network, Stage
from steppe.algorithms.network import tapped
from steppe.errors import UserError, unknown

from . import tuning
from .lora import add_lora
from .weights import load_weights
from .zoo import RESNET50_V1, fixed_size, of_library, timm_facts

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
TORCHVISION, SMALL = of_library("torchvision"), of_library("steppe")


@dataclass(frozen=True)
class Backbone:
    """A featurizer and the facts needed to use it."""

    module: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]
    heads: tuple[str, ...]
    """The library's names for the classifier; a distilled network averages two."""
    stages: Mapping[str, int | None] = field(default_factory=dict)
    """Paths of its stages, with the channel counts that the library declares."""
    optional: tuple[str, ...] = ()
    """Keys of its state dict that weight files may lack."""


def build_network(
    name: str,
    *,
    n_classes: int,
    image_size: int,
    channels: int = 3,
    weights: str = "none",
    dropout: float = 0.0,
    freeze_bn: bool = True,
    drop_path: float = 0.0,
    freeze: str = tuning.FREEZE_NONE,
    lora: int = 0,
    embedding: int | None = None,
) -> Network:
    """Build the network of a run.

    Args:
        name: ``resnet18`` or ``resnet50`` (torchvision), ``resnet50-v1`` (ResNet-50 with the stride
            in the 1x1 convolution), ``small-cnn``, ``mnist-cnn``, or any timm model.
        n_classes: the number of classes.
        image_size: height and width of the images.
        channels: channels of the images.
        weights: ``none``, ``imagenet`` (downloaded by torchvision or timm), or the path of a run,
            or of a safetensors or torch checkpoint file with the backbone's weights.
        dropout: dropout rate before the classifier.
        freeze_bn: freeze batch-norm statistics.
        drop_path: rate of stochastic depth, which skips residual branches; timm models only.
        freeze: layers to exclude from training, as in `steppe.training.tuning.freeze`.
        lora: rank of LoRA's updates, which are trained instead of the backbone; 0 for none.
        embedding: keep the projection to the joint space of images and texts, which has so many
            dimensions, and divide features by their norm.

    Examples:
        >>> network = build_network("small-cnn", n_classes=10, image_size=8, channels=1)
        >>> network(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape
        torch.Size([2, 10])
    """
    backbone = _build(name, image_size, channels, weights == "imagenet", drop_path, embedding or 0)
    if weights not in ("none", "imagenet"):
        load_weights(backbone.module, Path(weights), name, backbone.heads, backbone.optional)
    n_features, stages = _measure(backbone, name, channels, image_size)
    if embedding not in (None, n_features):
        raise UserError(
            f"embedding={embedding} does not fit backbone {name!r}, which gives {n_features} "
            "features: choose the image tower that the texts were embedded with"
        )
    if lora:
        add_lora(backbone.module, lora, name)
    tuning.freeze(backbone.module, freeze, name)
    return Network(
        backbone.module,
        n_features,
        n_classes,
        backbone.mean,
        backbone.std,
        dropout=dropout,
        freeze_bn=freeze_bn,
        stages=stages,
        unit_features=embedding is not None,
    )


def _build(
    name: str,
    image_size: int,
    channels: int,
    pretrained: bool,
    drop_path: float,
    embedding: int,
) -> Backbone:
    if drop_path and name in (*SMALL, *TORCHVISION):
        raise UserError(f"drop_path={drop_path:g}: {name!r} has none, only timm's models have")
    if name in SMALL:
        if pretrained:
            raise UserError(f"backbone {name!r} has no ImageNet weights: set weights=none")
        small = _small_cnn(channels, image_size) if name == "small-cnn" else _mnist_cnn(channels)
        blocks = range(2, len(small) - 1, 3)  # the last of every three layers
        stages = dict.fromkeys(map(str, blocks))
        return Backbone(small, (0.0,) * channels, (1.0,) * channels, ("classifier",), stages)
    if name in TORCHVISION:
        if channels != 3:
            raise UserError(f"backbone {name!r} needs images with 3 channels, got {channels}")
        return _torchvision(name, pretrained)
    return _timm(name, image_size, channels, pretrained, drop_path, embedding)


def _torchvision(name: str, pretrained: bool) -> Backbone:
    from torchvision.models import get_model_weights

    model = _torchvision_model(name)
    if pretrained:
        if name == RESNET50_V1:
            raise UserError(
                f"torchvision has no ImageNet weights for {name!r}: pass a local file with "
                "--weights FILE, or train from scratch with --weights none"
            )
        weights = get_model_weights(name)["IMAGENET1K_V1"]
        try:
            state = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        except (OSError, RuntimeError) as error:  # no connection, or a wrong hash
            raise UserError(_no_imagenet(name, error)) from None
        model.load_state_dict(state)
    model.fc = nn.Identity()
    stages = ("maxpool", "layer1", "layer2", "layer3", "layer4")
    return Backbone(model, IMAGENET_MEAN, IMAGENET_STD, ("fc",), dict.fromkeys(stages))


def _torchvision_model(name: str, **options: Any) -> Any:
    from torchvision.models import get_model

    model = get_model("resnet50" if name == RESNET50_V1 else name, weights=None, **options)
    if name == RESNET50_V1:
        for stage in (model.layer2, model.layer3, model.layer4):
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return model


def _timm(
    name: str, image_size: int, channels: int, pretrained: bool, drop_path: float, embedding: int
) -> Backbone:
    import timm

    if not timm.is_model(name):
        known = (*TORCHVISION, *SMALL)
        close = timm.list_models(f"{name[:6]}*")[:200]
        message = unknown("backbone", name, [*known, *close]).partition(" Known:")[0]
        raise UserError(f"{message} Known: {', '.join(known)}, and every timm model")
    facts = timm_facts(name)
    # CLIP's projection is the classifier of timm's model.
    projects = facts is not None and embedding == facts.num_classes != 0
    if embedding and not projects and "clip" in name and facts is not None and facts.num_classes:
        # Its width before the projection may be the same number by chance.
        raise UserError(
            f"embedding={embedding} does not fit backbone {name!r}, whose own head has "
            f"{facts.num_classes} outputs: choose the image tower that the texts were embedded "
            "with" + _projecting(name, embedding)
        )
    options: dict[str, Any] = {"num_classes": embedding if projects else 0, "in_chans": channels}
    if (own_size := fixed_size(name)) not in (None, image_size):
        options["img_size"] = image_size
    if drop_path:
        options["drop_path_rate"] = drop_path
    try:
        model = timm.create_model(name, pretrained=pretrained, **options)
    except TypeError as error:
        if "drop_path_rate" in str(error):
            raise UserError(f"drop_path={drop_path:g}: {name!r} does not have it") from None
        if "img_size" in str(error):
            raise UserError(
                f"backbone {name!r} does not accept image_size={image_size}, only {own_size}"
            ) from None
        raise
    except (OSError, RuntimeError) as error:
        if pretrained:
            raise UserError(_no_imagenet(name, error)) from None
        raise UserError(f"backbone {name!r} cannot be built: {_reason(error)}") from None
    cfg = cast(Any, model).pretrained_cfg
    mean, std = (tuple(cfg[k]) if channels == 3 else (0.5,) * channels for k in ("mean", "std"))
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", (1,))[0]
    if "img_size" in options and image_size % patch:
        raise UserError(
            f"backbone {name!r} does not accept image_size={image_size}, only multiples of "
            f"{patch}; its own is {own_size}"
        )
    heads = _timm_heads(cfg)
    if not projects:
        return Backbone(model, mean, std, heads, _timm_stages(model))
    biases = tuple(f"{head}.bias" for head in heads)
    for bias in biases:  # CLIP's projection has none
        nn.init.zeros_(model.get_parameter(bias))
    return Backbone(model, mean, std, (), _timm_stages(model), biases)


def _projecting(name: str, embedding: int) -> str:
    """Which weights of a model come with a projection to so many dimensions, for messages."""
    import timm

    for tagged in timm.list_pretrained(f"{name.partition('.')[0]}.*"):
        if (facts := timm_facts(tagged)) is not None and facts.num_classes == embedding:
            return f", and name its weights, such as {tagged!r}"
    return ""


def _timm_heads(cfg: Mapping[str, Any]) -> tuple[str, ...]:
    names = cfg.get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _timm_stages(model: nn.Module) -> dict[str, int | None]:
    found = getattr(model, "feature_info", None)
    paths = {name for name, _ in model.named_modules()}
    rows = found if isinstance(found, list) else []
    return {row["module"]: row["num_chs"] for row in rows if row.get("module") in paths}


def _measure(
    backbone: Backbone, name: str, channels: int, image_size: int
) -> tuple[int, list[Stage]]:
    """Measure the feature count and the stages' output shapes on one black image.

    What timm's models declare is not always right.
    """
    module = backbone.module.eval()  # so that batch-norm statistics stay unchanged
    shapes: dict[int, torch.Size] = {}

    def tap(number: int, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() > 2:
            shapes.setdefault(number, output.shape)

    paths = [Stage(path, 0) for path in backbone.stages]
    try:
        with torch.no_grad(), tapped(module, paths, tap):
            features = module(torch.zeros(1, channels, image_size, image_size))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(
            f"backbone {name!r} does not accept image_size={image_size}: {_reason(error)}"
        ) from None
    if features.dim() != 2 or not features.shape[1]:
        raise UserError(f"backbone {name!r} cannot be used: it has no features before its logits")
    stages = []
    for number, shape in shapes.items():  # in execution order
        said = backbone.stages[paths[number].name]
        dim = -1 if len(shape) == 3 or (said == shape[-1] != shape[1]) else 1
        stages.append(Stage(paths[number].name, shape[dim], dim))
    return int(features.shape[1]), stages


def library_state(name: str, network: Network, image_size: int) -> dict[str, Tensor]:
    """Rename a network's weights to the names of the backbone's own library.

    The library's model with as many classes loads them with ``load_state_dict`` and gives the same
    logits, which is verified here. The small networks have no library.
    """
    if network.unit_features:
        raise UserError(
            "the network cannot be exported under the library's names: it divides features by "
            "their norm before the classifier. Export it as .pt2, or use "
            "steppe.training.load_model."
        )
    n_classes, channels = network.classifier.out_features, network.mean.numel()
    model: nn.Module | None = None
    heads: tuple[str, ...] = ("classifier",)
    if name in TORCHVISION:
        model, heads = _torchvision_model(name, num_classes=n_classes), ("fc",)
    elif name not in SMALL:
        import timm

        size: dict[str, Any] = (
            {} if fixed_size(name) in (None, image_size) else {"img_size": image_size}
        )
        model = timm.create_model(name, num_classes=n_classes, in_chans=channels, **size)
        heads = _timm_heads(cast(Any, model).pretrained_cfg)
    state: dict[str, Tensor] = network.featurizer.state_dict()
    for head in heads:
        state |= {f"{head}.{k}": v for k, v in network.classifier.state_dict().items()}
    if model is None:
        return state
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    if {k: v.numel() for k, v in shapes.items()} == {k: v.numel() for k, v in state.items()}:
        # Some classifiers are 1x1 convolutions.
        state = {key: value.reshape(shapes[key]) for key, value in state.items()}
        model.load_state_dict(state)
        ramp = torch.linspace(-1, 1, channels * image_size**2)
        ramp = ramp.view(1, channels, image_size, image_size)
        with torch.no_grad():
            if torch.allclose(model.eval()(ramp), network.eval()(ramp), rtol=1e-3, atol=1e-4):
                return state
    raise UserError(
        f"the network cannot be exported for timm: the classifier of {name!r} is not a single "
        "linear layer. Use it with steppe.training.load_model."
    )


def _no_imagenet(name: str, error: Exception) -> str:
    return (
        f"the ImageNet weights of {name!r} could not be downloaded ({_reason(error)}): pass a "
        "local file with --weights FILE, or train from scratch with --weights none"
    )


def _reason(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _small_cnn(channels: int, image_size: int) -> nn.Sequential:
    """Convolutions with batch norm that halve the image until it is 4 x 4 or smaller.

    The first one keeps the size of a very small image. There is no pooling, whose gradient is
    nondeterministic on a GPU.
    """
    layers: list[nn.Module] = []
    width = 16
    halvings = [2] * math.ceil(math.log2(max(image_size, 8) / 4))
    for stride in [1, *halvings] if image_size < 16 else halvings:
        layers += [
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        channels, width = width, 32
    return nn.Sequential(*layers, nn.Flatten())


def _mnist_cnn(channels: int) -> nn.Sequential:
    """DomainBed's network for 28 x 28 digits: four convolutions with group norm, then the mean."""
    layers: list[nn.Module] = []
    for width, stride in ((64, 1), (128, 2), (128, 1), (128, 1)):
        layers += [
            nn.Conv2d(channels, width, 3, stride=stride, padding=1),
            nn.ReLU(),
            nn.GroupNorm(8, width),
        ]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
