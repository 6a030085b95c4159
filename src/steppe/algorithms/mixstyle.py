"""MixStyle: feature maps with mixed statistics of two images."""

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
    """The index of each image's partner, and the share that stays its own."""

    partner: Tensor
    share: Tensor


@register_algorithm(
    "MixStyle",
    idea="mixed feature statistics of different images",
    differs="not in DomainBed",
    processes="the same in distribution; images are mixed with others of the same process",
    citation="Zhou et al., Domain Generalization with MixStyle, ICLR 2021",
    cost=1.06,
)
class MixStyle(Algorithm):
    r"""MixStyle (Zhou et al., ICLR 2021), mixing regardless of domains.

    After each stage of the network except the first and the last, with probability `p`, an
    image's feature maps \(z\) become

    \[ \hat\sigma \, \frac{z - \mu}{\sigma} + \hat\mu, \qquad
        \hat\mu = \lambda \mu + (1 - \lambda) \mu', \quad
        \hat\sigma = \lambda \sigma + (1 - \lambda) \sigma', \]

    where \(\mu\) and \(\sigma\) are the mean and standard deviation of each channel over the map,
    without gradients, \(\mu'\) and \(\sigma'\) those of another image of the step, and
    \(\lambda \sim \mathrm{Beta}(\alpha, \alpha)\) is drawn per image. MixStyle minimizes the mean
    cross-entropy.

    DomainBed does not include MixStyle. For ResNets, this follows SWAD's repository: stages
    conv2_x to conv4_x. The variance divides by n, as in the paper; SWAD's divides by n - 1. Other
    backbones skip the first and last stages, or only the last if there are two.

    Args:
        p: probability of mixing at each stage.
        alpha: both parameters of the Beta distribution of mixing shares.
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
                "algorithm 'MixStyle' modifies the outputs of a backbone's stages, but this "
                "backbone does not list its stages: choose a ResNet, or a timm backbone with "
                "feature_info"
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
        logits = self.network.classifier(features)
        return Losses(F.cross_entropy(logits, prepared.labels), logits=logits)


def mix_styles(maps: Tensor, mix: Mix, channel_dim: int) -> Tensor:
    """Mix each map's mean and standard deviation with its partner's."""
    channel = channel_dim % maps.dim()
    places = [dim for dim in range(1, maps.dim()) if dim != channel]
    var, mean = torch.var_mean(maps.detach(), places, correction=0, keepdim=True)
    std = (var + _EPS).sqrt()
    share = mix.share.to(maps.dtype).view(-1, *[1] * (maps.dim() - 1))
    mixed_mean, mixed_std = (torch.lerp(x[mix.partner], x, share) for x in (mean, std))
    return (maps - mean) / std * mixed_std + mixed_mean
