"""CAD: features whose most similar images come from other domains."""

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from steppe.options import Option
from steppe.search import Choice

from .algorithm import Algorithm, First, Losses, Prepared, full_precision
from .network import Network
from .registry import register_algorithm

_BASE_TEMPERATURE = 0.07


@register_algorithm(
    "CAD",
    idea="contrastive penalty on features that reveal the domain",
    differs="every image counts, because the method needs no class labels; DomainBed's skips "
    "images without another one of their class",
    processes="each process compares its own images",
    citation="Ruan et al., Optimal Representations for Covariate Shift, ICLR 2022",
    cost=0.96,
    min_domains=2,
)
class CAD(Algorithm):
    r"""Contrastive adversarial domain bottleneck (Ruan et al., ICLR 2022).

    For features \(z_i\) of all images of a step, let

    \[ p_{ij} = \frac{\exp(z_i^\top z_j / T)}{\sum_{k \ne i} \exp(z_i^\top z_k / T)}. \]

    With \(d_i\) the domain of image \(i\) and \(\lambda\) the option `penalty`, CAD minimizes

    \[ \overline{\ell(f(x), y)} - \lambda \, \frac{T}{0.07} \;
        \overline{\log \sum_{j : d_j \ne d_i} p_{ij}}, \]

    with means over images. The second term is small if the most similar images are from other
    domains.

    Matches DomainBed except that every image counts. DomainBed skips images that have no other of
    their class in the batch, although this loss does not use classes. Three variants that
    DomainBed's search never draws are left out: normalized features, the logarithm of the
    probability of the same domain, which counts the image itself, and a projection head, which
    raises a NameError there.

    Args:
        penalty: weight of the bottleneck.
        temperature: \(T\), which divides similarities.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[
            float,
            Option(Choice((1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2)), drawn_as="lmbda"),
        ] = 0.1,
        temperature: Annotated[float, Option(Choice((0.05, 0.1)), low=0.001)] = 0.1,
    ) -> None:
        super().__init__(network, n_domains)
        self.penalty, self.temperature = penalty, temperature

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        features = self.network.features(prepared.images, prepared.keep)
        logits = self.network.classifier(features)
        risk = F.cross_entropy(logits, prepared.labels)
        features, exact = full_precision(features, self.network)
        with exact:
            penalty = self._bottleneck(features, prepared)
        parts = {"risk": risk, "penalty": penalty}
        return Losses(risk + self.penalty * penalty, parts, logits=logits)

    def comparable(self, labels: Tensor) -> Tensor:
        """Return which pairs of images to compare, N x N."""
        return labels.new_ones(len(labels), len(labels), dtype=torch.bool)

    def _bottleneck(self, features: Tensor, prepared: Prepared) -> Tensor:
        labels = prepared.labels
        domains = torch.cat(
            [torch.full_like(own, d) for d, own in enumerate(prepared.split(labels))]
        )
        itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        compared = self.comparable(labels) & ~itself
        elsewhere = compared & (domains[:, None] != domains)
        counts = elsewhere.any(1)
        # For an image that does not count, both sums are the same, instead of empty.
        compared, elsewhere = (pairs | ~counts[:, None] for pairs in (compared, elsewhere))
        similarity = features @ features.T / self.temperature
        everywhere, abroad = (
            similarity.masked_fill(~pairs, -torch.inf).logsumexp(1)
            for pairs in (compared, elsewhere)
        )
        mean = (everywhere - abroad).sum() / counts.sum().clamp(min=1)
        return self.temperature / _BASE_TEMPERATURE * mean
