"""The running mean of a list of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Mean:
    """A weighted mean of what it was given, in one buffer of that size.

    Every call costs a handful of kernel launches, and the host waits for none of them. Memory is
    taken with the first value, laid out as that is (channels-last, say) and of its type: averages
    of half-precision weights stop moving after some hundred values. Given tensors, the mean so far,
    are owned from now on; a weight of 0 means that there is none yet.

    Examples:
        >>> mean = Mean()
        >>> mean.add([torch.tensor([0.0])])
        >>> mean.add([torch.tensor([4.0])], weight=3)
        >>> mean.tensors, mean.weight
        ([tensor([3.])], 4)
    """

    def __init__(self, tensors: Sequence[Tensor] = (), weight: int = 0) -> None:
        self.tensors, self.weight = list(tensors), weight

    @torch.no_grad()
    def set(self, values: Sequence[Tensor]) -> None:
        """Forgets what there was: the mean of one value is the value."""
        if self.tensors:
            torch._foreach_copy_(self.tensors, list(values))
        else:  # clones are laid out as they are
            self.tensors = [value.detach().clone() for value in values]
        self.weight = 1

    @torch.no_grad()
    def add(self, values: Sequence[Tensor], weight: int = 1) -> None:
        if not self.weight:
            self.set(values)
            self.weight = weight
            return
        self.weight += weight
        if self.tensors:  # foreach refuses empty lists
            torch._foreach_lerp_(self.tensors, list(values), weight / self.weight)
