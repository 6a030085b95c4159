"""Several linear classifiers of the same features, with derivatives in closed form.

Heads are a tensor of size heads x classes x (features + 1), whose last column is the bias. The
closed forms need no autograd, so they have the same values under `torch.no_grad` and in compiled
code, and one backward pass differentiates them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .algorithm import Prepared


@dataclass(frozen=True)
class Task:
    """What heads predict.

    Attributes:
        inputs: each image's features and a constant 1.
        labels: the class of each image.
        means: domains x images; its product with values per image is their mean per domain.
    """

    inputs: Tensor
    labels: Tensor
    means: Tensor

    @classmethod
    def of(cls, features: Tensor, prepared: Prepared) -> Task:
        ones = features.new_ones(len(features), 1)
        means = torch.block_diag(*(features.new_full((1, n), 1 / n) for n in prepared.sizes))
        return cls(torch.cat([features, ones], 1), prepared.labels, means)

    def frozen(self) -> Task:
        """The same task, without gradients into the features."""
        return Task(self.inputs.detach(), self.labels, self.means)

    def logits(self, heads: Tensor) -> Tensor:
        """Return heads x images x classes."""
        return self.inputs @ heads.transpose(1, 2)

    def risks(self, heads: Tensor) -> Tensor:
        """Return the mean cross-entropy of each head in each domain."""
        logits = self.logits(heads)
        labels = self.labels.expand(len(heads), -1)
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return losses @ self.means.T

    def slopes(self, heads: Tensor, weights: Tensor) -> Tensor:
        r"""Differentiate \(\sum_i w_{qi} \ell_i\) with respect to head q, for all heads.

        Args:
            heads: the heads.
            weights: heads x images.
        """
        logits = self.logits(heads)
        truth = F.one_hot(self.labels, logits.shape[-1])
        return _outer(logits.softmax(-1) - truth, weights, self.inputs)

    def curvature(self, heads: Tensor, weights: Tensor, direction: Tensor) -> Tensor:
        """Multiply the Hessian of the same sum by a direction, for all heads."""
        p, moved = self.logits(heads).softmax(-1), self.logits(direction)
        return _outer(p * (moved - (p * moved).sum(-1, keepdim=True)), weights, self.inputs)


def _outer(by_logit: Tensor, weights: Tensor, inputs: Tensor) -> Tensor:
    return (by_logit * weights[..., None]).transpose(1, 2) @ inputs


def head(linear: nn.Linear) -> Tensor:
    """A linear layer's weights and biases as one head."""
    return torch.cat([linear.weight, linear.bias[:, None]], 1).detach()[None]
