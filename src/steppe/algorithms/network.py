"""The network that algorithms train: a featurizer, dropout, a linear classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Featurizer = Callable[[Tensor], Tensor]
Tap = Callable[[int, Tensor], Tensor | None]
"""Is given the number of a stage and its output; what it returns, if anything, takes its place."""


@dataclass(frozen=True)
class Stage:
    """A module in the middle of a featurizer whose output algorithms may look at or change.

    Attributes:
        name: its path in the featurizer.
        channels: how many channels its output has.
        dim: the output's dimension that counts channels: 1 of images, -1 of tokens.
    """

    name: str
    channels: int
    dim: int = 1


class Compiled:
    """Code for any featurizer, compiled by inductor when it is first called.

    Two functions, because code for one function is chosen by what it was called with before: an
    evaluation that comes first must not change what is trained with.

    Args:
        batch: the size of the batches that are trained on; None: there is none.
        **options: inductor's.
    """

    def __init__(self, batch: int | None, **options: Any) -> None:
        self.batch = batch
        self._fixed = torch.compile(_call, dynamic=False, options=options)
        self._open = torch.compile(_call_open, options=options)

    def __call__(self, featurizer: Featurizer, images: Tensor) -> Tensor:
        if len(images) == self.batch and torch.is_grad_enabled():
            return self._fixed(featurizer, images)
        torch._dynamo.maybe_mark_dynamic(images, 0)
        return self._open(featurizer, images)


def _call(featurizer: Featurizer, images: Tensor) -> Tensor:
    return featurizer(images)


def _call_open(featurizer: Featurizer, images: Tensor) -> Tensor:
    return featurizer(images)


class Network(nn.Module):
    """Maps images to logits.

    Pixels may be given as they are, uint8, and are then normalized first; floating-point input is
    taken as normalized already.

    Args:
        featurizer: maps normalized images to N x `n_features`.
        n_features: the number of features.
        n_classes: the number of classes.
        mean: of each channel, for normalization, with pixels in [0, 1].
        std: likewise.
        dropout: the share of features dropped before the classifier, by masks from `draw_mask`.
        freeze_bn: keep batch norm in evaluation mode, statistics as they are; its scale and shift
            are trained. The default of DomainBed's published tables.
        stages: the featurizer's stages, the first first; a stem, if there is one, included.
    """

    mean: Tensor
    std: Tensor
    __call__: Callable[..., Tensor]

    def __init__(
        self,
        featurizer: nn.Module,
        n_features: int,
        n_classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        dropout: float = 0.0,
        freeze_bn: bool = True,
        stages: Sequence[Stage] = (),
    ) -> None:
        super().__init__()
        self.featurizer = featurizer
        self.classifier = nn.Linear(n_features, n_classes)
        self.n_features, self.n_classes = n_features, n_classes
        self.dropout = dropout
        self.freeze_bn = freeze_bn
        self.stages = tuple(stages)
        self.compiled: Compiled | None = None
        """The featurizer's compiled code, where there is some."""
        # Constants of the pipeline, not learned: not in checkpoints.
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)
        self.train()

    def normalize(self, images: Tensor) -> Tensor:
        """Pixels as the featurizer wants them; input that is not uint8 stays as it is."""
        if images.dtype is not torch.uint8:
            return images
        # Torchvision's ToTensor and Normalize, operation by operation, so that bits agree.
        return images.to(self.mean.dtype).div_(255).sub_(self.mean).div_(self.std)

    def draw_mask(self, images: Tensor) -> Tensor | None:
        """Draws what `features` multiplies by; None without dropout and in evaluation mode."""
        if not self.dropout or not self.training:
            return None
        return draw_mask(images, self.n_features, self.dropout)

    def features(
        self, images: Tensor, keep: Tensor | None = None, tap: Tap | None = None
    ) -> Tensor:
        """The features that the classifier sees.

        Args:
            images: pixels, or what `normalize` made of them.
            keep: dropout's mask; None: nothing is dropped.
            tap: called at every stage.
        """
        images = self.normalize(images)
        # Compiled code has no hooks; and 1, to the compiler, is a constant like no other.
        # (The number of images is asked for last: an export is for any.)
        compiled = self.compiled
        if compiled is not None and (tap is not None or len(images) == 1):
            compiled = None
        with tapped(self.featurizer, self.stages, tap):
            features: Tensor = (compiled or _call)(self.featurizer, images)
        return features if keep is None else features * keep

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        logits: Tensor = self.classifier(self.features(images, keep))
        return logits

    def train(self, mode: bool = True) -> Network:
        """Sets the mode, except that of frozen batch norm."""
        super().train(mode)
        if self.freeze_bn:
            for module in self.featurizer.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, freeze_bn={self.freeze_bn}"


def draw_mask(images: Tensor, width: int, dropout: float) -> Tensor:
    """Draws a row for each image: 0 for what is dropped, 1 / (1 - dropout) for the rest."""
    dtype = images.dtype if images.is_floating_point() else torch.get_default_dtype()
    kept = torch.rand(len(images), width, device=images.device) >= dropout
    return kept.to(dtype) / (1 - dropout)


@contextmanager
def tapped(featurizer: nn.Module, stages: Sequence[Stage], tap: Tap | None) -> Iterator[None]:
    """Has `tap` called with the output of every stage of a featurizer."""

    def hook(number: int) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        return lambda module, args, output: tap(number, output) if tap else None

    handles = [
        featurizer.get_submodule(stage.name).register_forward_hook(hook(number))
        for number, stage in enumerate(stages if tap else ())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
