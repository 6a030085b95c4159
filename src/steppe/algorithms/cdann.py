"""CDANN: features that do not tell which domain an image is from, given its class."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .dann import DANN
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "CDANN",
    citation="Li et al., Deep Domain Generalization via Conditional Invariant Adversarial "
    "Networks, ECCV 2018",
    min_domains=2,
    drawn_as={"lr": "lr_g", "weight_decay": "weight_decay_g"},
)
class CDANN(DANN):
    r"""Conditional domain-adversarial training (Li et al., ECCV 2018).

    As `DANN`, except that the discriminator sees \(\varphi(x) + e_y\), with a learned vector for
    every class, and that its risk is balanced: an image of a class that has \(n_y\) of them in the
    batch counts \(1 / (n_y C)\) instead of \(1 / n\), with \(C\) classes. As in DomainBed, except
    that its \(C\) is that of the classes up to the highest in the batch; the paper has a
    discriminator for each class. Several processes balance their own images.
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
