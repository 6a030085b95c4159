"""MIRO: features that stay close to those of the pretrained network."""

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
    idea="penalty on leaving the pretrained features",
    differs="not in DomainBed",
    citation="Cha et al., Domain Generalization by Mutual-Information Regularization with "
    "Pre-trained Models, ECCV 2022",
    cost=1.57,
    linear=True,
)
class MIRO(Algorithm):
    r"""Mutual-information regularization with an oracle (Cha et al., ECCV 2022).

    Let \(f_l\) be the output of stage \(l\) of the network, \(f_l^0\) that of the frozen initial
    network, and \(\sigma_l^2\) a learned variance per channel. MIRO minimizes

    \[ \overline{\ell(f(x), y)} + \lambda \sum_l \tfrac{1}{2} \,
        \overline{(f_l - f_l^0)^2 / \sigma_l^2 + \log \sigma_l^2}, \]

    where \(\lambda\) is `penalty` and overlines are means over images, channels and positions. The
    variances' learning rate is `lr_factor` times the network's.

    DomainBed does not include MIRO. This follows the authors' repository: the stem and four blocks
    of a ResNet, with the identity as mean encoder. The initial network runs once per step, however
    many passes the optimizer makes. Checkpoints hold both networks. The authors tune `penalty` per
    dataset; the search distribution is ours.

    Args:
        penalty: weight of the regularizer.
        lr_factor: learning rate of the variances, relative to the network's.
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
                "algorithm 'MIRO' compares the outputs of a backbone's stages, but this backbone "
                "does not list its stages: choose a ResNet, or a timm backbone with feature_info"
            )
        self.penalty, self.lr_factor = penalty, lr_factor
        self.first_featurizer = copy.deepcopy(network.featurizer).requires_grad_(False)
        # Chosen so that softplus(start) + _EPS is the initial variance.
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
        logits = self.network.classifier(features)
        risk = F.cross_entropy(logits, prepared.labels)
        dims = [stage.dim for stage in self.network.stages]
        before = prepared.draws["first outputs"]
        stages = zip(outputs, before, self.raw_variances, dims, strict=True)
        penalty = torch.stack([_distance(*stage) for stage in stages]).sum()
        parts = {"risk": risk, "penalty": penalty}
        return Losses(risk + self.penalty * penalty, parts, logits=logits)

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
    # Half precision would round away squares of small differences.
    difference = now.to(raw.dtype) - then.to(raw.dtype)
    return (difference.square() / variance + variance.log()).mean() / 2
