"""Transfer: features on which no nearby classifier suits one domain more than another."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from steppe.options import Option
from steppe.search import Choice, LogUniform, Uniform

from .algorithm import Algorithm, First, Losses, Objective, Prepared, full_precision, trainable
from .heads import Task, head
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "Transfer",
    idea="gap between the domains' risks, for the worst nearby classifier",
    differs="the network is trained in every search, where DomainBed's optimizer holds only the "
    "adversary; the adversary ascends on the step's own images, where DomainBed's is the last "
    "step's",
    processes="each process ascends on its own images",
    citation="Zhang et al., Quantifying and Improving Transferability in Domain Generalization, "
    "NeurIPS 2021",
    cost=2.06,
    min_domains=2,
)
class Transfer(Algorithm):
    r"""Transfer (Zhang et al., NeurIPS 2021).

    Let \(R_d(h)\) be the mean cross-entropy of domain \(d\) with classifier \(h\) on the features
    \(\varphi(x)\). Each step makes two updates with one optimizer. The first minimizes, over the
    network, the mean cross-entropy; the second minimizes, over the featurizer,

    \[ \lambda \max_{\|h' - h\| \le \delta} \left( \max_i R_i(h') - \min_j R_j(h') \right), \]

    where \(\lambda\) is `penalty`. The adversary \(h'\) starts as the classifier \(h\), makes
    `d_steps` gradient steps to increase this objective, and returns to the ball after each.

    DomainBed samples `gda=True` in every search, so that its optimizer holds only the adversary and
    the network keeps its initial weights; this class always trains the network, as in the paper and
    in DomainBed's defaults. DomainBed's adversary ascends at the end of a step and meets the next
    step's batch. Ours ascends in every pass, on the step's own images, so it needs no state and is
    the maximum at the weights of that pass. All passes compare the domains that the first pass
    chose. With several processes, each ascends on its own images. DomainBed's `beta1` and
    `weight_decay_d` have no effect there, so they are no options here.

    Args:
        penalty: weight of the gap.
        delta: greatest distance between adversary and classifier.
        d_steps: gradient steps of the adversary.
        inner_lr: learning rate of the adversary.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(LogUniform(-2, 1), drawn_as="t_lambda")] = 1.0,
        delta: Annotated[float, Option(Uniform(0.1, 3.0))] = 2.0,
        d_steps: Annotated[int, Option(Choice((1, 2, 5)), low=1, drawn_as="d_steps_per_g")] = 10,
        inner_lr: Annotated[float, Option(LogUniform(-4.5, -2.5), drawn_as="lr_d")] = 1e-3,
    ) -> None:
        super().__init__(network, n_domains)
        self.penalty, self.delta = penalty, delta
        self.d_steps, self.inner_lr = d_steps, inner_lr

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        features = self.network.features(prepared.images, prepared.keep)
        if objective == "main":
            logits = self.network.classifier(features)
            return Losses(F.cross_entropy(logits, prepared.labels), logits=logits)
        exact, full = full_precision(features, self.network)
        with full:
            task = Task.of(exact, prepared)
            adversary, signs = self._ascend(
                task.frozen(), None if first is None else first["signs"]
            )
            gap = (signs[-1] * task.risks(adversary)[0]).sum()
        return Losses(self.penalty * gap, {"gap": gap}, {"signs": signs})

    @torch.no_grad()
    def _ascend(self, task: Task, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the adversary, and the signs of each domain's risk in every gap on the way."""
        center = adversary = head(self.network.classifier)
        signs: list[Tensor] = []
        for k in range(self.d_steps + 1):
            signs.append(_signs(task.risks(adversary)[0]) if given is None else given[k])
            if k < self.d_steps:
                slope = task.slopes(adversary, signs[k] @ task.means[None])
                moved = self.inner_lr * self.penalty * slope + adversary - center
                distance = moved.norm()
                scale = torch.where(distance > self.delta, self.delta / distance, 1.0)
                adversary = center + scale * moved
        return adversary, torch.stack(signs)

    def objectives(self) -> Sequence[Objective]:
        return (
            Objective("main", tuple(trainable(self.network))),
            Objective("gap", tuple(trainable(self.network.featurizer)), optimizer="main"),
        )


def _signs(risks: Tensor) -> Tensor:
    """Return 1 for the domain with the highest risk, -1 for the one with the lowest, else 0."""
    highest, lowest = (F.one_hot(i, len(risks)) for i in (risks.argmax(), risks.argmin()))
    return (highest - lowest).to(risks.dtype)
