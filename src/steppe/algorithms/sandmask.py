"""SANDMask: smaller updates where the domains' gradients disagree."""

from typing import Annotated

import torch
from torch import Tensor

from steppe.options import Option
from steppe.search import LogUniform, Uniform

from .andmask import ANDMask
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "SANDMask",
    idea="smaller updates where the domains' gradients disagree",
    differs="`tau` is 0.5 by default; with DomainBed's 1.0, the mask is always 0 and the network "
    "never learns",
    processes="each process compares the gradients of its own images",
    citation="Shahtalebi et al., SAND-mask: An Enhanced Gradient Masking Strategy for the "
    "Discovery of Invariances in Domain Generalization, arXiv 2106.02266",
    cost=3.44,
    min_domains=2,
)
class SANDMask(ANDMask):
    r"""SAND-mask (Shahtalebi et al., arXiv 2106.02266), a smooth AND-mask.

    Let \(g_d\) be the gradient of domain \(d\)'s mean cross-entropy, and \(\sigma^2\) the variance
    of the \(g_d\) over domains, with divisor \(n - 1\). For each weight,

    \[ m = \max\Bigl(0, \tanh\Bigl( \frac{k}{\sigma^2} \Bigl( \Bigl| \frac{1}{n} \sum_d
        \mathrm{sign}(g_d) \Bigr| - \tau \Bigr) \Bigr) \Bigr). \]

    SANDMask replaces the mean gradient \(\bar g\) by \(m \, \bar g / \bar m\), where \(\bar m\)
    is the mean of \(m\) over a parameter tensor's weights. For large \(k\), this is ANDMask.

    Matches DomainBed except for two cases. Its default `tau` of 1 makes the parenthesis at most 0
    and the mask 0 everywhere; the default here is the middle of its search range. Where the
    variance is 0, both take the limit, 0 or 1; where the parenthesis is 0, too, the mask here is 0
    and DomainBed's is 1e-17.

    Args:
        tau: agreement of signs that a weight needs to be updated, below 1.
        k: steepness of the mask.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        tau: Annotated[float, Option(Uniform(0.0, 1.0), high=0.999999)] = 0.5,
        k: Annotated[float, Option(LogUniform(-3, 5))] = 10.0,
    ) -> None:
        super().__init__(network, n_domains, tau)
        self.k = k

    def mask(self, gradients: Tensor) -> Tensor:
        surplus = gradients.sign().mean(0).abs() - self.tau
        variance = gradients.var(0).clamp(min=torch.finfo(gradients.dtype).tiny)
        return (self.k * surplus / variance).tanh().relu()
