"""CDANN: features that do not reveal an image's domain, given its class."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .dann import DANN
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "CDANN",
    idea="as DANN, conditioned on the class",
    differs="classes are balanced over the number of classes, not over the highest label in the "
    "batch",
    citation="Li et al., Deep Domain Generalization via Conditional Invariant Adversarial "
    "Networks, ECCV 2018",
    cost=0.68,
    min_domains=2,
    drawn_as={"lr": "lr_g", "weight_decay": "weight_decay_g"},
)
class CDANN(DANN):
    r"""Conditional domain-adversarial training (Li et al., ECCV 2018).

    Like `DANN`, but the discriminator sees \(\varphi(x) + e_y\), with a learned embedding of each
    class, and its risk is class-balanced: with \(C\) classes, an image whose class has \(n_y\)
    images in the batch has weight \(1 / (n_y C)\) instead of \(1 / n\). Matches DomainBed, except
    that its \(C\) is the highest label in the batch plus one. The paper has one discriminator per
    class. With several processes, each balances its own images.
    """

    def __init__(self, network: Network, n_domains: int, **options: Any) -> None:
        super().__init__(network, n_domains, **options)
        self.class_vectors = nn.Embedding(network.n_classes, network.n_features)

    def adversary(self) -> Sequence[nn.Module]:
        return (self.discriminator, self.class_vectors)

    def discriminator_input(self, features: Tensor, labels: Tensor) -> Tensor:
        vectors: Tensor = self.class_vectors(labels)
        return features + vectors

    def discriminator_risk(self, losses: Tensor, labels: Tensor) -> Tensor:
        counts = F.one_hot(labels, self.network.n_classes).sum(0)
        return (losses / (counts[labels] * self.network.n_classes)).sum()
