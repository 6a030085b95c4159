"""What fine-tuning does to the layers of a backbone: freeze some, train others more slowly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from torch import nn

from steppe.algorithms import Network
from steppe.errors import UserError

FREEZE_NONE, FREEZE_ALL = "none", "all"

_RESNET = {
    True: {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)"},
    False: {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)\.(\d+)"},
}
"""Patterns for torchvision's networks, in timm's notation: for whole stages, or for layers."""
CLASSIFIER = "~"
"""The classifier among the parameters that `layers` numbers."""


def _small(name: str) -> tuple[float]:
    """The layer of a parameter of the small networks: every three modules are one."""
    return (float("inf") if name == CLASSIFIER else int(name.partition(".")[0]) // 3,)


def layers(featurizer: nn.Module, stages: bool = False) -> dict[str, int]:
    """Number the layer of every parameter and of the classifier, from 0 for the stem upwards.

    timm's own grouping decides which parameters form a layer. A head's norm or projection belongs
    to the classifier's.

    Args:
        featurizer: a backbone.
        stages: number whole stages, where the backbone has them.

    Examples:
        >>> from steppe.training.backbones import build_network
        >>> network = build_network("small-cnn", n_classes=2, image_size=8, channels=1)
        >>> found = layers(network.featurizer)
        >>> found["0.weight"], found["1.weight"], found["3.weight"], found[CLASSIFIER]
        (0, 0, 1, 2)
    """
    from timm.models import group_parameters

    find = getattr(featurizer, "group_matcher", None)
    if find is not None:
        matcher = find(coarse=stages)
    else:
        matcher = _small if isinstance(featurizer, nn.Sequential) else _RESNET[stages]
    named = [*featurizer.named_parameters(), (CLASSIFIER, None)]
    whole = SimpleNamespace(named_parameters=lambda: named)  # all that timm looks at
    numbers: dict[str, int] = cast(Any, group_parameters)(whole, matcher, reverse=True)
    return numbers


def lr_factors(network: Network, decay: float) -> dict[nn.Parameter, float]:
    """Learning-rate multipliers: the classifier's is 1, and each layer's `decay` times the next's.

    The same as BEiT's and timm's layer decay.
    """
    if decay == 1:
        return {}
    found = layers(network.featurizer)
    named = network.featurizer.named_parameters()
    return {p: decay ** (found[CLASSIFIER] - found[name]) for name, p in named}


def freeze(featurizer: nn.Module, what: str, name: str) -> None:
    """Exclude layers from training.

    Args:
        featurizer: the backbone.
        what: ``none``, ``all``, the number of stages from the stem on, or the names of modules and
            parameters, separated by commas.
        name: the backbone's name, for messages.

    Raises:
        UserError: there are fewer stages, or nothing has such a name.
    """
    if what == FREEZE_NONE:
        return
    named = dict(featurizer.named_parameters())
    if what == FREEZE_ALL:
        chosen = set(named)
    elif what.isdecimal():
        stage_of = layers(featurizer, stages=True)
        n_stages = max(stage_of[name] for name in named) + 1
        if not 1 <= int(what) <= n_stages:
            raise UserError(
                f"freeze={what}: expected 1 (the stem) to {n_stages} (all) for {name!r}, which has "
                f"{n_stages} stages; {FREEZE_NONE} freezes nothing"
            )
        chosen = {key for key in named if stage_of[key] < int(what)}
    else:
        chosen = set()
        for part in filter(None, (part.strip() for part in what.split(","))):
            found = {key for key in named if key == part or key.startswith(f"{part}.")}
            if not found:
                known = ", ".join(dict.fromkeys(key.partition(".")[0] for key in named))
                raise UserError(
                    f"freeze={what}: {name!r} has no part {part!r}. Its parts: {known}; "
                    f"or pass {FREEZE_ALL}, {FREEZE_NONE} or a number of stages"
                )
            chosen |= found
    for key in chosen:
        named[key].requires_grad_(False)
