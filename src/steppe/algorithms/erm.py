"""ERM: one loss over all domains' images, as if they were one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from steppe.domains.batches import Batch

from .algorithm import Algorithm, Losses


class ERM(Algorithm):
    r"""Empirical risk minimization (Vapnik, Statistical Learning Theory, 1998).

    The mean cross-entropy of all images of the step, \(\frac{1}{n}\sum_i \ell(f(x_i), y_i)\),
    whichever domain they are from.
    """

    def prepare(self, batches: Sequence[Batch]) -> Batch:
        """The domains' batches as one."""
        return Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))

    def forward(
        self, prepared: Batch, objective: str = "main", first: Mapping[str, Tensor] | None = None
    ) -> Losses:
        """The mean cross-entropy."""
        return Losses(F.cross_entropy(self.network(prepared.images), prepared.labels))
