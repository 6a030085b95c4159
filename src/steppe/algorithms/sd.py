"""SD: small logits, so that the easiest features do not starve the others."""

from typing import Annotated

from torch.nn import functional as F

from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import Algorithm, First, Losses, Prepared, full_precision
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "SD",
    idea="penalty on the size of the logits",
    citation="Pezeshki et al., Gradient Starvation: A Learning Proclivity in Neural Networks, "
    "NeurIPS 2021",
    cost=1.00,
    linear=True,
)
class SD(Algorithm):
    r"""Spectral decoupling (Pezeshki et al., NeurIPS 2021).

    With logits \(z = f(x)\) of \(C\) classes, SD minimizes

    \[ \overline{\ell(f(x), y)} + \frac{\lambda}{C} \, \overline{\|z\|^2}, \]

    where \(\lambda\) is `penalty` and overlines are means over images. Matches DomainBed; the paper
    divides by 2, not by the number of classes.

    Args:
        penalty: weight of the mean squared logit.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(LogUniform(-5, -1), drawn_as="sd_reg")] = 0.1,
    ) -> None:
        super().__init__(network, n_domains)
        self.penalty = penalty

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        logits = self.network(prepared.images, prepared.keep)
        risk = F.cross_entropy(logits, prepared.labels)
        exact, _ = full_precision(logits, self.network)
        penalty = exact.square().mean()
        parts = {"risk": risk, "penalty": penalty}
        return Losses(risk + self.penalty * penalty, parts, logits=logits)
