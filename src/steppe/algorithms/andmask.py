"""ANDMask: updates only where the domains' gradients agree in sign."""

from typing import Annotated

import torch
from torch import Tensor

from steppe.options import Option
from steppe.search import Uniform

from .algorithm import Algorithm, First, Losses, Prepared, domain_risks
from .inner import Weights, detached_gradients, logits_at, risk_at, trainable_weights
from .network import Network
from .registry import register_algorithm

_SMALLEST = 1e-10


@register_algorithm(
    "ANDMask",
    idea="no update where the signs of the domains' gradients differ",
    processes="each process compares the gradients of its own images",
    citation="Parascandolo et al., Learning Explanations That Are Hard to Vary, ICLR 2021",
    cost=2.05,
    min_domains=2,
)
class ANDMask(Algorithm):
    r"""AND-mask (Parascandolo et al., ICLR 2021).

    Let \(g_d\) be the gradient of domain \(d\)'s mean cross-entropy, and

    \[ m = \Bigl[ \Bigl| \frac{1}{n} \sum_d \mathrm{sign}(g_d) \Bigr| \ge \tau \Bigr] \]

    for each weight. ANDMask replaces the mean gradient \(\bar g\) by \(m \, \bar g / \bar m\),
    where \(\bar m\) is the fraction of a parameter tensor's weights that the mask keeps. With
    three domains, any `tau` above 1/3 asks all of them to agree, if no gradient is 0.

    Matches DomainBed. The loss is the mean cross-entropy as a function of
    \(\theta_0 + m / \bar m \, (\theta - \theta_0)\) around the current weights \(\theta_0\). Its
    gradient is exactly zero for masked weights, so that Adam does not amplify a rounding error.
    The first pass of a step sets the mask, and later passes need no gradients of single domains.
    Weight decay and momentum also change masked weights.

    Args:
        tau: agreement of signs that a weight needs to be updated; 0 updates all, 1 needs all
            domains to agree.
    """

    differentiates = True

    def __init__(
        self,
        network: Network,
        n_domains: int,
        tau: Annotated[float, Option(Uniform(0.5, 1.0), high=1.0)] = 1.0,
    ) -> None:
        super().__init__(network, n_domains)
        self.tau = tau

    def mask(self, gradients: Tensor) -> Tensor:
        """Weight the update of each entry of a parameter from 0 to 1.

        Args:
            gradients: those of all domains, stacked.
        """
        agreement = gradients.sign().mean(0).abs()
        return (agreement >= self.tau).to(gradients.dtype)

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        weights = trainable_weights(self.network)
        domains = [prepared.only(d) for d in range(len(prepared.sizes))]
        factors = self._factors(weights, domains) if first is None else first
        scaled = {  # the same values, with the gradient multiplied by the factor
            name: w.detach() + factors[f"factor.{name}"] * (w - w.detach())
            for name, w in weights.items()
        }
        logits = torch.cat([logits_at(self.network, scaled, own) for own in domains])
        updated = torch.stack([factor.count_nonzero() for factor in factors.values()]).sum()
        parts = {"updated": updated / sum(w.numel() for w in weights.values())}
        return Losses(domain_risks(logits, prepared).mean(), parts, aux=factors, logits=logits)

    def _factors(self, weights: Weights, domains: list[Prepared]) -> dict[str, Tensor]:
        """Compute what to multiply the mean gradient of each parameter by."""
        with torch.enable_grad():  # the loss depends on gradients, even under no_grad
            of_each = [
                detached_gradients(risk_at(self.network, weights, own), weights) for own in domains
            ]
        factors = {}
        for name in weights:
            mask = self.mask(torch.stack([gradients[name] for gradients in of_each]))
            factors[f"factor.{name}"] = mask / mask.mean().clamp(min=_SMALLEST)
        return factors
