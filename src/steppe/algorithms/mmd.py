"""MMD: features with the same distribution in all domains, as seen by a kernel."""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from .matching import FeatureMatching
from .registry import register_algorithm

GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)  # of the kernels that are added up


@register_algorithm(
    "MMD",
    citation="Li et al., Domain Generalization with Adversarial Feature Learning, CVPR 2018",
    min_domains=2,
)
class MMD(FeatureMatching):
    r"""Maximum mean discrepancy (Li et al., CVPR 2018, without its adversary).

    The distance of domains with features \(x\) and \(x'\) is, with
    \(k(a, b) = \sum_\gamma e^{-\gamma \|a - b\|^2}\), \(\gamma = 10^{-3}, \dots, 10^3\),

    \[ \overline{k(x, x)} + \overline{k(x', x')} - 2 \, \overline{k(x, x')}, \]

    means over all pairs of images, an image with itself included. The loss is the mean over domains
    of the risk plus `penalty` times the mean distance over pairs of domains. As in DomainBed,
    except that squared distances are those of differences, not expanded into products, which rounds
    away the short ones that the narrow kernels see.
    """

    def distance(self, features: Sequence[Tensor]) -> Tensor:
        sizes = [len(x) for x in features]
        x = torch.cat(list(features))
        squared = (x[:, None] - x[None]).square().sum(-1)
        kernel = torch.stack([(-gamma * squared).exp() for gamma in GAMMAS]).sum(0)
        k = [[block.mean() for block in rows.split(sizes, 1)] for rows in kernel.split(sizes)]
        pairs = combinations(range(len(sizes)), 2)
        return torch.stack([k[i][i] + k[j][j] - 2 * k[i][j] for i, j in pairs]).mean()
