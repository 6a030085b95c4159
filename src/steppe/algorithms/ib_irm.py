"""IB-IRM: an invariant classifier on features that vary little."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import First, Losses, Objective, Prepared, domain_risks, full_precision
from .annealing import Annealed
from .ib_erm import feature_variance
from .irm import scale_penalty
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "IB-IRM",
    idea="the penalties of IRM and IB-ERM",
    processes="each process computes both penalties of its own images; gradients are averaged",
    citation="Ahuja et al., Invariance Principle Meets Information Bottleneck for "
    "Out-of-Distribution Generalization, NeurIPS 2021",
    cost=0.95,
    min_domains=2,
    min_batch=2,
)
class IBIRM(Annealed):
    r"""Invariant risk minimization with an information bottleneck (Ahuja et al., NeurIPS 2021).

    Let \(R_d(s)\) be the mean cross-entropy of domain \(d\) with its logits multiplied by \(s\),
    and \(\mathrm{Var}_d\) the unbiased variance of each of the \(m\) features over its images.
    IB-IRM minimizes

    \[ \frac{1}{n} \sum_d R_d(1) + \frac{w}{n} \sum_d R_d'(1)^2
        + \frac{v}{n} \sum_d \frac{1}{m} \|\mathrm{Var}_d\|_1. \]

    The weight \(w\) is 1 in the first `anneal_steps` steps and `penalty` afterwards; \(v\) is 0 in
    the first `ib_anneal_steps` steps and `ib_penalty` afterwards. Each change resets the
    optimizer's state. Matches DomainBed; the square is estimated as in `IRM`.

    Args:
        penalty: weight of the squared derivatives after annealing.
        anneal_steps: number of initial steps with weight 1 for the squared derivatives.
        ib_penalty: weight of the mean variance after annealing.
        ib_anneal_steps: number of initial steps without the penalty on variances.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(LogUniform(-1, 5), drawn_as="irm_lambda")] = 100.0,
        anneal_steps: Annotated[
            int, Option(LogUniform(0, 4, integer=True), drawn_as="irm_penalty_anneal_iters")
        ] = 500,
        ib_penalty: Annotated[float, Option(LogUniform(-1, 5), drawn_as="ib_lambda")] = 100.0,
        ib_anneal_steps: Annotated[
            int, Option(LogUniform(0, 4, integer=True), drawn_as="ib_penalty_anneal_iters")
        ] = 500,
    ) -> None:
        super().__init__(network, n_domains, penalty, anneal_steps, before=1.0)
        self.ib_penalty, self.ib_anneal_steps = ib_penalty, ib_anneal_steps

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        features = self.network.features(prepared.images, prepared.keep)
        logits = self.network.classifier(features)
        risk = domain_risks(logits, prepared).mean()
        exact, _ = full_precision(logits, self.network)
        irm = self.losses(risk, scale_penalty(exact, prepared), logits)
        features, _ = full_precision(features, self.network)
        variance = feature_variance(features, prepared)
        active = (self.steps >= self.ib_anneal_steps).to(variance.dtype)
        return replace(
            irm,
            total=irm.total + self.ib_penalty * active * variance,
            parts={**irm.parts, "variance": variance},
        )

    def objectives(self) -> Sequence[Objective]:
        (objective,) = super().objectives()
        changes = {self.anneal_steps, self.ib_anneal_steps}
        return (replace(objective, reset=lambda step: step in changes),)
