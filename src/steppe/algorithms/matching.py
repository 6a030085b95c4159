"""Algorithms that match the feature distributions of all domains."""

from abc import abstractmethod
from typing import Annotated

from torch import Tensor

from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import Algorithm, First, Losses, Prepared, domain_risks, full_precision
from .network import Network


class FeatureMatching(Algorithm):
    """Minimize the mean domain risk plus a distance between the domains' features.

    Args:
        penalty: weight of the mean distance over pairs of domains.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(LogUniform(-1, 1), drawn_as="mmd_gamma")] = 1.0,
    ) -> None:
        super().__init__(network, n_domains)
        self.penalty = penalty

    @abstractmethod
    def distance(self, features: Tensor, prepared: Prepared) -> Tensor:
        """Compute the mean distance over pairs of domains from the features of all images."""

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        features = self.network.features(prepared.images, prepared.keep)
        logits = self.network.classifier(features)
        risk = domain_risks(logits, prepared).mean()
        features, exact = full_precision(features, self.network)
        with exact:
            penalty = self.distance(features, prepared)
        parts = {"risk": risk, "penalty": penalty}
        return Losses(risk + self.penalty * penalty, parts, logits=logits)
