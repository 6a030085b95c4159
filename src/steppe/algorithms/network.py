"""The network that algorithms train: a featurizer, dropout and a linear classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from .folding import backend

Featurizer = Callable[[Tensor], Tensor]
Tap = Callable[[int, Tensor], Tensor | None]
"""Called with a stage's index and output; a returned tensor replaces the output."""


SCALE = 100.0
"""What CLIP multiplies cosines by: the inverse of its temperature."""


@dataclass(frozen=True)
class Stage:
    """A module inside a featurizer whose output algorithms may read or replace.

    Attributes:
        name: its path in the featurizer.
        channels: the number of output channels.
        dim: the channel dimension of the output: 1 for images, -1 for tokens.
    """

    name: str
    channels: int
    dim: int = 1


@dataclass
class Domains:
    """The domains of the images in a pass, for layers that treat domains differently.

    Attributes:
        sizes: images per source domain, in order; None if they are not known.
        only: the one source domain that all images come from, if there is one.
    """

    sizes: tuple[int, ...] | None = None
    only: int | None = None


class Compiled:
    """A featurizer call compiled on first use, with frozen batch norm folded into convolutions.

    Training and evaluation use separate functions because dynamo caches code per function: an
    evaluation that runs first must not change the code used for training.

    Args:
        batch: the training batch size; None if it is not fixed.
        **options: options for inductor.
    """

    def __init__(self, batch: int | None, **options: Any) -> None:
        self.batch = batch
        self._fixed = torch.compile(_call, dynamic=False, backend=backend(**options))
        self._open = torch.compile(_call_open, backend=backend(**options))

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
    """Map images to logits.

    The network normalizes uint8 pixels and treats floating-point input as already normalized.

    Args:
        featurizer: maps normalized images to N x `n_features`.
        n_features: the number of features.
        n_classes: the number of classes.
        mean: per-channel mean for normalization, with pixels in [0, 1].
        std: per-channel standard deviation, likewise.
        dropout: the fraction of features to drop before the classifier, by masks from `draw_mask`.
        freeze_bn: keep batch norm in evaluation mode with fixed statistics, but train its scale
            and shift, as in DomainBed's published tables. A batch norm whose parameters are frozen
            always keeps its statistics.
        stages: the featurizer's stages in order, including the stem if there is one.
        unit_features: divide features by their norm, as CLIP does.
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
        unit_features: bool = False,
    ) -> None:
        super().__init__()
        self.featurizer = featurizer
        self.classifier = nn.Linear(n_features, n_classes)
        self.n_features, self.n_classes = n_features, n_classes
        self.dropout = dropout
        self.freeze_bn = freeze_bn
        self.unit_features = unit_features
        self.stages = tuple(stages)
        self.domains = Domains()
        """Those of the current pass; layers may keep a reference."""
        self.compiled: Compiled | None = None
        """The compiled featurizer, if any."""
        # Constants of the data pipeline, so not saved in checkpoints.
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)
        self._standardizes = any(mean) or any(s != 1 for s in std)
        self.train()

    def normalize(self, images: Tensor) -> Tensor:
        """Normalize uint8 pixels; return any other input unchanged."""
        if images.dtype is not torch.uint8:
            return images
        # The same operations as torchvision's ToTensor and Normalize, for bit-identical results.
        images = images.to(self.mean.dtype).div_(255)
        return images.sub_(self.mean).div_(self.std) if self._standardizes else images

    def draw_mask(self, images: Tensor) -> Tensor | None:
        """Draw a dropout mask for `features`; None without dropout or in evaluation mode."""
        if not self.dropout or not self.training:
            return None
        return draw_mask(images, self.n_features, self.dropout)

    def features(
        self,
        images: Tensor,
        keep: Tensor | None = None,
        tap: Tap | None = None,
        at: Sequence[Stage] | None = None,
    ) -> Tensor:
        """Compute the classifier's input.

        Args:
            images: uint8 pixels or normalized images.
            keep: dropout mask; None drops nothing.
            tap: called after every stage.
            at: any modules of the featurizer to tap (default: its stages).
        """
        images = self.normalize(images)
        # Compiled code skips hooks, and the compiler specializes on a batch of one image. The
        # batch size is checked last because an export must not depend on it.
        compiled = self.compiled
        if compiled is not None and (tap is not None or len(images) == 1):
            compiled = None
        with tapped(self.featurizer, self.stages if at is None else at, tap):
            features: Tensor = (compiled or _call)(self.featurizer, images)
        if self.unit_features:
            features = F.normalize(features, dim=1)
        return features if keep is None else features * keep

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        logits: Tensor = self.classifier(self.features(images, keep))
        return logits

    @contextmanager
    def of_domains(
        self, sizes: tuple[int, ...] | None = None, only: int | None = None
    ) -> Iterator[None]:
        """Say in `domains` where the images of a pass come from, while the context is open."""
        before = self.domains.sizes, self.domains.only
        self.domains.sizes, self.domains.only = sizes, only
        try:
            yield
        finally:
            self.domains.sizes, self.domains.only = before

    def train(self, mode: bool = True) -> Network:
        super().train(mode)
        for module in self.featurizer.modules():
            frozen = self.freeze_bn or any(not p.requires_grad for p in module.parameters())
            if isinstance(module, _BatchNorm) and frozen:
                module.eval()
        return self

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, freeze_bn={self.freeze_bn}"


def draw_mask(images: Tensor, width: int, dropout: float) -> Tensor:
    """Draw one row per image: 0 for dropped entries, 1 / (1 - dropout) for the others."""
    dtype = images.dtype if images.is_floating_point() else torch.get_default_dtype()
    kept = torch.rand(len(images), width, device=images.device) >= dropout
    return kept.to(dtype) / (1 - dropout)


@contextmanager
def tapped(featurizer: nn.Module, stages: Sequence[Stage], tap: Tap | None) -> Iterator[None]:
    """Call `tap` with the output of every stage while the context is open."""

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
