"""VREx: equal risks in all domains."""

from typing import Annotated

from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import First, Losses, Prepared, domain_risks
from .annealing import Annealed
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "VREx",
    idea="penalty on the variance of the domains' losses",
    citation="Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, ICML 2021",
    cost=1.01,
    min_domains=2,
)
class VREx(Annealed):
    r"""Variance risk extrapolation (Krueger et al., ICML 2021).

    Let \(R_d\) be the mean cross-entropy of domain \(d\) and \(\bar R\) the mean of all \(R_d\).
    VREx minimizes

    \[ \bar R + \frac{w}{n} \sum_d (R_d - \bar R)^2, \]

    where \(w\) is 1 in the first `anneal_steps` steps and `penalty` afterwards. Matches DomainBed.

    Args:
        penalty: weight of the variance of the risks after annealing.
        anneal_steps: number of initial steps with penalty weight 1.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(LogUniform(-1, 5), drawn_as="vrex_lambda")] = 10.0,
        anneal_steps: Annotated[
            int, Option(LogUniform(0, 4, integer=True), drawn_as="vrex_penalty_anneal_iters")
        ] = 500,
    ) -> None:
        super().__init__(network, n_domains, penalty, anneal_steps, before=1.0)

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        logits = self.network(prepared.images, prepared.keep)
        risks = domain_risks(logits, prepared)
        risk = risks.mean()
        penalty = (risks - risk).square().mean()
        return self.losses(risk, penalty, logits)
