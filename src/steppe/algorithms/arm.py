"""ARM: a network that adapts to a domain by a picture of it."""

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
    citation="Zhang et al., Adaptive Risk Minimization: Learning to Adapt to Domain Shift, "
    "NeurIPS 2021",
    run={"batch_size": Hyperparameter(8, Fixed(8))},
)
class ARM(Algorithm):
    r"""Adaptive risk minimization with a context network (Zhang et al., NeurIPS 2021, ARM-CML).

    A small network \(g\) makes an image of one channel of every image; their mean over a support
    set \(S\) of `support` images of one domain is what the network sees as one more channel:

    \[ f(x) = c(\varphi(x, \bar g)), \qquad \bar g = \frac{1}{|S|} \sum_{x' \in S} g(x'). \]

    It minimizes the mean cross-entropy over the weights of both. In prediction, support sets are
    made of the images that are predicted together, which should be of one domain and in random
    order; the last set may be smaller. The first layer begins with the first channel's weights for
    the new one.

    DomainBed leaves the context network as it was initialized; here it is trained, as in the paper.
    DomainBed takes a batch that is no multiple of `support` as one set. Each process has support
    sets of its own images. Where batch norm is estimated anew for an average, sets go across
    domains unless the batch size is a multiple of `support`.

    Args:
        support: images that share a context.
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
        seen = self._in_context(prepared.images, prepared.sizes)
        return Losses(F.cross_entropy(self.network(seen, prepared.keep), prepared.labels))

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
    """Gives the first convolution one more input channel."""
    for module in featurizer.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels == channels:
            weight = torch.cat([module.weight, module.weight[:, :1]], 1).detach()
            module.weight = nn.Parameter(weight)
            module.in_channels += 1
            return
    raise UserError(
        "algorithm 'ARM' adds a channel to the images, and this backbone does not begin with a "
        "convolution over them: choose another backbone"
    )
