"""pAdaIN: feature maps with the statistics of another image."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.errors import UserError
from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import Algorithm, First, Losses, Prepared
from .network import Network, Stage
from .registry import register_algorithm

_EPS = 1e-5
_SHORTCUTS = {"downsample", "shortcut"}
"""What torchvision and timm call the modules beside a block's main path."""


@register_algorithm(
    "pAdaIN",
    idea="feature statistics of other images, after a few convolutions",
    differs="not in DomainBed",
    processes="the same in distribution; images are mixed with others of the same process",
    citation="Nuriel et al., Permuted AdaIN: Reducing the Bias Towards Global Statistics in Image "
    "Classification, CVPR 2021",
    cost=1.05,
)
class PermutedAdaIN(Algorithm):
    r"""Permuted adaptive instance normalization (Nuriel et al., CVPR 2021).

    After each convolution except those in shortcuts, with probability `p`, an image's feature maps
    \(z\) become

    \[ \sigma' \, \frac{z - \mu}{\sigma} + \mu', \]

    where \(\mu\) and \(\sigma\) are the mean and standard deviation of each channel over the map,
    and \(\mu'\) and \(\sigma'\) those of another image of the step, without gradients. All images
    of a step change together, by a random permutation per convolution. pAdaIN minimizes the mean
    cross-entropy.

    DomainBed does not include pAdaIN. This follows the authors' repository, which has no code for
    domain generalization; the default is its value for ImageNet. As there, variances divide by
    n - 1, 1e-5 is added to them and to the \(\sigma\) that divides, and maps of one pixel stay as
    they are. Unlike MixStyle, pAdaIN swaps statistics instead of mixing
    them. Steps that change no map can use compiled code.

    Args:
        p: probability of a swap after each convolution.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        p: Annotated[float, Option(LogUniform(-3, -1), high=1.0)] = 0.01,
    ) -> None:
        super().__init__(network, n_domains)
        self.convolutions = [
            Stage(name, module.out_channels)
            for name, module in network.featurizer.named_modules()
            if isinstance(module, nn.Conv2d) and _SHORTCUTS.isdisjoint(name.split("."))
        ]
        if not self.convolutions:
            raise UserError(
                "algorithm 'pAdaIN' swaps statistics of feature maps after convolutions, but this "
                "backbone has no 2D convolutions: choose a ResNet"
            )
        self.p = p

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        prepared = super().prepare(batches)
        numbers = range(len(self.convolutions))
        chosen = [n for n in numbers if torch.rand(()).item() < self.p]
        images, device = len(prepared.labels), prepared.labels.device
        partners = {n: torch.randperm(images, device=device) for n in chosen}
        return replace(prepared, draws={"partners": partners})

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        partners: Mapping[int, Tensor] = prepared.draws["partners"]
        chosen = list(partners)

        def tap(number: int, maps: Tensor) -> Tensor:
            return self._swapped(maps, partners[chosen[number]])

        features = self.network.features(
            prepared.images,
            prepared.keep,
            tap if chosen else None,
            [self.convolutions[n] for n in chosen],
        )
        logits = self.network.classifier(features)
        return Losses(F.cross_entropy(logits, prepared.labels), logits=logits)

    def _swapped(self, maps: Tensor, partner: Tensor) -> Tensor:
        # In half precision, rounded statistics would shift whole maps.
        exact = maps.to(self.network.classifier.weight.dtype)
        return swap_styles(exact, partner).to(maps.dtype)


def swap_styles(maps: Tensor, partner: Tensor) -> Tensor:
    """Give each map its partner's mean and standard deviation."""
    if maps.shape[2:].numel() == 1:
        return maps
    var, mean = torch.var_mean(maps, (2, 3), keepdim=True)
    std = (var + _EPS).sqrt()
    style_mean, style_std = (x.detach()[partner] for x in (mean, std))
    # The second epsilon is the authors'.
    return style_std * ((maps - mean) / (std + _EPS)) + style_mean
