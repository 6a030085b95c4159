"""Pairs of images of one class: random ones, and a loss that draws their features together."""

import torch
from torch import Tensor
from torch.nn import functional as F

_TEMPERATURE = 0.07


def contrastive_loss(features: Tensor, labels: Tensor) -> Tensor:
    """Compute the supervised contrastive loss, averaged over images that share their class.

    An image's loss is the mean negative log-probability of picking an image of its class among all
    others, by cosine similarity. Features shorter than 1 keep their length: differences that are
    still rounding errors must not become directions.
    """
    directions = F.normalize(features, dim=1, eps=1.0)
    own = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    similarities = (directions @ directions.T / _TEMPERATURE).masked_fill(own, -torch.inf)
    positive = (labels == labels[:, None]) & ~own
    counts = positive.sum(1)
    losses = -torch.where(positive, similarities.log_softmax(1), 0.0).sum(1)
    return (losses / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


def draw_pairs(labels: Tensor, domains: Tensor, n_classes: int) -> Tensor:
    """Draw two images per class, as 2 x classes positions in the batch.

    The first is drawn among images that have a partner, the second among its partners. Classes
    without a pair get positions that `is_pair` rejects. Nothing waits for the device.
    """
    of_class = labels == torch.arange(n_classes, device=labels.device)[:, None]
    partners = (labels == labels[:, None]) & (domains != domains[:, None])
    luck = torch.rand(2, n_classes, len(labels), device=labels.device)
    first = luck[0].where(of_class & partners.any(1), -1.0).argmax(1)
    second = luck[1].where(of_class & partners[first], -1.0).argmax(1)
    return torch.stack([first, second])


def is_pair(pairs: Tensor, labels: Tensor, domains: Tensor) -> Tensor:
    """Return which classes have a pair among the result of `draw_pairs`."""
    classes = torch.arange(pairs.shape[1], device=labels.device)
    return (labels[pairs] == classes).all(0) & (domains[pairs[0]] != domains[pairs[1]])
