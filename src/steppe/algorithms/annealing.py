"""What algorithms share whose penalty has another weight at the start of a run."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .algorithm import Algorithm, Objective, trainable
from .network import Network


class Annealed(Algorithm):
    """An algorithm that learns with one weight of its penalty first and with another later.

    The optimizer forgets its moments when the weight changes: they are those of another loss.

    Args:
        penalty: the penalty's weight from step `anneal_steps` on.
        before: the penalty's weight until then.
    """

    steps: Tensor

    def __init__(
        self, network: Network, n_domains: int, penalty: float, anneal_steps: int, before: float
    ) -> None:
        super().__init__(network, n_domains)
        self.penalty, self.anneal_steps, self.before = penalty, anneal_steps, before
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def weight(self, like: Tensor) -> Tensor:
        """The penalty's weight in this step, as a tensor: a number would be compiled in."""
        before, after = (like.new_full((), value) for value in (self.before, self.penalty))
        return torch.where(self.steps < self.anneal_steps, before, after)

    def objectives(self) -> Sequence[Objective]:
        return (
            Objective("main", tuple(trainable(self)), reset=lambda step: step == self.anneal_steps),
        )
