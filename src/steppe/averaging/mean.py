"""A weighted running mean of lists of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Mean:
    """A weighted running mean in one buffer per tensor.

    Each call costs a few kernel launches and no host-device synchronization. The first value
    allocates the buffers and sets their memory format and dtype; in half precision, a mean stops
    changing after some hundred values. `Mean` takes ownership of initial tensors. A weight of 0
    means that the mean is empty.

    Examples:
        >>> mean = Mean()
        >>> mean.add([torch.tensor([0.0])])
        >>> mean.add([torch.tensor([4.0])], weight=3)
        >>> mean.tensors, mean.weight
        ([tensor([3.])], 4)
    """

    def __init__(self, tensors: Sequence[Tensor] = (), weight: float = 0) -> None:
        self.tensors, self.weight = list(tensors), weight

    @torch.no_grad()
    def set(self, values: Sequence[Tensor]) -> None:
        """Start over with a single value."""
        if self.tensors:
            torch._foreach_copy_(self.tensors, list(values))
        else:  # clone keeps the memory format
            self.tensors = [value.detach().clone() for value in values]
        self.weight = 1

    @torch.no_grad()
    def add(self, values: Sequence[Tensor], weight: float = 1) -> None:
        if not self.weight:
            self.set(values)
            self.weight = weight
            return
        self.weight += weight
        if self.tensors:  # foreach functions reject empty lists
            torch._foreach_lerp_(self.tensors, list(values), weight / self.weight)
