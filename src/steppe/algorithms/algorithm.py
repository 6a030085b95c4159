"""The algorithm contract: how batches from several domains become a loss.

An optimizer may evaluate the loss several times per step, at different weights. A step therefore
has three parts: `prepare` makes every random draw, `forward` is a pure function of the parameters
and runs one to four times, and `commit` updates the algorithm's own state once.
"""

from __future__ import annotations

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
    """The images of a step and all of its random draws.

    Attributes:
        images: normalized images of all domains, concatenated in domain order.
        labels: the class of each image.
        sizes: number of images per domain.
        keep: dropout mask for the features, N x `n_features`; None drops nothing.
        draws: other random draws, and values computed once for all passes, by name.
    """

    images: Tensor
    labels: Tensor
    sizes: tuple[int, ...]
    keep: Tensor | None = None
    draws: Mapping[str, Any] = field(default_factory=dict)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split rows of all domains into one tensor per domain."""
        domains: tuple[Tensor, ...] = values.split(self.sizes)
        return domains

    def only(self, domain: int) -> Prepared:
        """One domain's images and dropout mask, without other draws."""
        images, labels = (self.split(t)[domain] for t in (self.images, self.labels))
        keep = None if self.keep is None else self.split(self.keep)[domain]
        return Prepared(images, labels, (len(labels),), keep)


@dataclass(frozen=True)
class Losses:
    """The result of one evaluation of an objective.

    Attributes:
        total: the scalar to minimize.
        parts: scalars to log, by name.
        aux: values from the first pass that later passes of the same step need.
        state: new values for the algorithm's buffers, by name, applied after the step.
        logits: those of the step's images, if the loss computed them. Optimizers that compare
            domains (DISAM) then need no further forward pass.
    """

    total: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    aux: Mapping[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """A loss to minimize over its own set of parameters.

    Attributes:
        name: passed to `forward` as `objective`.
        parameters: the parameters its optimizer updates.
        active: whether to optimize it in a given step, counted from 0.
        reset: whether to clear the optimizer's state before a given step.
        options: optimizer options to override, ignored by optimizers that lack them.
        lr_factors: learning-rate multipliers of individual parameters.
        lr_steps: factors that multiply the learning rate from a given step on.
        optimizer: the objective whose optimizer to share (default: its own).
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    active: Callable[[int], bool] = lambda step: True
    reset: Callable[[int], bool] = lambda step: False
    options: Mapping[str, Any] = field(default_factory=dict)
    lr_factors: Mapping[nn.Parameter, float] = field(default_factory=dict)
    lr_steps: Mapping[int, float] = field(default_factory=dict)
    optimizer: str | None = None


LINEAR = "linear"
"""The objective of a warm start, which every algorithm has besides its own."""
First = Mapping[str, Tensor] | None
"""The first pass's detached `aux`; None in the first pass itself."""


class Algorithm(nn.Module, ABC):
    """Base class of all algorithms.

    Args:
        network: the network to train.
        n_domains: the number of source domains.
    """

    differentiates: ClassVar[bool] = False
    """Whether `forward` differentiates through the network, which compiled code cannot do."""
    independent: ClassVar[bool] = False
    """Whether an overridden `predict` still predicts each image by itself."""

    def __init__(self, network: Network, n_domains: int) -> None:
        super().__init__()
        self.network = network
        self.n_domains = n_domains

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        """Make every random draw of a step, once, for all calls of `forward`.

        A CUDA graph may replay this one, without dropout, but no override.
        """
        images = self.network.normalize(torch.cat([batch.images for batch in batches]))
        return Prepared(
            images,
            torch.cat([batch.labels for batch in batches]),
            tuple(len(batch.labels) for batch in batches),
            self.network.draw_mask(images),
        )

    @abstractmethod
    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        """Compute the loss at the current weights, without side effects.

        Args:
            prepared: the return value of `prepare`.
            objective: the name of one of `objectives`.
            first: the first pass's `aux`, detached; None in the first pass.
        """

    @torch.no_grad()
    def commit(self, prepared: Prepared, first: Mapping[str, Losses]) -> None:
        """Update the algorithm's own state, once per step.

        Args:
            prepared: the return value of `prepare`.
            first: the first pass's losses for every objective the step optimized, averaged over
                micro-batches and processes.
        """
        for losses in first.values():
            for name, value in losses.state.items():
                self.get_buffer(name).copy_(value)

    def objectives(self) -> Sequence[Objective]:
        """List the losses to minimize; by default, one over all parameters."""
        return (Objective("main", tuple(trainable(self))),)

    def __call__(self, prepared: Prepared, objective: str = "main", first: First = None) -> Any:
        # Here, because every algorithm has this objective, and DDP calls nothing else.
        if objective == LINEAR:
            return self.linear(prepared)
        return super().__call__(prepared, objective=objective, first=first)

    def linear(self, prepared: Prepared) -> Losses:
        """Compute the mean cross-entropy as a function of the network's classifier alone."""
        kept = set(self.network.classifier.parameters())
        fixed = [p for p in trainable(self) if p not in kept]
        for p in fixed:
            p.requires_grad_(False)
        try:
            return Losses(self.risks(prepared).mean())
        finally:
            for p in fixed:
                p.requires_grad_(True)

    def risks(self, prepared: Prepared, logits: Tensor | None = None) -> Tensor:
        """Compute the mean cross-entropy of each source domain, for optimizers that compare them.

        Override it, like `risk`, if the classifier needs more than the network and the images.

        Args:
            prepared: the return value of `prepare`.
            logits: those of `forward`; None calls the network.
        """
        if logits is None:
            logits = self.network(prepared.images, prepared.keep)
        logits, exact = full_precision(logits, self.network)
        with exact:
            return domain_risks(logits, prepared)

    def risk(self, prepared: Prepared, domain: int) -> Tensor:
        """Compute the mean cross-entropy of one source domain, from its images alone."""
        own = prepared.only(domain)
        return F.cross_entropy(self.network(own.images, own.keep), own.labels)

    def predict(self, images: Tensor) -> Tensor:
        """Compute logits for images that may come from an unseen domain."""
        return self.network(images)

    def predict_source(self, images: Tensor, domain: int) -> Tensor:
        """Compute logits for images from a source domain; by default, as for any other."""
        return self.predict(images)

    @classmethod
    def mixes_images(cls) -> bool:
        """Whether a prediction may depend on the other images of the batch."""
        return cls.predict is not Algorithm.predict and not cls.independent


def trainable(*modules: nn.Module) -> Iterable[nn.Parameter]:
    return (p for module in modules for p in module.parameters() if p.requires_grad)


def domain_risks(logits: Tensor, prepared: Prepared) -> Tensor:
    """Return the mean cross-entropy of each domain."""
    losses = F.cross_entropy(logits, prepared.labels, reduction="none")
    return torch.stack([of_domain.mean() for of_domain in prepared.split(losses)])


def full_precision(features: Tensor, network: Network) -> tuple[Tensor, torch.autocast]:
    """Return features in the weights' precision, and a context that computes in it.

    Penalties are differences or squares of small numbers, which half precision would round away.
    """
    dtype = network.classifier.weight.dtype
    return features.to(dtype), torch.autocast(features.device.type, enabled=False)
