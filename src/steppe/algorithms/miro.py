"""MIRO: features that stay close to those of the network it began with."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.errors import UserError
from steppe.options import Option
from steppe.search import Choice

from .algorithm import Algorithm, First, Losses, Objective, Prepared, trainable
from .network import Network, tapped
from .registry import register_algorithm

_VARIANCE, _EPS = 0.1, 1e-5


@register_algorithm(
    "MIRO",
    citation="Cha et al., Domain Generalization by Mutual-Information Regularization with "
    "Pre-trained Models, ECCV 2022",
    linear=True,
)
class MIRO(Algorithm):
    r"""Mutual-information regularization with an oracle (Cha et al., ECCV 2022).

    With \(f_l\) the output of stage \(l\) of the network, \(f_l^0\) that of the network as it was
    at the beginning, pretrained and never changed, and \(\sigma_l^2\) a learned variance for every
    channel, it minimizes

    \[ \overline{\ell(f(x), y)} + \lambda \sum_l \tfrac{1}{2} \,
        \overline{(f_l - f_l^0)^2 / \sigma_l^2 + \log \sigma_l^2}, \]

    \(\lambda\) being `penalty`; the overlines are means over images, channels and places. The
    variances learn `lr_factor` times as fast as the rest.

    DomainBed does not have it; this follows the authors' repository: the stem and the four blocks
    of a ResNet, the identity as mean encoder. What the first network makes of the images is
    computed once per step, however many passes an optimizer makes. Checkpoints hold both networks.
    The authors tune `penalty` for each dataset; what a search draws it from is ours.

    Args:
        penalty: the weight of the regularizer.
        lr_factor: the learning rate of its own parameters over the network's.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(Choice((0.01, 0.1, 1.0)), drawn_as="miro_lambda")] = 0.1,
        lr_factor: Annotated[float, Option()] = 10.0,
    ) -> None:
        super().__init__(network, n_domains)
        if not network.stages:
            raise UserError(
                "algorithm 'MIRO' compares what comes out of a backbone's stages, and this one's "
                "are not known: choose a ResNet, or another backbone with feature_info in timm"
            )
        self.penalty, self.lr_factor = penalty, lr_factor
        self.first_featurizer = copy.deepcopy(network.featurizer).requires_grad_(False)
        # The softplus of this is the variance.
        start = math.log(math.expm1(_VARIANCE - _EPS))
        self.raw_variances = nn.ParameterList(
            torch.full((stage.channels,), start) for stage in network.stages
        )
        self.train()

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        prepared = super().prepare(batches)
        outputs: list[Tensor] = []
        tap = partial(_collect, outputs)
        with torch.no_grad(), tapped(self.first_featurizer, self.network.stages, tap):
            self.first_featurizer(prepared.images)
        return replace(prepared, draws={"first outputs": outputs})

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        outputs: list[Tensor] = []
        collect = partial(_collect, outputs)
        features = self.network.features(prepared.images, prepared.keep, collect)
        risk = F.cross_entropy(self.network.classifier(features), prepared.labels)
        dims = [stage.dim for stage in self.network.stages]
        before = prepared.draws["first outputs"]
        stages = zip(outputs, before, self.raw_variances, dims, strict=True)
        penalty = torch.stack([_distance(*stage) for stage in stages]).sum()
        return Losses(risk + self.penalty * penalty, {"risk": risk, "penalty": penalty})

    def objectives(self) -> Sequence[Objective]:
        faster = dict.fromkeys(self.raw_variances, self.lr_factor)
        return (Objective("main", tuple(trainable(self)), lr_factors=faster),)

    def train(self, mode: bool = True) -> MIRO:
        super().train(mode)
        self.first_featurizer.eval()
        return self


def _collect(outputs: list[Tensor], number: int, output: Tensor) -> None:
    outputs.append(output)


def _distance(now: Tensor, then: Tensor, raw: Tensor, channel_dim: int) -> Tensor:
    shape = [1] * now.dim()
    shape[channel_dim] = -1
    variance = (F.softplus(raw) + _EPS).view(shape)
    # Small differences, squared: not in half precision.
    difference = now.to(raw.dtype) - then.to(raw.dtype)
    return (difference.square() / variance + variance.log()).mean() / 2
