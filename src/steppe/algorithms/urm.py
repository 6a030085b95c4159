"""URM: features that a discriminator cannot tell from uniform noise."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.options import Like, Option
from steppe.search import Choice, Uniform

from .algorithm import Algorithm, First, Losses, Objective, Prepared, full_precision, trainable
from .network import Network
from .registry import register_algorithm

_WIDTH = 100


class Bounded(nn.Linear):
    """A linear classifier of the hyperbolic tangent of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh())


@register_algorithm(
    "URM",
    idea="features as uniform as noise, by a discriminator",
    differs="features always pass through tanh; DomainBed's search also samples ReLU, whose "
    "features exceed the noise's range. The discriminator sees features after the network's "
    "update, because each update has its own passes",
    processes="the same in distribution; each process draws its own noise",
    citation="Krishnamachari et al., Uniformly Distributed Feature Representations for Fair and "
    "Robust Learning, TMLR 2024",
    cost=1.34,
)
class URM(Algorithm):
    r"""Uniform risk minimization (Krishnamachari et al., TMLR 2024), adversarial.

    The classifier sees \(z = \tanh \varphi(x)\). A discriminator \(h\) learns to tell these
    features from noise \(u\), uniform on \([-1, 1)\) in each coordinate, and the features learn to
    mislead it. Each step makes two updates. The first minimizes, over the network,

    \[ \overline{\ell(f(x), y)} + \lambda \, \overline{\log(1 + e^{-h(z)})}, \]

    and the second minimizes, over the discriminator,

    \[ \overline{\log(1 + e^{-h(u)})} + \lambda \, \overline{\log(1 + e^{h(z)})}, \]

    where \(\lambda\) is `penalty`.

    This follows the authors' code, which is DomainBed's, with the discriminator's learning rate as
    an option and the run's optimizer for both updates. DomainBed reuses the features of the first
    update in the second; this class computes them again, with the updated network and without
    gradients. DomainBed's search samples between tanh and ReLU; this class always uses tanh,
    because ReLU features exceed the range \([0, 1)\) of DomainBed's noise for them.

    Args:
        penalty: weight of the adversarial losses.
        depth: number of hidden layers of the discriminator after the first.
        lr: learning rate of the discriminator; None uses the optimizer's.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(Uniform(0.0, 0.2), drawn_as="urm_adv_lambda")] = 0.1,
        depth: Annotated[
            int, Option(Choice((1, 2, 3)), drawn_as="urm_discriminator_hidden_layers")
        ] = 1,
        lr: Annotated[
            float | None, Option(Like("lr", factor=0.1), drawn_as="urm_discriminator_lr")
        ] = None,
    ) -> None:
        super().__init__(network, n_domains)
        self.penalty, self.lr = penalty, lr
        network.classifier = Bounded(network.n_features, network.n_classes)
        sizes = [network.n_features, *[_WIDTH] * (depth + 1)]
        layers = (layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.LeakyReLU()))
        self.discriminator = nn.Sequential(*layers, nn.Linear(_WIDTH, 1))

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        prepared = super().prepare(batches)
        uniform = prepared.images.new_empty(len(prepared.labels), self.network.n_features)
        return replace(prepared, draws={"noise": uniform.uniform_(-1, 1)})

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        adversary = objective == "discriminator"
        with torch.set_grad_enabled(torch.is_grad_enabled() and not adversary):
            features = self.network.features(prepared.images, prepared.keep)
        exact, full = full_precision(features, self.network)
        with full:
            real = self.discriminator(exact.tanh())
            if adversary:
                noise = F.softplus(-self.discriminator(prepared.draws["noise"])).mean()
                return Losses(noise + self.penalty * F.softplus(real).mean())
            misled = F.softplus(-real).mean()
        logits = self.network.classifier(features)
        risk = F.cross_entropy(logits, prepared.labels)
        parts = {"risk": risk, "adversary": misled}
        return Losses(risk + self.penalty * misled, parts, logits=logits)

    def objectives(self) -> Sequence[Objective]:
        options = {} if self.lr is None else {"lr": self.lr}
        return (
            Objective("main", tuple(trainable(self.network))),
            Objective("discriminator", tuple(trainable(self.discriminator)), options=options),
        )
