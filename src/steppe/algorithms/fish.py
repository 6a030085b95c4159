"""Fish: gradients of different domains that point the same way."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from steppe.domains.batches import Batch
from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import Algorithm, First, Losses, Prepared
from .inner import Weights, detached_gradients, risk_at, trainable_weights
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "Fish",
    idea="each domain's loss after gradient steps on the domains before it",
    differs="inner steps are gradient steps with their own `inner_lr`, and the order of domains "
    "is random, as in the paper; DomainBed's are steps of Adam in a fixed order. The optimizer's "
    "learning rate replaces `meta_lr`",
    processes="each process draws its own order and takes the inner steps on its own images",
    citation="Shi et al., Gradient Matching for Domain Generalization, ICLR 2022",
    cost=1.42,
    min_domains=2,
)
class Fish(Algorithm):
    r"""Fish (Shi et al., ICLR 2022).

    Each step puts the \(n\) domains in random order and walks through them with gradient steps,
    \(\theta_i = \theta_{i-1} - \alpha \nabla R_i(\theta_{i-1})\) from \(\theta_0 = \theta\), where
    \(R_i\) is the mean cross-entropy of a domain and \(\alpha\) is `inner_lr`. The paper then moves
    the weights by a fraction of \(\theta_n - \theta\). This class minimizes

    \[ \frac{1}{n} \sum_i R_i\Bigl(\theta
        - \alpha \sum_{k<i} \mathrm{stopgrad}(\nabla R_k(\theta_{k-1}))\Bigr), \]

    whose gradient is \((\theta - \theta_n) / (n \alpha)\), so any optimizer can take the paper's
    step. To first order in \(\alpha\), this gradient is on average over orders that of

    \[ \frac{1}{n} \sum_i R_i - \frac{\alpha}{2n} \sum_{i<k} \nabla R_i \cdot \nabla R_k, \]

    so walking rewards large inner products between the gradients of domains.

    With SGD and learning rate \(\eta\), the paper's meta learning rate is
    \(\eta / (n \alpha)\), so DomainBed's `meta_lr` is no option here. DomainBed's inner steps are
    Adam's, with the run's learning rate and in the order of the domains; the paper's are those
    above. The default and the search distribution of `inner_lr` are ours.

    Args:
        inner_lr: learning rate of the inner steps.
    """

    differentiates = True

    def __init__(
        self,
        network: Network,
        n_domains: int,
        inner_lr: Annotated[float, Option(LogUniform(-3, -1))] = 0.01,
    ) -> None:
        super().__init__(network, n_domains)
        self.inner_lr = inner_lr

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        order = tuple(torch.randperm(len(batches)).tolist())
        return replace(super().prepare(batches), draws={"order": order})

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        weights: Weights = trainable_weights(self.network)
        risks: list[Tensor] = []
        with torch.enable_grad():  # the loss contains gradients, even under no_grad
            for domain in prepared.draws["order"]:
                if risks:
                    inner = detached_gradients(risks[-1], weights, retain=True)
                    weights = {name: w - self.inner_lr * inner[name] for name, w in weights.items()}
                risks.append(risk_at(self.network, weights, prepared.only(domain)))
        return Losses(torch.stack(risks).mean())
