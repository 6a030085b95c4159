"""The network that algorithms train: a featurizer, dropout, a linear classifier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


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
        dropout: the share of features dropped before the classifier.
        freeze_bn: keep batch norm in evaluation mode, statistics as they are; its scale and shift
            are trained. The default of DomainBed's published tables.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        featurizer: nn.Module,
        n_features: int,
        n_classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        dropout: float = 0.0,
        freeze_bn: bool = True,
    ) -> None:
        super().__init__()
        self.featurizer = featurizer
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(n_features, n_classes)
        self.n_features = n_features
        self.freeze_bn = freeze_bn
        # Constants of the pipeline, not learned: not in checkpoints.
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)
        self.train()

    def normalize(self, images: Tensor) -> Tensor:
        """Pixels as the featurizer wants them; input that is not uint8 is returned as it is."""
        if images.dtype is not torch.uint8:
            return images
        # Torchvision's ToTensor and Normalize, operation by operation, so that bits agree.
        return images.to(self.mean.dtype).div_(255).sub_(self.mean).div_(self.std)

    def features(self, images: Tensor) -> Tensor:
        """The features that the classifier sees, dropout applied."""
        features: Tensor = self.dropout(self.featurizer(self.normalize(images)))
        return features

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.classifier(self.features(images))
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
        """What the parts do not tell."""
        return f"freeze_bn={self.freeze_bn}"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The logits, with hooks."""
        logits: Tensor = super().__call__(*args, **kwargs)
        return logits
