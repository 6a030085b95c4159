"""Batch norm under averaged weights: find unfrozen layers and re-estimate their statistics."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def unfrozen(module: nn.Module) -> list[_BatchNorm]:
    """Return the batch norms that update running statistics: those in training mode.

    Examples:
        >>> model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(3).eval())
        >>> [norm.num_features for norm in unfrozen(model)]
        [2]
    """
    return [
        part
        for part in module.modules()
        if isinstance(part, _BatchNorm) and part.training and part.running_mean is not None
    ]


@torch.no_grad()
def reestimate(
    module: nn.Module, forward: Callable[[Tensor], object], batches: Iterable[Tensor]
) -> None:
    """Re-estimate the running statistics of unfrozen batch norms for the current weights.

    The new statistics are the mean over batches, with equal weight per batch. Frozen batch norms,
    module modes and momenta do not change.

    Args:
        module: the network, in training mode.
        forward: evaluates the network on a batch.
        batches: inputs; read only if there are unfrozen batch norms.

    Examples:
        >>> norm = nn.BatchNorm1d(1)
        >>> reestimate(norm, norm, [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])])
        >>> norm.running_mean, norm.running_var, norm.momentum
        (tensor([3.]), tensor([2.]), 0.1)
    """
    norms = unfrozen(module)
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    seen = 0
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # cumulative mean instead of exponential
        for batch in batches:
            forward(batch)
            seen += 1
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    if not seen:
        raise ValueError("no batches to estimate batch-norm statistics from: pass at least one")
