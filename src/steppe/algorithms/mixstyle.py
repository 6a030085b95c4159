"""MixStyle: feature maps with the statistics of two images."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Beta
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.errors import UserError
from steppe.options import Option

from .algorithm import Algorithm, First, Losses, Prepared
from .network import Network
from .registry import register_algorithm

_EPS = 1e-6


class Mix(NamedTuple):
    """With which image each is mixed, and how much stays its own."""

    partner: Tensor
    share: Tensor


@register_algorithm(
    "MixStyle",
    citation="Zhou et al., Domain Generalization with MixStyle, ICLR 2021",
)
class MixStyle(Algorithm):
    r"""MixStyle (Zhou et al., ICLR 2021), mixed regardless of domains.

    After every stage of the network but the first and the last, and with probability `p` each, an
    image's feature maps \(z\) become

    \[ \hat\sigma \, \frac{z - \mu}{\sigma} + \hat\mu, \qquad
        \hat\mu = \lambda \mu + (1 - \lambda) \mu', \quad
        \hat\sigma = \lambda \sigma + (1 - \lambda) \sigma', \]

    with the mean and the standard deviation of every channel over the map, constants as far as
    gradients go, \(\mu'\) and \(\sigma'\) those of another image of the step, and
    \(\lambda \sim \mathrm{Beta}(\alpha, \alpha)\) for every image. It minimizes the mean
    cross-entropy.

    DomainBed does not have it; this follows SWAD's repository for ResNets: stages conv2_x to
    conv4_x. (Its variance is over n - 1, the paper's and this one over n.) Of other backbones, the
    first and the last stage are left out, whether or not the first is a stem; of two stages, the
    last.

    Args:
        p: how often styles are mixed.
        alpha: both parameters of the Beta distribution that shares are drawn from.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        p: Annotated[float, Option(high=1.0)] = 0.5,
        alpha: Annotated[float, Option(low=0.05)] = 0.1,
    ) -> None:
        super().__init__(network, n_domains)
        numbers = range(len(network.stages))
        self.mixed = numbers[1:-1] or numbers[:-1]
        if not self.mixed:
            raise UserError(
                "algorithm 'MixStyle' changes what comes out of a backbone's stages, and this "
                "one's are not known: choose a ResNet, or another backbone with feature_info in "
                "timm"
            )
        self.p, self.alpha = p, alpha

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        prepared = super().prepare(batches)
        chosen = [number for number in self.mixed if torch.rand(()).item() < self.p]
        n, device = len(prepared.labels), prepared.labels.device
        alpha = prepared.images.new_full((n,), self.alpha)
        beta = Beta(alpha, alpha, validate_args=False)
        mixes = {number: Mix(torch.randperm(n, device=device), beta.sample()) for number in chosen}
        return replace(prepared, draws={"mixes": mixes})

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        mixes: Mapping[int, Mix] = prepared.draws["mixes"]

        def tap(number: int, maps: Tensor) -> Tensor | None:
            if number not in mixes:
                return None
            return mix_styles(maps, mixes[number], self.network.stages[number].dim)

        features = self.network.features(prepared.images, prepared.keep, tap if mixes else None)
        return Losses(F.cross_entropy(self.network.classifier(features), prepared.labels))


def mix_styles(maps: Tensor, mix: Mix, channel_dim: int) -> Tensor:
    """The maps with their mean and standard deviation mixed with those of their partners."""
    channel = channel_dim % maps.dim()
    places = [dim for dim in range(1, maps.dim()) if dim != channel]
    var, mean = torch.var_mean(maps.detach(), places, correction=0, keepdim=True)
    std = (var + _EPS).sqrt()
    share = mix.share.to(maps.dtype).view(-1, *[1] * (maps.dim() - 1))
    mixed_mean, mixed_std = (torch.lerp(x[mix.partner], x, share) for x in (mean, std))
    return (maps - mean) / std * mixed_std + mixed_mean
