"""SelfReg: features and logits that agree within a class."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.distributions import Beta
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.options import Option

from .algorithm import Algorithm, First, Losses, Prepared, full_precision
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "SelfReg",
    idea="pull towards another image of the class, and towards a mix of two",
    differs="the perceptron is trained, as in the authors' own code; DomainBed never passes it to "
    "the optimizer",
    processes="each process draws partners, and normalizes projections, among its own images",
    citation="Kim et al., SelfReg: Self-supervised Contrastive Regularization for Domain "
    "Generalization, ICCV 2021",
    cost=0.98,
    min_batch=2,
)
class SelfReg(Algorithm):
    r"""Self-supervised contrastive regularization (Kim et al., ICCV 2021).

    Each step draws two partners \(i'\) and \(i''\) of the same class for every image \(i\), which
    may be the image itself, and one \(\gamma \sim \mathrm{Beta}(\alpha, \alpha)\). For vectors
    \(a_i\) and \(b_i\), let

    \[ D(a, b) = \gamma \, \overline{(a_i - b_{i'})^2}
        + (1 - \gamma) \, \overline{(a_i - \gamma b_{i'} - (1 - \gamma) b_{i''})^2}, \]

    with means over images and entries. With logits \(z\), features \(\varphi\) and a perceptron
    \(h\) of three layers with batch norm, SelfReg minimizes

    \[ L + \min(L, 1) \, \bigl( w_z D(z, z) + w_\varphi D(\varphi, h(\varphi)) \bigr), \qquad
        L = \overline{\ell(f(x), y)}. \]

    The factor \(\min(L, 1)\) has no gradient and is the first pass's in all passes of a step. The
    weights \(w_z\) and \(w_\varphi\) are `logit_penalty` and `feature_penalty`.

    Matches DomainBed, where the three options are constants, except that \(h\) is trained, as in
    the authors' own code; DomainBed never passes it to the optimizer. It has no biases that its
    batch norm would cancel, and no running statistics, because predictions do not use it. The paper
    also averages weights and adds the domains one after another, which DomainBed leaves out.

    Args:
        logit_penalty: weight of the distance between logits.
        feature_penalty: weight of the distance between features and projections.
        alpha: both parameters of the Beta distribution of mixing shares.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        logit_penalty: Annotated[float, Option()] = 1.0,
        feature_penalty: Annotated[float, Option()] = 0.3,
        alpha: Annotated[float, Option(low=0.05)] = 0.5,
    ) -> None:
        super().__init__(network, n_domains)
        self.logit_penalty, self.feature_penalty = logit_penalty, feature_penalty
        self.alpha = alpha
        n = network.n_features
        width = n if n == 2048 else 2 * n  # DomainBed's rule: as wide as a ResNet-50's features
        self.projector = nn.Sequential(
            *_normalized(n, width), nn.ReLU(), *_normalized(width, width), nn.ReLU(),
            *_normalized(width, n),
        )  # fmt: skip

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        prepared = super().prepare(batches)
        partners = torch.stack([_same_class(prepared.labels) for _ in range(2)])
        alpha = prepared.images.new_full((), self.alpha)
        share = Beta(alpha, alpha, validate_args=False).sample()
        return replace(prepared, draws={"partners": partners, "share": share})

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        features = self.network.features(prepared.images, prepared.keep)
        logits = self.network.classifier(features)
        risk = F.cross_entropy(logits, prepared.labels)
        scale = risk.detach().clamp(max=1) if first is None else first["scale"]
        projections, exact = full_precision(self.projector(features), self.network)
        with exact:
            outputs = logits.to(projections.dtype)
            of_logits = _distance(outputs, outputs, prepared)
            of_features = _distance(features.to(projections.dtype), projections, prepared)
            penalty = self.logit_penalty * of_logits + self.feature_penalty * of_features
        parts = {"risk": risk, "penalty": penalty}
        return Losses(risk + scale * penalty, parts, aux={"scale": scale}, logits=logits)


def _normalized(n_inputs: int, n_outputs: int) -> tuple[nn.Module, nn.Module]:
    linear = nn.Linear(n_inputs, n_outputs, bias=False)
    return linear, nn.BatchNorm1d(n_outputs, track_running_stats=False)


def _same_class(labels: Tensor) -> Tensor:
    """Draw a random permutation of the images within each class."""
    shuffled = torch.randperm(len(labels), device=labels.device)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    return by_class[labels.argsort(stable=True).argsort()]


def _distance(own: Tensor, others: Tensor, prepared: Prepared) -> Tensor:
    """Compute the mean squared distance to a partner, and to a mix of two."""
    share: Tensor = prepared.draws["share"]
    partner, second = (others[index] for index in prepared.draws["partners"])
    mixed = torch.lerp(second, partner, share)
    return share * F.mse_loss(own, partner) + (1 - share) * F.mse_loss(own, mixed)
