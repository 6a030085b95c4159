"""MTL: a classifier that also sees an embedding of the domain."""

from typing import Annotated

import torch
from torch import Tensor, nn

from steppe.options import Option
from steppe.search import Choice

from .algorithm import Algorithm, First, Losses, Prepared, domain_risks
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "MTL",
    citation="Blanchard et al., Domain Generalization by Marginal Transfer Learning, JMLR 2021",
)
class MTL(Algorithm):
    r"""Marginal transfer learning (Blanchard et al., JMLR 2021).

    The classifier sees the features of an image and an embedding of its domain,
    \(f(x) = c(\varphi(x), e_d)\). Each step updates the embedding with the mean of the domain's
    features,

    \[ e_d \leftarrow m \, \overline{\varphi(x)} + (1 - m) \, e_d, \]

    where \(m\) is `ema`. MTL minimizes the sum of the domain risks. At prediction time, the mean
    feature over the batch represents the unseen domain, so a batch should be large, from one
    domain, and in random order.

    DomainBed overwrites the embedding with random numbers; this class follows the paper. With
    several processes, each averages its own images, and \(e_d\) becomes the mean over processes.

    Args:
        ema: weight of the current step's mean in a domain's embedding.
    """

    embeddings: Tensor

    def __init__(
        self,
        network: Network,
        n_domains: int,
        ema: Annotated[
            float, Option(Choice((0.5, 0.9, 0.99, 1.0)), high=1.0, drawn_as="mtl_ema")
        ] = 0.99,
    ) -> None:
        super().__init__(network, n_domains)
        self.ema = ema
        network.classifier = nn.Linear(2 * network.n_features, network.n_classes)
        self.register_buffer("embeddings", torch.zeros(n_domains, network.n_features))

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        features = self.network.features(prepared.images, prepared.keep)
        means = torch.stack([x.mean(0) for x in prepared.split(features)])
        embeddings = self.ema * means + (1 - self.ema) * self.embeddings
        each = torch.cat([e.expand(n, -1) for e, n in zip(embeddings, prepared.sizes, strict=True)])
        logits = self.network.classifier(torch.cat([features, each], 1))
        return Losses(
            domain_risks(logits, prepared).sum(), state={"embeddings": embeddings.detach()}
        )

    def predict(self, images: Tensor) -> Tensor:
        features = self.network.features(images)
        mean = features.mean(0).expand_as(features)
        logits: Tensor = self.network.classifier(torch.cat([features, mean], 1))
        return logits
