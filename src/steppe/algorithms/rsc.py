"""RSC: training without the features the classifier relies on most."""

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from steppe.options import Option
from steppe.search import Uniform

from .algorithm import Algorithm, First, Losses, Prepared
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "RSC",
    idea="dropping the features that help the most",
    processes="each process drops features and selects images among its own",
    citation="Huang et al., Self-Challenging Improves Cross-Domain Generalization, ECCV 2020",
    cost=1.04,
)
class RSC(Algorithm):
    r"""Representation self-challenging (Huang et al., ECCV 2020).

    Let \(g = \partial z_y / \partial \varphi\) be the gradient of an image's true logit with
    respect to its features. RSC zeroes the fraction `feature_drop` of features with the highest
    \(g\), but only in the fraction `batch_drop` of images whose true class loses the most
    probability. It minimizes the mean cross-entropy of the masked features. A fraction of 0 still
    drops one feature or affects one image, because values at the quantile are dropped.

    Matches DomainBed, including the interpolation of quantiles. The classifier is linear, so \(g\)
    is its weight row for the true class and needs no backward pass. The first pass of a step sets
    its mask, so that all passes evaluate the same function. With several processes, each takes the
    fractions of its own images.

    Args:
        feature_drop: fraction of features to drop.
        batch_drop: fraction of images to drop features from.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        feature_drop: Annotated[
            float, Option(Uniform(0.0, 0.5), high=1.0, drawn_as="rsc_f_drop_factor")
        ] = 1 / 3,
        batch_drop: Annotated[
            float, Option(Uniform(0.0, 0.5), high=1.0, drawn_as="rsc_b_drop_factor")
        ] = 1 / 3,
    ) -> None:
        super().__init__(network, n_domains)
        self.feature_drop, self.batch_drop = feature_drop, batch_drop

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        features = self.network.features(prepared.images, prepared.keep)
        mask = self._mask(features, prepared.labels) if first is None else first["mask"]
        logits = self.network.classifier(features * mask)
        loss = F.cross_entropy(logits, prepared.labels)
        return Losses(loss, aux={"mask": mask}, logits=logits)

    @torch.no_grad()
    def _mask(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return which features of which images to keep."""
        classifier = self.network.classifier
        gradients = classifier.weight[labels]
        kept = gradients < gradients.quantile(1 - self.feature_drop, 1, keepdim=True)
        whole, muted = (
            classifier(x).to(gradients.dtype).softmax(1).gather(1, labels[:, None])
            for x in (features, features * kept)
        )
        loss = whole - muted
        unaffected: Tensor = loss < loss.quantile(1 - self.batch_drop)
        return kept | unaffected
