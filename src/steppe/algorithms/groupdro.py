"""GroupDRO: higher weights for domains with higher risks."""

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
    idea="weights that grow with a domain's loss",
    processes="each process weights domains by its own images; the weights are averaged",
    citation="Sagawa et al., Distributionally Robust Neural Networks for Group Shifts, ICLR 2020",
    cost=1.05,
    min_domains=2,
)
class GroupDRO(Algorithm):
    r"""Group distributionally robust optimization (Sagawa et al., ICLR 2020, Alg. 1).

    Minimizes \(\sum_d q_d R_d\), where \(R_d\) is the mean cross-entropy of domain \(d\) and each
    step first updates

    \[ q_d \leftarrow \frac{q_d e^{\eta R_d}}{\sum_k q_k e^{\eta R_k}}. \]

    Matches DomainBed. The first pass of a step sets its weights, so that all passes evaluate the
    same function. With several processes, each weights domains by the risks of its own images, and
    \(q\) becomes the mean over processes.

    Args:
        eta: step size of the domain weights.
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
        logits = self.network(prepared.images, prepared.keep)
        risks = domain_risks(logits, prepared)
        if first is None:
            q = self.q * (self.eta * risks.detach()).exp()
            q = q / q.sum()
        else:
            q = first["q"]
        kept = {"q": q}
        return Losses((q * risks).sum(), {"risk": risks.mean()}, kept, kept, logits)
