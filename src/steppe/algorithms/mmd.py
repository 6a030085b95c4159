"""MMD: features with the same distribution in all domains, measured with a kernel."""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from .algorithm import Prepared
from .matching import FeatureMatching
from .registry import register_algorithm

GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)  # one Gaussian kernel each


@register_algorithm(
    "MMD",
    idea="penalty on the kernel distance between the domains' features",
    differs="squared distances come from differences, because expanding them into products rounds "
    "away what narrow kernels resolve",
    citation="Li et al., Domain Generalization with Adversarial Feature Learning, CVPR 2018",
    cost=1.07,
    min_domains=2,
)
class MMD(FeatureMatching):
    r"""Maximum mean discrepancy (Li et al., CVPR 2018, without its adversary).

    With \(k(a, b) = \sum_\gamma e^{-\gamma \|a - b\|^2}\), \(\gamma = 10^{-3}, \dots, 10^3\), the
    distance between two domains with features \(x\) and \(x'\) is

    \[ \overline{k(x, x)} + \overline{k(x', x')} - 2 \, \overline{k(x, x')}, \]

    averaged over all pairs of images, including an image with itself. The loss is the mean domain
    risk plus `penalty` times the mean distance over pairs of domains. Matches DomainBed, but
    computes squared distances from differences: expanding them into products would round away the
    short distances that narrow kernels resolve.
    """

    def distance(self, features: Tensor, prepared: Prepared) -> Tensor:
        sizes = list(prepared.sizes)
        kernel = gaussian_kernels(features)
        k = [[block.mean() for block in rows.split(sizes, 1)] for rows in kernel.split(sizes)]
        pairs = combinations(range(len(sizes)), 2)
        return torch.stack([k[i][i] + k[j][j] - 2 * k[i][j] for i, j in pairs]).mean()


def gaussian_kernels(x: Tensor, gammas: Sequence[float] = GAMMAS) -> Tensor:
    """Sum Gaussian kernels between every two rows of a matrix."""
    squared = (x[:, None] - x[None]).square().sum(-1)
    return torch.stack([(-gamma * squared).exp() for gamma in gammas]).sum(0)
