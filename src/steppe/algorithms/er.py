"""ER: features that tell the same about the class in every domain, and nothing about the domain."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import Algorithm, First, Losses, Objective, Prepared, domain_risks, trainable
from .network import Network, draw_mask
from .registry import register_algorithm

_DROPOUT = 0.5
_Masked = Iterable[tuple[nn.Module, Tensor]]  # perceptrons, each with its dropout mask


class Perceptron(nn.Module):
    """Two hidden layers, the second a quarter as wide; the mask drops half of its outputs."""

    def __init__(self, n_inputs: int, width: int, n_outputs: int) -> None:
        super().__init__()
        wide, narrow = nn.Linear(n_inputs, width), nn.Linear(width, width // 4)
        self.hidden = nn.Sequential(wide, nn.ReLU(), narrow, nn.ReLU())
        self.output = nn.Linear(width // 4, n_outputs)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        outputs: Tensor = self.output(self.hidden(x) * mask)
        return outputs


@register_algorithm(
    "ER",
    idea="discriminators of domains and of each domain's classes, and classifiers that must agree",
    differs="not in DomainBed",
    processes="each process balances classes within its own images",
    citation="Zhao et al., Domain Generalization via Entropy Regularization, NeurIPS 2020",
    cost=1.36,
    min_domains=2,
)
class ER(Algorithm):
    r"""Entropy regularization (Zhao et al., NeurIPS 2020).

    Besides the network, with features \(\varphi\), each domain \(i\) has a classifier \(T_i\) and
    an adversary \(T_i'\), and all share a discriminator \(D\) of domains. With \(R_d(h)\) the mean
    cross-entropy of \(h(\varphi(x))\) over domain \(d\), and \(\bar R\) one that weights classes
    equally, each step

    1. updates every \(T_i\) with the mean of \(\bar R_i(T_i)\),
    2. updates \(D\), which predicts domains, and every \(T_i'\) with the means of \(R_i(D)\) and
       \(\bar R_i(T_i')\),
    3. updates the network with

    \[ \overline{\ell(f(x), y)} + \frac{1}{n} \sum_i \lambda_c \bar R_{j \ne i}(T_i)
        - \lambda_d R_i(D) - \lambda_e \bar R_i(T_i'), \]

    where \(\bar R_{j \ne i}\) is over all other domains' images together.

    DomainBed does not include ER. The authors' repository updates the network together with its
    opponents, raises the weights of all losses slowly, starts with smaller weights, and weights
    domains in \(D\) by inverse dataset size. The first two updates share one forward pass.

    Args:
        lambda_c: weight of the classifiers' risk on other domains.
        lambda_d: weight of the domain discriminator's risk.
        lambda_e: weight of the adversaries' risk.
        lr_factor: learning rate of every \(T_i\) and \(T_i'\), relative to the network's.
        width: width of the perceptrons' first hidden layer; their second has a quarter of it.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        lambda_c: Annotated[float, Option(LogUniform(-2, 0))] = 0.05,
        lambda_d: Annotated[float, Option(LogUniform(-2, 1))] = 0.1,
        lambda_e: Annotated[float, Option(LogUniform(-4, -2))] = 0.001,
        lr_factor: Annotated[float, Option()] = 0.1,
        width: Annotated[int, Option(low=4)] = 1024,
    ) -> None:
        super().__init__(network, n_domains)
        self.lambda_c, self.lambda_d, self.lambda_e = lambda_c, lambda_d, lambda_e
        self.lr_factor, self.width = lr_factor, width
        sizes = network.n_features, width, network.n_classes
        self.classifiers = nn.ModuleList(Perceptron(*sizes) for _ in range(n_domains))
        self.adversaries = nn.ModuleList(Perceptron(*sizes) for _ in range(n_domains))
        self.discriminator = Perceptron(network.n_features, width, n_domains)

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        prepared = super().prepare(batches)
        with torch.no_grad():
            features = self.network.features(prepared.images, prepared.keep)
        width, n = self.width // 4, 2 * self.n_domains + 1  # a mask per perceptron
        dropout = _DROPOUT if self.training else 0.0
        shared, *masks = draw_mask(prepared.images, n * width, dropout).split(width, 1)
        draws = {"own": masks[::2], "adversaries": masks[1::2], "discriminator": shared}
        return replace(prepared, draws={"features": features, **draws})

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        draws, features = prepared.draws, prepared.draws["features"]
        own = zip(self.classifiers, draws["own"], strict=True)
        if objective == "own":
            return Losses(class_risk(own, features, prepared))
        if objective == "main":
            features = self.network.features(prepared.images, prepared.keep)
        labels = [torch.full_like(y, d) for d, y in enumerate(prepared.split(prepared.labels))]
        found = self.discriminator(features, draws["discriminator"])
        domains = domain_risks(found, replace(prepared, labels=torch.cat(labels))).mean()
        adversaries = zip(self.adversaries, draws["adversaries"], strict=True)
        classes = class_risk(adversaries, features, prepared)
        if objective == "adversaries":
            return Losses(domains + classes, {"domains": domains, "classes": classes})
        logits = self.network.classifier(features)
        risk = F.cross_entropy(logits, prepared.labels)
        others = class_risk(own, features, prepared, others=True)
        total = risk + self.lambda_c * others - self.lambda_d * domains - self.lambda_e * classes
        return Losses(total, {"risk": risk, "other domains": others}, logits=logits)

    def objectives(self) -> Sequence[Objective]:
        own = tuple(trainable(self.classifiers))
        slower = dict.fromkeys((*own, *trainable(self.adversaries)), self.lr_factor)
        others = tuple(trainable(self.discriminator, self.adversaries))
        return (
            Objective("own", own, lr_factors=slower),
            Objective("adversaries", others, lr_factors=slower),
            Objective("main", tuple(trainable(self.network))),
        )


def class_risk(masked: _Masked, x: Tensor, prepared: Prepared, others: bool = False) -> Tensor:
    """Average the risks of one perceptron per domain, on that domain or on all others."""
    risks = []
    for i, (perceptron, mask) in enumerate(masked):
        domains = [d for d in range(len(prepared.sizes)) if (d != i) == others]
        parts = (prepared.split(values) for values in (x, mask, prepared.labels))
        inputs, kept, labels = (torch.cat([part[d] for d in domains]) for part in parts)
        risks.append(class_balanced(perceptron(inputs, kept), labels))
    return torch.stack(risks).mean()


def class_balanced(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the classes that occur of each class's mean cross-entropy."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    counts = F.one_hot(labels, logits.shape[1]).sum(0)
    return (losses / counts[labels]).sum() / (counts > 0).sum()
