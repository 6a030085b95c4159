"""IRM: a single classifier that is optimal in every domain."""

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
    "IRM",
    idea="penalty: scaling a domain's logits should not lower its loss",
    citation="Arjovsky et al., Invariant Risk Minimization, arXiv 1907.02893",
    cost=1.04,
    min_domains=2,
    min_batch=2,
)
class IRM(Annealed):
    r"""Invariant risk minimization (Arjovsky et al., arXiv 1907.02893, IRMv1).

    Let \(R_d(s)\) be the mean cross-entropy of domain \(d\) with its logits multiplied by \(s\).
    IRM minimizes

    \[ \frac{1}{n} \sum_d R_d(1) + \frac{w}{n} \sum_d R_d'(1)^2. \]

    The product of the derivatives over even and over odd images is an unbiased estimate of the
    square. The weight \(w\) is 1 in the first `anneal_steps` steps and `penalty` afterwards.

    Matches DomainBed, but uses the closed form of the derivative,
    \(\sum_c p_c z_c - z_y\) for logits \(z\), instead of autograd.

    Args:
        penalty: penalty weight after annealing.
        anneal_steps: number of initial steps with penalty weight 1.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(LogUniform(-1, 5), drawn_as="irm_lambda")] = 100.0,
        anneal_steps: Annotated[
            int, Option(LogUniform(0, 4, integer=True), drawn_as="irm_penalty_anneal_iters")
        ] = 500,
    ) -> None:
        super().__init__(network, n_domains, penalty, anneal_steps, before=1.0)

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        logits = self.network(prepared.images, prepared.keep)
        risk = domain_risks(logits, prepared).mean()
        exact, _ = full_precision(logits, self.network)
        return self.losses(risk, scale_penalty(exact, prepared), logits)


def scale_penalty(logits: Tensor, prepared: Prepared) -> Tensor:
    """Estimate the mean squared derivative of the domains' risks with respect to a logit scale."""
    slopes = prepared.split(scale_slopes(logits, prepared.labels))
    return torch.stack([s[0::2].mean() * s[1::2].mean() for s in slopes]).mean()


def scale_slopes(logits: Tensor, labels: Tensor) -> Tensor:
    """Differentiate each image's cross-entropy with respect to a logit scale, at scale 1."""
    chosen = logits.gather(1, labels[:, None]).squeeze(1)
    return (logits.softmax(1) * logits).sum(1) - chosen
