"""EQRM: a low risk with high probability over domains, as a quantile of the domains' risks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Annotated

import torch
from torch import Tensor

from steppe.options import Option
from steppe.search import LogUniform, Uniform

from .algorithm import First, Losses, Objective, Prepared, domain_risks
from .annealing import Annealed
from .network import Network
from .registry import register_algorithm

_POINTS, _ROUNDS = 257, 3
"""Each round narrows the interval of the quantile by a factor of 256."""
_EPS = 1e-16


@register_algorithm(
    "EQRM",
    idea="a quantile of the domains' losses instead of their mean",
    differs="the gradient is that of the quantile, where DomainBed differentiates the ends of its "
    "bisection; `lr_factor` is relative to the run's learning rate; a drawn burn-in is a whole "
    "number, without which DomainBed never changes the learning rate",
    processes="each process takes the quantile of the losses of its own images",
    citation="Eastwood et al., Probable Domain Generalization via Quantile Risk Minimization, "
    "NeurIPS 2022",
    cost=1.04,
    min_domains=2,
)
class EQRM(Annealed):
    r"""Empirical quantile risk minimization (Eastwood et al., NeurIPS 2022, Alg. 1).

    With \(R_d\) the mean cross-entropy of domain \(d\) and \(\sigma^2\) the unbiased variance of
    the \(n\) risks, EQRM estimates the distribution of risks over domains by

    \[ F(q) = \frac{1}{n} \sum_d \Phi\!\left(\frac{q - R_d}{h}\right), \qquad
        h = 1.06 \, \sigma \, n^{-1/5}, \]

    and minimizes its quantile \(q\), where \(F(q) = \alpha\) and \(\alpha\) is `quantile`. The
    first `burn_in_steps` steps minimize the mean of the \(R_d\).

    The gradient is that of the quantile, \(-(\partial F / \partial R_d) / F'(q)\). DomainBed finds
    \(q\) by bisection and differentiates only the two ends it starts from: for the risks 0.2, 0.5
    and 0.9, it weights the domains' gradients by 0.12, -0.03 and 0.91 instead of -0.08, 0.32 and
    0.76. After burn-in, its learning rate is a number of its own, here a factor on the run's, with
    the same values at DomainBed's default of 5e-5 for large images.

    Args:
        quantile: the quantile to minimize; 0.5 is the median, near 1 the worst case.
        burn_in_steps: number of initial steps that minimize the mean risk.
        lr_factor: learning rate after burn-in, relative to the run's.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        quantile: Annotated[
            float, Option(Uniform(0.5, 0.99), low=1e-6, high=0.999999, drawn_as="eqrm_quantile")
        ] = 0.75,
        burn_in_steps: Annotated[
            int, Option(LogUniform(2.5, 3.5, integer=True), drawn_as="eqrm_burnin_iters")
        ] = 2500,
        lr_factor: Annotated[
            float,
            Option(
                LogUniform(math.log10(0.002), math.log10(0.2)), drawn_as="eqrm_lr", relative_to="lr"
            ),
        ] = 0.02,
    ) -> None:
        # The weight of the quantile against the mean.
        super().__init__(network, n_domains, 1.0, burn_in_steps, before=0.0)
        self.quantile, self.lr_factor = quantile, lr_factor

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        logits = self.network(prepared.images, prepared.keep)
        risks = domain_risks(logits, prepared)
        mean, quantile = risks.mean(), kde_quantile(risks, self.quantile)
        return Losses(
            torch.where(self.steps < self.anneal_steps, mean, quantile),
            {"risk": mean, "quantile": quantile},
            state={"steps": self.steps + 1},
            logits=logits,
        )

    def objectives(self) -> Sequence[Objective]:
        (objective,) = super().objectives()
        return (replace(objective, lr_steps={self.anneal_steps: self.lr_factor}),)


def kde_quantile(values: Tensor, alpha: float) -> Tensor:
    """Compute a quantile of a Gaussian kernel density estimate, and up to two derivatives.

    A search finds it without gradients. Two of Newton's steps then make it exact; each doubles the
    order to which they depend on `values` as the quantile does.
    """
    x = values.double()  # tails are differences from 1
    bandwidth = 1.06 * len(x) ** -0.2 * (x.var() + _EPS).sqrt()
    q = _search(x.detach(), bandwidth.detach(), alpha)
    for _ in range(2):
        z = (q - x) / bandwidth
        density = (-z.square() / 2).exp().mean() / (math.sqrt(2 * math.pi) * bandwidth)
        q = q - (torch.special.ndtr(z).mean() - alpha) / density
    return q.to(values.dtype)


def _search(x: Tensor, bandwidth: Tensor, alpha: float) -> Tensor:
    """Find the quantile to about 1e-7 of the range of `x`, without asking the host."""
    # Between the quantiles of the lowest and of the highest kernel.
    shift = bandwidth * NormalDist().inv_cdf(alpha)
    low, width = x.min() + shift, x.max() - x.min()
    numbers = torch.arange(_POINTS, dtype=x.dtype, device=x.device)
    for _ in range(_ROUNDS):
        width = width / (_POINTS - 1)
        grid = low + width * numbers
        cdf = torch.special.ndtr((grid[:, None] - x) / bandwidth).mean(1)
        low = low + width * ((cdf < alpha).sum() - 1).clamp(0, _POINTS - 2)
    return low + width / 2
