"""GroupDRO: the domains with the highest risk count the most."""

from typing import Annotated

import torch
from torch import Tensor

from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import Algorithm, First, Losses, Prepared, domain_risks
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "GroupDRO",
    citation="Sagawa et al., Distributionally Robust Neural Networks for Group Shifts, ICLR 2020",
    min_domains=2,
)
class GroupDRO(Algorithm):
    r"""Group distributionally robust optimization (Sagawa et al., ICLR 2020, Alg. 1).

    With \(R_d\) the mean cross-entropy of domain \(d\), it minimizes \(\sum_d q_d R_d\), where
    every step first sets

    \[ q_d \leftarrow \frac{q_d e^{\eta R_d}}{\sum_k q_k e^{\eta R_k}}. \]

    As in DomainBed. The weights of a step come from its first pass, so that all passes of an
    optimizer evaluate one function. Several processes weigh domains by their own images' risks;
    what they remember is the mean of their weights.

    Args:
        eta: how fast the domains' weights follow their risks.
    """

    q: Tensor

    def __init__(
        self,
        network: Network,
        n_domains: int,
        eta: Annotated[float, Option(LogUniform(-3, -1), drawn_as="groupdro_eta")] = 0.01,
    ) -> None:
        super().__init__(network, n_domains)
        self.eta = eta
        self.register_buffer("q", torch.ones(n_domains))

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        risks = domain_risks(self.network(prepared.images, prepared.keep), prepared)
        if first is None:
            q = self.q * (self.eta * risks.detach()).exp()
            q = q / q.sum()
        else:
            q = first["q"]
        return Losses((q * risks).sum(), {"risk": risks.mean()}, aux={"q": q}, state={"q": q})
