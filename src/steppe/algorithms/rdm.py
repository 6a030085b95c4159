"""RDM: losses that are distributed alike in the worst domain and in all domains."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from steppe.options import Option
from steppe.search import Hyperparameter, Uniform

from .algorithm import First, Losses, Objective, Prepared, full_precision
from .annealing import Annealed
from .mmd import gaussian_kernels
from .network import Network
from .registry import register_algorithm

_GAMMAS = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


@register_algorithm(
    "RDM",
    idea="penalty on the kernel distance between the losses of the worst domain and of all",
    differs="every dataset has PACS's ranges, and its batch size if images are large, where "
    "DomainBed has others for some; `lr_factor` is relative to the run's learning rate; squared "
    "distances come from differences, as in MMD",
    processes="each process compares its own images with those of its own worst domain",
    citation="Nguyen et al., Domain Generalisation via Risk Distribution Matching, WACV 2024",
    cost=1.03,
    min_domains=2,
    min_batch=2,
    run={"batch_size": Hyperparameter(88, Uniform(70, 100, integer=True))},
)
class RDM(Annealed):
    r"""Risk distribution matching (Nguyen et al., WACV 2024).

    Let \(r\) be the cross-entropies of all images, \(r'\) those of the images of the domain with
    the highest mean, and \(R_d\) the mean of domain \(d\). With unbiased variances, RDM minimizes

    \[ \frac{1}{n} \sum_d R_d + \lambda \left( \overline{k(r, r)} + \overline{k(r', r')}
        - 2 \, \overline{k(r, r')} \right) + v \left( \mathrm{Var}(r) + \mathrm{Var}(r') \right), \]

    where \(k(a, b) = \sum_\gamma e^{-\gamma (a - b)^2}\), \(\gamma = 10^{-4}, \dots, 10^3\), and
    overlines are means over all pairs of images. The weights \(\lambda\) and \(v\) are 0 in the
    first `anneal_steps` steps and `penalty` and `variance` afterwards. The first pass of a step
    chooses the worst domain, so that all passes evaluate the same function.

    Matches DomainBed with its options for PACS. DomainBed has other ranges for other datasets (for
    DomainNet also other defaults), no variances on TerraIncognita, OfficeHome and DomainNet, and
    40 images per batch on TerraIncognita and DomainNet. After annealing, its learning rate is a
    number of its own, here a factor on the run's, with the same values at DomainBed's default of
    5e-5 for large images. Unlike DomainBed, domains may have batches of different sizes.

    Args:
        penalty: weight of the distance after annealing.
        variance: weight of the variances after annealing.
        anneal_steps: number of initial steps without either.
        lr_factor: learning rate after annealing, relative to the run's.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(Uniform(1.0, 10.0), drawn_as="rdm_lambda")] = 5.0,
        variance: Annotated[float, Option(Uniform(0.001, 0.007), drawn_as="variance_weight")] = (
            0.004
        ),
        anneal_steps: Annotated[
            int, Option(Uniform(800, 2700, integer=True), drawn_as="rdm_penalty_anneal_iters")
        ] = 1500,
        lr_factor: Annotated[
            float, Option(Uniform(0.16, 0.4), drawn_as="rdm_lr", relative_to="lr")
        ] = 0.3,
    ) -> None:
        super().__init__(network, n_domains, 1.0, anneal_steps, before=0.0)
        self.matching, self.variance, self.lr_factor = penalty, variance, lr_factor

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        logits = self.network(prepared.images, prepared.keep)
        losses = F.cross_entropy(logits, prepared.labels, reduction="none")
        risks = torch.stack([of_domain.mean() for of_domain in prepared.split(losses)])
        worst = risks.detach().argmax() if first is None else first["worst"]
        inside = torch.cat([(worst == d).expand(n) for d, n in enumerate(prepared.sizes)])
        losses, exact = full_precision(losses, self.network)
        with exact:
            inside = inside.to(losses.dtype)
            distance = _distance(losses, inside)
            variances = losses.var() + _variance(losses, inside)
            penalty = self.matching * distance + self.variance * variances
        found = self.losses(risks.mean(), penalty, logits)
        parts = {"risk": risks.mean(), "distance": distance, "variances": variances}
        return replace(found, parts=parts, aux={"worst": worst})

    def objectives(self) -> Sequence[Objective]:
        (objective,) = super().objectives()
        return (replace(objective, lr_steps={self.anneal_steps: self.lr_factor}),)


def _distance(losses: Tensor, inside: Tensor) -> Tensor:
    """Compute the kernel distance between the losses inside a domain and all losses."""
    weights = inside / inside.sum() - 1 / len(losses)
    return weights @ gaussian_kernels(losses[:, None], _GAMMAS) @ weights


def _variance(losses: Tensor, inside: Tensor) -> Tensor:
    """Compute the variance of the losses inside a domain."""
    n = inside.sum()
    centred = (losses - inside @ losses / n) * inside
    return centred.square().sum() / (n - 1)
