"""RSC: learning without the features that it relied on the most."""

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
    citation="Huang et al., Self-Challenging Improves Cross-Domain Generalization, ECCV 2020",
)
class RSC(Algorithm):
    r"""Representation self-challenging (Huang et al., ECCV 2020).

    With \(g = \partial z_y / \partial \varphi\) the gradient of an image's true logit by its
    features, the features with the highest share `feature_drop` of \(g\) are set to zero; but only
    in the share `batch_drop` of images whose true class loses the most probability by that. It
    minimizes the mean cross-entropy of what is left. (Shares of 0 still drop one feature of one
    image: what reaches the quantile is dropped.)

    As in DomainBed, down to the quantiles' interpolation. The classifier is linear, so \(g\) is its
    row for the true class, and no gradient has to be taken. The mask of a step comes from its first
    pass, so that all passes of an optimizer evaluate one function. Each process takes the shares of
    its own images.

    Args:
        feature_drop: the share of features that are muted.
        batch_drop: the share of images that it happens to.
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
        return Losses(F.cross_entropy(logits, prepared.labels), aux={"mask": mask})

    @torch.no_grad()
    def _mask(self, features: Tensor, labels: Tensor) -> Tensor:
        """What is kept: true or false for every feature of every image."""
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
