"""CausIRL-MMD: random parts of the images, cut across domains, with the same distribution."""

from torch import Tensor

from .causirl_coral import CausIRL
from .mmd import gaussian_kernels
from .registry import register_algorithm


@register_algorithm(
    "CausIRL-MMD",
    idea="MMD's penalty between two random mixtures of the domains",
    differs="squared distances come from differences, as in MMD",
    processes="each process draws its own mixtures of its own images",
    citation="Chevalley et al., Invariant Causal Mechanisms through Distribution Matching, "
    "arXiv 2206.11646",
    cost=1.05,
    min_domains=2,
    min_batch=2,
)
class CausIRLMMD(CausIRL):
    r"""Causal invariance by maximum mean discrepancy (Chevalley et al., arXiv 2206.11646).

    Each step cuts the images of every domain at a random place. All images before the cuts and all
    others are two mixtures of the domains, whose proportions should not matter to the features.
    With \(k\) as in `MMD`, the distance between parts with features \(x\) and \(x'\) is

    \[ \overline{k(x, x)} + \overline{k(x', x')} - 2 \, \overline{k(x, x')}, \]

    or 0 if a part has fewer than two images. The loss is the mean domain risk plus `penalty` times
    the distance. Matches DomainBed, but computes squared distances from differences.
    """

    def apart(self, features: Tensor, first: Tensor, second: Tensor) -> Tensor:
        # Both squares and the product at once: a quadratic form in the difference of the weights.
        weights = first / first.sum().clamp(min=1) - second / second.sum().clamp(min=1)
        return weights @ gaussian_kernels(features) @ weights
