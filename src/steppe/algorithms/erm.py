"""ERM: the mean loss over all images, ignoring domains."""

from torch.nn import functional as F

from .algorithm import Algorithm, First, Losses, Prepared
from .registry import register_algorithm


@register_algorithm(
    "ERM",
    idea="nothing",
    citation="Vapnik, Statistical Learning Theory, Wiley 1998",
    cost=1.00,
    linear=True,
)
class ERM(Algorithm):
    r"""Empirical risk minimization (Vapnik, Statistical Learning Theory, 1998).

    Minimizes the mean cross-entropy \(\frac{1}{n}\sum_i \ell(f(x_i), y_i)\) over all images of
    the step, regardless of their domains.
    """

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        logits = self.network(prepared.images, prepared.keep)
        return Losses(F.cross_entropy(logits, prepared.labels), logits=logits)
