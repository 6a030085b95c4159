"""MetaReg: a learned penalty on the classifier's weights, which helps in another domain."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.options import Option
from steppe.search import Choice, LogUniform

from .algorithm import (
    Algorithm,
    First,
    Losses,
    Objective,
    Prepared,
    domain_risks,
    full_precision,
    trainable,
)
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "MetaReg",
    idea="learned L1 penalty on the classifier's weights",
    differs="not in DomainBed",
    processes="each process draws its own domains, and takes the inner steps on its own images",
    citation="Balaji et al., MetaReg: Towards Domain Generalization using Meta-Regularization, "
    "NeurIPS 2018",
    cost=1.31,
    min_domains=2,
)
class MetaReg(Algorithm):
    r"""Meta-regularization (Balaji et al., NeurIPS 2018).

    The first `share` of the run trains a copy of the featurizer with a classifier per domain, each
    on its own domain. It also learns the weights \(\varphi\) of a penalty, one per weight:

    \[ R_\varphi(\theta) = \sum_k \varphi_k |\theta_k|. \]

    Each step draws two domains \(a\) and \(b\). From the classifier \(\beta_0\) of domain \(a\),
    `inner_steps` steps \(\beta_{s+1} = \beta_s - \alpha \nabla (R_a + R_\varphi)(\beta_s)\) on the
    copy's features lead to \(\beta_l\), where \(R_d\) is the mean cross-entropy of domain \(d\) and
    \(\alpha\) is `inner_lr`. The penalty's weights minimize \(R_b(\beta_l)\), through all inner
    steps. The rest of the run trains the network, untouched so far, with fixed \(\varphi\) by

    \[ \overline{\ell(f(x), y)} + R_\varphi(\theta). \]

    DomainBed does not include MetaReg, and its authors published no code. The inner steps use one
    batch of domain \(a\). The run's optimizer learns \(\varphi\), from 0 and without weight decay;
    the paper takes gradient steps. With a large `lr_factor`, negative \(\varphi\) leave the loss
    without a minimum. Biases have no penalty. Evaluations in the first part are of the untrained
    network. Checkpoints hold both.

    Args:
        share: share of the run's steps that learn the penalty.
        inner_steps: number of inner steps.
        inner_lr: learning rate of the inner steps.
        lr_factor: learning rate of the penalty's weights, relative to the network's.
        steps: the run's number of steps; `steppe train` passes it.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        share: Annotated[float, Option(high=0.999999)] = 0.5,
        inner_steps: Annotated[int, Option(Choice((5, 20)), low=1)] = 20,
        inner_lr: Annotated[float, Option(LogUniform(-4, -2))] = 0.001,
        lr_factor: Annotated[float, Option()] = 0.001,
        steps: int = 5000,
    ) -> None:
        super().__init__(network, n_domains)
        self.first_steps = int(share * steps)
        self.inner_steps, self.inner_lr, self.lr_factor = inner_steps, inner_lr, lr_factor
        self.copy = copy.deepcopy(network)
        # The classifiers of all domains, one after the other.
        self.copy.classifier = nn.Linear(network.n_features, n_domains * network.n_classes)
        self.phi = nn.Parameter(torch.zeros_like(network.classifier.weight))

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        prepared = super().prepare(batches)
        domains = [torch.full_like(batch.labels, d) for d, batch in enumerate(batches)]
        # Tensors, so that a CUDA graph serves all pairs.
        pair = torch.randperm(len(batches), device=prepared.labels.device)[:2]
        return replace(prepared, draws={"domains": torch.cat(domains), "pair": pair})

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        if objective == "heads":
            each = self.copy(prepared.images, prepared.keep).unflatten(1, (self.n_domains, -1))
            own = torch.cat([z[:, d] for d, z in enumerate(prepared.split(each))])
            return Losses(domain_risks(own, prepared).mean())
        if objective == "regularizer":
            return self._after_inner_steps(prepared, first)
        logits = self.network(prepared.images, prepared.keep)
        risk = F.cross_entropy(logits, prepared.labels)
        penalty = (self.phi * self.network.classifier.weight.abs()).sum()
        return Losses(risk + penalty, {"risk": risk, "penalty": penalty}, logits=logits)

    def _after_inner_steps(self, prepared: Prepared, first: First) -> Losses:
        if first is None:  # the copy stands still in all passes of this objective
            with torch.no_grad():
                features = self.copy.features(prepared.images, prepared.keep)
        else:
            features = first["features"]
        x, exact = full_precision(features, self.network)
        labels, domains = prepared.labels, prepared.draws["domains"]
        a, b = prepared.draws["pair"]
        with exact:
            weight, bias = self.inner(x, labels, (domains == a).to(x.dtype), a)
            losses = F.cross_entropy(F.linear(x, weight, bias), labels, reduction="none")
            of_b = (domains == b).to(x.dtype)
            return Losses((of_b * losses).sum() / of_b.sum(), aux={"features": features})

    def inner(self, x: Tensor, labels: Tensor, used: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Take the inner steps of a domain's classifier, on the images with `used` 1."""
        weight, bias = (
            p.detach().unflatten(0, (self.n_domains, -1)).index_select(0, a[None]).squeeze(0)
            for p in (self.copy.classifier.weight, self.copy.classifier.bias)
        )
        mean = (used / used.sum())[:, None]
        targets = F.one_hot(labels, self.network.n_classes)
        for _ in range(self.inner_steps):  # with the closed form of the gradient
            slopes = mean * (F.linear(x, weight, bias).softmax(1) - targets)
            slope = slopes.T @ x + self.phi * weight.sign()
            weight, bias = weight - self.inner_lr * slope, bias - self.inner_lr * slopes.sum(0)
        return weight, bias

    def objectives(self) -> Sequence[Objective]:
        def learns(step: int) -> bool:
            return step < self.first_steps

        return (
            Objective("heads", tuple(trainable(self.copy)), active=learns),
            Objective(
                "regularizer",
                (self.phi,),
                active=learns,
                lr_factors={self.phi: self.lr_factor},
                options={"weight_decay": 0.0},  # would outweigh small gradients
            ),
            Objective("main", tuple(trainable(self.network)), active=lambda s: not learns(s)),
        )
