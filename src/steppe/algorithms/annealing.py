"""Algorithms whose penalty weight changes after a number of steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .algorithm import Algorithm, Losses, Objective, trainable
from .network import Network


class Annealed(Algorithm):
    """Base class for a penalty whose weight is `before` first and `penalty` later.

    The optimizer's state is reset when the weight changes, because it belongs to a different loss.

    Args:
        penalty: the penalty weight from step `anneal_steps` on.
        before: the penalty weight until then.
    """

    steps: Tensor

    def __init__(
        self, network: Network, n_domains: int, penalty: float, anneal_steps: int, before: float
    ) -> None:
        super().__init__(network, n_domains)
        self.penalty, self.anneal_steps, self.before = penalty, anneal_steps, before
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def losses(self, risk: Tensor, penalty: Tensor, logits: Tensor, **state: Tensor) -> Losses:
        """Weight the penalty for this step and count the step."""
        # Tensors, because the compiler would bake numbers into its code.
        before, after = (penalty.new_full((), value) for value in (self.before, self.penalty))
        weight = torch.where(self.steps < self.anneal_steps, before, after)
        return Losses(
            risk + weight * penalty,
            {"risk": risk, "penalty": penalty},
            state={**state, "steps": self.steps + 1},
            logits=logits,
        )

    def objectives(self) -> Sequence[Objective]:
        return (
            Objective("main", tuple(trainable(self)), reset=lambda step: step == self.anneal_steps),
        )
