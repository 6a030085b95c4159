"""The contract of an algorithm: how batches of several domains become a loss.

An optimizer may evaluate the loss several times in a step, at other weights. A step is therefore
cut in three: `prepare` draws every random choice, `forward` is pure in the parameters and is called
one to four times, `commit` updates the algorithm's own state once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from steppe.domains.batches import Batch

from .network import Network


@dataclass(frozen=True)
class Losses:
    """What one evaluation gives.

    Attributes:
        total: the scalar to minimize.
        parts: what records show, each a scalar.
        aux: what later passes of the same step, or `commit`, need from the first one.
    """

    total: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    aux: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """One of the losses that an algorithm minimizes, each over parameters of its own.

    Attributes:
        name: what `forward` is asked for.
        parameters: what its optimizer updates.
        active: whether a step, counted from 0, optimizes it.
        options: options of the optimizer that this objective overrides.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    active: Callable[[int], bool] = lambda step: True
    options: Mapping[str, Any] = field(default_factory=dict)


class Algorithm(nn.Module, ABC):
    """A way to learn from several domains.

    Args:
        network: the network to train.
        n_domains: the number of source domains.
    """

    def __init__(self, network: Network, n_domains: int) -> None:
        super().__init__()
        self.network = network
        self.n_domains = n_domains

    def prepare(self, batches: Sequence[Batch]) -> Any:
        """Draws every random choice of a step, once; the result goes to `forward`."""
        return batches

    @abstractmethod
    def forward(
        self, prepared: Any, objective: str = "main", first: Mapping[str, Tensor] | None = None
    ) -> Losses:
        """The loss at the present weights, free of side effects.

        Args:
            prepared: what `prepare` returned.
            objective: which of `objectives` is asked for.
            first: the first pass's `aux`, detached, in all passes but the first.
        """

    def commit(self, prepared: Any, first: Mapping[str, Losses]) -> None:
        """Updates the algorithm's own state, once per step.

        Args:
            prepared: what `prepare` returned.
            first: the first pass's values, of every objective that the step optimized.
        """

    def objectives(self) -> Sequence[Objective]:
        """What is minimized; the default is one loss over all parameters."""
        return (Objective("main", tuple(trainable(self))),)

    def predict(self, images: Tensor) -> Tensor:
        """The logits of images from a domain that may never have been seen."""
        return self.network(images)


def trainable(module: nn.Module) -> Iterable[nn.Parameter]:
    """The parameters that take gradients."""
    return (p for p in module.parameters() if p.requires_grad)
