"""CausIRL-CORAL: random parts of the images, cut across domains, with the same covariance."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from steppe.domains.batches import Batch

from .algorithm import Prepared
from .matching import FeatureMatching
from .registry import register_algorithm


class CausIRL(FeatureMatching):
    """Match the features of two random parts of a step's images instead of those of its domains.

    A random cut divides each domain's images, and each part takes one side of every cut: both are
    mixtures of the same domains in different proportions. Where the parts lie is a mask, because
    shapes that change from step to step would keep the loss out of a CUDA graph.
    """

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        prepared = super().prepare(batches)
        device = prepared.labels.device
        places = [torch.arange(n, device=device) for n in prepared.sizes]
        cuts = [torch.randint(n, (), device=device) for n in prepared.sizes]
        before = [place < cut for place, cut in zip(places, cuts, strict=True)]
        return replace(prepared, draws={"first part": torch.cat(before)})

    def distance(self, features: Tensor, prepared: Prepared) -> Tensor:
        first = prepared.draws["first part"].to(features.dtype)
        parts = first, 1 - first
        # Both parts need two images; `apart` must be finite without them too.
        enough = torch.stack([part.sum() > 1 for part in parts]).all()
        apart = self.apart(features, *parts)
        return torch.where(enough, apart, torch.zeros_like(apart))

    @abstractmethod
    def apart(self, features: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Compute the distance between two parts, which are 1 for their images and 0 for others."""


@register_algorithm(
    "CausIRL-CORAL",
    idea="CORAL's penalty between two random mixtures of the domains",
    processes="each process draws its own mixtures of its own images",
    citation="Chevalley et al., Invariant Causal Mechanisms through Distribution Matching, "
    "arXiv 2206.11646",
    cost=1.04,
    min_domains=2,
    min_batch=2,
)
class CausIRLCORAL(CausIRL):
    r"""Causal invariance by correlation alignment (Chevalley et al., arXiv 2206.11646).

    Each step cuts the images of every domain at a random place. All images before the cuts and all
    others are two mixtures of the domains, whose proportions should not matter to the features.
    With \(m\) features, means \(\mu, \mu'\) and unbiased covariances \(C, C'\) of the two parts,
    the distance is

    \[ \frac{1}{m} \|\mu - \mu'\|^2 + \frac{1}{m^2} \|C - C'\|_F^2, \]

    or 0 if a part has fewer than two images. The loss is the mean domain risk plus `penalty` times
    the distance. Matches DomainBed.
    """

    def apart(self, features: Tensor, first: Tensor, second: Tensor) -> Tensor:
        (mean, covariance), (mean2, covariance2) = (
            _moments(features, part) for part in (first, second)
        )
        return (mean - mean2).square().mean() + (covariance - covariance2).square().mean()


def _moments(features: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and covariance of a part's features."""
    n = part.sum()
    mean = part @ features / n.clamp(min=1)
    centred = (features - mean) * part[:, None]
    return mean, centred.T @ centred / (n - 1).clamp(min=1)
