"""MTL: a classifier that also sees an embedding of the domain."""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.options import Option
from steppe.search import Choice

from .algorithm import Algorithm, First, Losses, Prepared, domain_risks
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "MTL",
    idea="domain vector as another input of the classifier",
    differs="a domain's vector is the mean of its features, as in the paper; DomainBed overwrites "
    "it with random numbers",
    processes="each process averages its own images; the domains' vectors are averaged",
    citation="Blanchard et al., Domain Generalization by Marginal Transfer Learning, JMLR 2021",
    cost=1.05,
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
        logits, embeddings = self._logits(prepared, self.embeddings)
        state = {"embeddings": embeddings.detach()}
        return Losses(domain_risks(logits, prepared).sum(), state=state, logits=logits)

    def risks(self, prepared: Prepared, logits: Tensor | None = None) -> Tensor:
        if logits is None:
            logits, _ = self._logits(prepared, self.embeddings)
        return super().risks(prepared, logits)

    def risk(self, prepared: Prepared, domain: int) -> Tensor:
        own = prepared.only(domain)
        logits, _ = self._logits(own, self.embeddings[domain : domain + 1])
        return F.cross_entropy(logits, own.labels)

    def _logits(self, prepared: Prepared, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the domains' embeddings after this step."""
        features = self.network.features(prepared.images, prepared.keep)
        means = torch.stack([x.mean(0) for x in prepared.split(features)])
        now = self.ema * means + (1 - self.ema) * embeddings
        each = torch.cat([e.expand(n, -1) for e, n in zip(now, prepared.sizes, strict=True)])
        return self.network.classifier(torch.cat([features, each], 1)), now

    def predict(self, images: Tensor) -> Tensor:
        features = self.network.features(images)
        mean = features.mean(0).expand_as(features)
        logits: Tensor = self.network.classifier(torch.cat([features, mean], 1))
        return logits
