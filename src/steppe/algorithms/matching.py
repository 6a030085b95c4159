"""What algorithms share that make the features of all domains alike."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import Algorithm, First, Losses, Prepared, domain_risks, full_precision
from .network import Network


class FeatureMatching(Algorithm):
    """Minimizes the mean of the domains' risks and the distance between their features.

    Args:
        penalty: the weight of the distance, the mean over pairs of domains.
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
    def distance(self, features: Sequence[Tensor]) -> Tensor:
        """The mean over pairs of domains, given the features of each."""

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        features = self.network.features(prepared.images, prepared.keep)
        risk = domain_risks(self.network.classifier(features), prepared).mean()
        features, exact = full_precision(features, self.network)
        with exact:
            penalty = self.distance(prepared.split(features))
        return Losses(risk + self.penalty * penalty, {"risk": risk, "penalty": penalty})
