"""IB-ERM: features that vary little, so that they carry no more than they need."""

from typing import Annotated

import torch
from torch import Tensor

from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import First, Losses, Prepared, domain_risks, full_precision
from .annealing import Annealed
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "IB-ERM",
    idea="penalty on the variance of features",
    processes="each process computes variances over its own images; gradients are averaged",
    citation="Ahuja et al., Invariance Principle Meets Information Bottleneck for "
    "Out-of-Distribution Generalization, NeurIPS 2021",
    cost=0.95,
    min_batch=2,
)
class IBERM(Annealed):
    r"""Empirical risk minimization with an information bottleneck (Ahuja et al., NeurIPS 2021).

    Let \(R_d\) be the mean cross-entropy of domain \(d\), and \(\mathrm{Var}_d\) the unbiased
    variance of each of the \(m\) features over its images. IB-ERM minimizes

    \[ \frac{1}{n} \sum_d R_d + \frac{w}{n} \sum_d \frac{1}{m} \|\mathrm{Var}_d\|_1, \]

    where \(w\) is 0 in the first `anneal_steps` steps and `penalty` afterwards. Matches DomainBed.

    Args:
        penalty: weight of the mean variance after annealing.
        anneal_steps: number of initial steps without the penalty.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(LogUniform(-1, 5), drawn_as="ib_lambda")] = 100.0,
        anneal_steps: Annotated[
            int, Option(LogUniform(0, 4, integer=True), drawn_as="ib_penalty_anneal_iters")
        ] = 500,
    ) -> None:
        super().__init__(network, n_domains, penalty, anneal_steps, before=0.0)

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        features = self.network.features(prepared.images, prepared.keep)
        logits = self.network.classifier(features)
        risk = domain_risks(logits, prepared).mean()
        features, _ = full_precision(features, self.network)
        return self.losses(risk, feature_variance(features, prepared), logits)


def feature_variance(features: Tensor, prepared: Prepared) -> Tensor:
    """Compute the variance of each feature over a domain's images, averaged over both."""
    return torch.stack([of_domain.var(0).mean() for of_domain in prepared.split(features)]).mean()
