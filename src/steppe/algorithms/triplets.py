"""The triplet loss with semi-hard negatives (Schroff et al., CVPR 2015, arXiv 1503.03832)."""

import math

import torch
from torch import Tensor


def squared_distances(x: Tensor) -> Tensor:
    """Return the squared distance of each pair of rows."""
    return (x[:, None] - x[None]).square().sum(-1)


def semihard(distances: Tensor, labels: Tensor) -> Tensor:
    """Choose a negative for each anchor (row) and positive (column).

    It is the closest one that is farther than the positive, or else the farthest.
    """
    different = labels[:, None] != labels
    fixed = distances.detach()
    ranked, order = fixed.masked_fill(~different, math.inf).sort(dim=1, stable=True)
    closest = torch.searchsorted(ranked, fixed, right=True)
    farthest = different.sum(1, keepdim=True) - 1
    negatives: Tensor = order.gather(1, torch.minimum(closest, farthest).clamp(min=0))
    return negatives


def triplet_loss(distances: Tensor, labels: Tensor, negatives: Tensor, margin: float) -> Tensor:
    """Average over all anchors with a positive and a negative; 0 if there are none."""
    same = labels[:, None] == labels
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    valid = same & ~itself & ~same.all(1, keepdim=True)
    losses = (margin + distances - distances.gather(1, negatives)).relu()
    return torch.where(valid, losses, 0).sum() / valid.sum().clamp(min=1)
