"""ARM: a network that adapts to a domain through a context channel."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.errors import UserError
from steppe.options import Option
from steppe.search import Fixed, Hyperparameter

from .algorithm import Algorithm, First, Losses, Prepared
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "ARM",
    idea="context network that adapts to images of one domain",
    differs="the context network is trained, as in the paper; DomainBed never passes it to the "
    "optimizer",
    processes="support sets consist of a process's own images",
    citation="Zhang et al., Adaptive Risk Minimization: Learning to Adapt to Domain Shift, "
    "NeurIPS 2021",
    cost=6.58,
    run={"batch_size": Hyperparameter(8, Fixed(8))},
)
class ARM(Algorithm):
    r"""Adaptive risk minimization with a context network (Zhang et al., NeurIPS 2021, ARM-CML).

    A small network \(g\) maps each image to a one-channel image. The mean of these over a support
    set \(S\) of `support` images from one domain is an additional input channel:

    \[ f(x) = c(\varphi(x, \bar g)), \qquad \bar g = \frac{1}{|S|} \sum_{x' \in S} g(x'). \]

    ARM minimizes the mean cross-entropy over the weights of both networks. At prediction time, it
    splits the batch into support sets, so the batch should come from one domain in random order;
    the last set may be smaller. The new channel's weights in the first layer start as a copy of
    the first channel's.

    DomainBed never trains the context network and treats a batch whose size is not a multiple of
    `support` as one set; this class trains it, as in the paper. Each process forms support sets
    from its own images. When batch-norm statistics are re-estimated for averaged weights, sets
    span domains unless the batch size is a multiple of `support`.

    Args:
        support: number of images that share a context.
    """

    def __init__(
        self, network: Network, n_domains: int, support: Annotated[int, Option(low=1)] = 8
    ) -> None:
        super().__init__(network, n_domains)
        self.support = support
        channels = network.mean.numel()
        _widen(network.featurizer, channels)
        self.context = nn.Sequential(
            nn.Conv2d(channels, 64, 5, padding=2),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 5, padding=2),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 1, 5, padding=2),
        )

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        logits = self._logits(prepared)
        return Losses(F.cross_entropy(logits, prepared.labels), logits=logits)

    def risks(self, prepared: Prepared, logits: Tensor | None = None) -> Tensor:
        return super().risks(prepared, self._logits(prepared) if logits is None else logits)

    def risk(self, prepared: Prepared, domain: int) -> Tensor:
        own = prepared.only(domain)
        return F.cross_entropy(self._logits(own), own.labels)

    def _logits(self, prepared: Prepared) -> Tensor:
        seen = self._in_context(prepared.images, prepared.sizes)
        return self.network(seen, prepared.keep)

    def predict(self, images: Tensor) -> Tensor:
        images = self.network.normalize(images)
        return self.network(self._in_context(images, (len(images),)))

    def _in_context(self, images: Tensor, sizes: Sequence[int]) -> Tensor:
        contexts = [
            support.mean(0, keepdim=True).expand_as(support)
            for domain in self.context(images).split(tuple(sizes))
            for support in domain.split(self.support)
        ]
        return torch.cat([images, torch.cat(contexts)], 1)


def _widen(featurizer: nn.Module, channels: int) -> None:
    """Add an input channel to the first convolution."""
    for module in featurizer.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels == channels:
            weight = torch.cat([module.weight, module.weight[:, :1]], 1).detach()
            module.weight = nn.Parameter(weight)
            module.in_channels += 1
            return
    raise UserError(
        "algorithm 'ARM' adds an input channel, but this backbone does not start with a "
        "convolution over the images: choose another backbone"
    )
