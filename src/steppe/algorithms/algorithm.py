"""The contract of an algorithm: how batches of several domains become a loss.

An optimizer may evaluate the loss several times in a step, at other weights. A step is therefore
cut in three: `prepare` draws every random choice, `forward` is pure in the parameters and is called
one to four times, `commit` updates the algorithm's own state once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.domains.batches import Batch

from .network import Network


@dataclass(frozen=True)
class Prepared:
    """The images of a step and everything about it that was left to chance.

    Attributes:
        images: normalized, of all domains, one domain after the other.
        labels: their classes.
        sizes: how many images each domain has.
        keep: dropout's mask for the features, N x `n_features`; None: nothing is dropped.
        draws: what else an algorithm draws, or computes once for all passes, by name.
    """

    images: Tensor
    labels: Tensor
    sizes: tuple[int, ...]
    keep: Tensor | None = None
    draws: Mapping[str, Any] = field(default_factory=dict)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Rows of all domains, domain by domain."""
        domains: tuple[Tensor, ...] = values.split(self.sizes)
        return domains


@dataclass(frozen=True)
class Losses:
    """What one evaluation gives.

    Attributes:
        total: the scalar to minimize.
        parts: what records show, each a scalar.
        aux: what later passes of the same step need from the first one.
        state: what the algorithm's buffers of these names are to become after the step.
    """

    total: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    aux: Mapping[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """One of the losses that an algorithm minimizes, each over parameters of its own.

    Attributes:
        name: what `forward` is asked for.
        parameters: what its optimizer updates.
        active: whether a step, counted from 0, optimizes it.
        reset: whether the optimizer forgets its moments before a step.
        options: options that this objective overrides, where the optimizer has them.
        lr_factors: parameters whose learning rate is so many times the optimizer's.
        optimizer: the objective whose optimizer it shares (default: it has its own).
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    active: Callable[[int], bool] = lambda step: True
    reset: Callable[[int], bool] = lambda step: False
    options: Mapping[str, Any] = field(default_factory=dict)
    lr_factors: Mapping[nn.Parameter, float] = field(default_factory=dict)
    optimizer: str | None = None


First = Mapping[str, Tensor] | None
"""The first pass's `aux`, detached, in all passes of a step but the first."""


class Algorithm(nn.Module, ABC):
    """A way to learn from several domains.

    Args:
        network: the network to train.
        n_domains: the number of source domains.
    """

    differentiates: ClassVar[bool] = False
    """Whether `forward` itself asks for gradients of the network, as compiled code does not let."""

    def __init__(self, network: Network, n_domains: int) -> None:
        super().__init__()
        self.network = network
        self.n_domains = n_domains

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        """Draws every random choice of a step, once; the result goes to `forward`."""
        images = self.network.normalize(torch.cat([batch.images for batch in batches]))
        return Prepared(
            images,
            torch.cat([batch.labels for batch in batches]),
            tuple(len(batch.labels) for batch in batches),
            self.network.draw_mask(images),
        )

    @abstractmethod
    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        """The loss at the present weights, free of side effects.

        Args:
            prepared: what `prepare` returned.
            objective: which of `objectives` is asked for.
            first: the first pass's `aux`, detached; None in the first pass.
        """

    @torch.no_grad()
    def commit(self, prepared: Prepared, first: Mapping[str, Losses]) -> None:
        """Updates the algorithm's own state, once per step.

        Args:
            prepared: what `prepare` returned.
            first: the first pass's values, of every objective that the step optimized. Where a
                batch was cut into parts or shared by processes, their mean.
        """
        for losses in first.values():
            for name, value in losses.state.items():
                self.get_buffer(name).copy_(value)

    def objectives(self) -> Sequence[Objective]:
        """What is minimized; the default is one loss over all parameters."""
        return (Objective("main", tuple(trainable(self))),)

    def predict(self, images: Tensor) -> Tensor:
        """The logits of images from a domain that may never have been seen."""
        return self.network(images)


def trainable(*modules: nn.Module) -> Iterable[nn.Parameter]:
    """The parameters that take gradients."""
    return (p for module in modules for p in module.parameters() if p.requires_grad)


def domain_risks(logits: Tensor, prepared: Prepared) -> Tensor:
    """The mean cross-entropy of each domain."""
    losses = F.cross_entropy(logits, prepared.labels, reduction="none")
    return torch.stack([of_domain.mean() for of_domain in prepared.split(losses)])


def full_precision(features: Tensor, network: Network) -> tuple[Tensor, torch.autocast]:
    """Features in the precision of the weights, and a context that computes in it.

    Penalties are differences, or squares of small numbers: half precision would lose them.
    """
    dtype = network.classifier.weight.dtype
    return features.to(dtype), torch.autocast(features.device.type, enabled=False)
