"""CORAL: features with the same mean and covariance in all domains."""

from itertools import combinations

import torch
from torch import Tensor

from .algorithm import Prepared
from .matching import FeatureMatching
from .registry import register_algorithm


@register_algorithm(
    "CORAL",
    idea="penalty on differing feature means and covariances",
    citation="Sun and Saenko, Deep CORAL: Correlation Alignment for Deep Domain Adaptation, "
    "ECCV Workshops 2016",
    cost=1.09,
    min_domains=2,
    min_batch=2,
)
class CORAL(FeatureMatching):
    r"""Correlation alignment (Sun and Saenko, Deep CORAL, ECCV Workshops 2016).

    The distance between two domains whose \(m\) features have means \(\mu, \mu'\) and covariances
    \(C, C'\) is

    \[ \frac{1}{m} \|\mu - \mu'\|^2 + \frac{1}{m^2} \|C - C'\|_F^2. \]

    The loss is the mean domain risk plus `penalty` times the mean distance over pairs of domains.
    Matches DomainBed; the paper has no mean term and a quarter of the covariance term.
    """

    def distance(self, features: Tensor, prepared: Prepared) -> Tensor:
        domains = prepared.split(features)
        means = [x.mean(0) for x in domains]
        covariances = [_covariance(x - mean) for x, mean in zip(domains, means, strict=True)]
        pairs = combinations(range(len(means)), 2)
        return torch.stack(
            [
                (means[i] - means[j]).square().mean()
                + (covariances[i] - covariances[j]).square().mean()
                for i, j in pairs
            ]
        ).mean()


def _covariance(centred: Tensor) -> Tensor:
    return centred.T @ centred / (len(centred) - 1)
