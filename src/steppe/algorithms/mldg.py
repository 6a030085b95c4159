"""MLDG: a step on one domain that should also help another."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Annotated

import torch
from torch.func import functional_call
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.options import Option
from steppe.search import Choice, LogUniform

from .algorithm import Algorithm, First, Losses, Prepared
from .network import Network
from .registry import register_algorithm

_SCALE = 1024.0
"""Keeps the inner gradient from vanishing in half precision; a power of two, so exact elsewhere."""


@register_algorithm(
    "MLDG",
    citation="Li et al., Learning to Generalize: Meta-Learning for Domain Generalization, "
    "AAAI 2018",
    min_domains=2,
)
class MLDG(Algorithm):
    r"""Meta-learning domain generalization (Li et al., AAAI 2018), first order.

    Every step draws `n_meta_test` domains for testing and goes through the others, each with one
    of those. With \(R_d\) the mean cross-entropy of domain \(d\), it minimizes

    \[ \frac{1}{n} \sum_{(i, j)} R_i(\theta)
        + \beta \, R_j(\theta - \gamma \, \mathrm{stopgrad}(\nabla R_i(\theta))) \]

    with \(\gamma\) the `inner_lr`: a scalar, which any optimizer can minimize.

    DomainBed's inner step is one of a fresh Adam, with the run's learning rate; the paper's is the
    gradient step above. A learning rate for Adam is none for that, so `inner_lr` is an option of
    its own; its default is ours. DomainBed adds up gradients where this adds up losses; they are
    the same. At least one domain is left to train on, however high `n_meta_test` is.

    Args:
        beta: the weight of the risk after the inner step.
        n_meta_test: domains that each domain is tested on.
        inner_lr: the learning rate of the inner step.
    """

    differentiates = True

    def __init__(
        self,
        network: Network,
        n_domains: int,
        beta: Annotated[float, Option(LogUniform(-1, 1), drawn_as="mldg_beta")] = 1.0,
        n_meta_test: Annotated[int, Option(Choice((1, 2)), low=1)] = 2,
        inner_lr: Annotated[float, Option()] = 0.01,
    ) -> None:
        super().__init__(network, n_domains)
        self.beta, self.inner_lr = beta, inner_lr
        self.n_meta_test = min(n_meta_test, n_domains - 1)

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        order = torch.randperm(len(batches)).tolist()
        training, testing = order[: -self.n_meta_test], order[-self.n_meta_test :]
        pairs = tuple(zip(training, cycle(testing), strict=False))
        return replace(super().prepare(batches), draws={"pairs": pairs})

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        images, labels = prepared.split(prepared.images), prepared.split(prepared.labels)
        keep = [None] * len(images) if prepared.keep is None else prepared.split(prepared.keep)
        weights = {n: p for n, p in self.network.named_parameters() if p.requires_grad}
        train_risks, test_risks = [], []
        for i, j in prepared.draws["pairs"]:
            with torch.enable_grad():  # the loss has a gradient in it, whoever asks for its value
                risk = F.cross_entropy(self.network(images[i], keep[i]), labels[i])
                inner = torch.autograd.grad(
                    risk * _SCALE, list(weights.values()), retain_graph=True, materialize_grads=True
                )
            moved = {
                name: weight - self.inner_lr / _SCALE * g
                for (name, weight), g in zip(weights.items(), inner, strict=True)
            }
            logits = functional_call(self.network, moved, (images[j], keep[j]))
            train_risks.append(risk)
            test_risks.append(F.cross_entropy(logits, labels[j]))
        training, testing = (torch.stack(risks).sum() for risks in (train_risks, test_risks))
        pairs = len(train_risks)
        return Losses(
            (training + self.beta * testing) / self.n_domains,
            {"risk": training / pairs, "risk after inner step": testing / pairs},
        )
