"""MLDG: steps on one domain that also improve another."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Annotated

import torch

from steppe.domains.batches import Batch
from steppe.options import Option
from steppe.search import Choice, LogUniform

from .algorithm import Algorithm, First, Losses, Prepared
from .inner import detached_gradients, risk_at, trainable_weights
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "MLDG",
    idea="loss on one domain after a gradient step on another",
    differs="the inner step is a gradient step with its own `inner_lr`, as in the paper; "
    "DomainBed's is a step of a new Adam",
    processes="each process draws its own pairs and takes the inner step on its own images",
    citation="Li et al., Learning to Generalize: Meta-Learning for Domain Generalization, "
    "AAAI 2018",
    cost=0.90,
    min_domains=2,
)
class MLDG(Algorithm):
    r"""Meta-learning domain generalization (Li et al., AAAI 2018), first order.

    Each step draws `n_meta_test` domains for meta-testing and pairs every other domain with one of
    them. With \(R_d\) the mean cross-entropy of domain \(d\), MLDG minimizes

    \[ \frac{1}{n} \sum_{(i, j)} R_i(\theta)
        + \beta \, R_j(\theta - \gamma \, \mathrm{stopgrad}(\nabla R_i(\theta))) \]

    where \(\gamma\) is `inner_lr`. This is a scalar, so any optimizer can minimize it.

    DomainBed's inner step is one step of a fresh Adam with the run's learning rate; the paper's is
    the gradient step above. The two need different learning rates, so `inner_lr` is a separate
    option with our own default. DomainBed sums gradients where this class sums losses, which is
    equivalent. At least one domain remains for training, whatever `n_meta_test` is.

    Args:
        beta: weight of the risk after the inner step.
        n_meta_test: number of meta-test domains.
        inner_lr: learning rate of the inner step.
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
        domains = [prepared.only(d) for d in range(len(prepared.sizes))]
        weights = trainable_weights(self.network)
        train_risks, test_risks = [], []
        for i, j in prepared.draws["pairs"]:
            with torch.enable_grad():  # the loss contains a gradient, even under no_grad
                risk = risk_at(self.network, weights, domains[i])
                inner = detached_gradients(risk, weights, retain=True)
            moved = {name: w - self.inner_lr * inner[name] for name, w in weights.items()}
            train_risks.append(risk)
            test_risks.append(risk_at(self.network, moved, domains[j]))
        training, testing = (torch.stack(risks).sum() for risks in (train_risks, test_risks))
        pairs = len(train_risks)
        return Losses(
            (training + self.beta * testing) / self.n_domains,
            {"risk": training / pairs, "risk after inner step": testing / pairs},
        )
