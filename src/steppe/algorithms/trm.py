"""TRM: each domain's best classifier should also suit the other domains."""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import Algorithm, First, Losses, Prepared, full_precision
from .heads import Task, head
from .network import Network
from .registry import register_algorithm

_STEPS = 30
_TERMS, _LIMIT = 10, 10.0


@register_algorithm(
    "TRM",
    idea="risk of each domain's best classifier in the others",
    differs="the Neumann series starts with its first term and includes biases, and a domain's "
    "weight grows with its risk, as in the paper. DomainBed overwrites the first term in place, "
    "leaves biases out, and multiplies the risk by the weight; it loses the heads and weights when "
    "a run is resumed",
    processes="each process trains the heads on its own images; heads and domain weights are "
    "averaged",
    citation="Xu and Jaakkola, Learning Representations that Support Robust Transfer of "
    "Predictors, arXiv 2110.09940",
    cost=0.96,
    min_domains=2,
)
class TRM(Algorithm):
    r"""Transfer risk minimization (Xu and Jaakkola, arXiv 2110.09940).

    A linear head \(w_Q\) per domain learns from that domain's features: in each step, 30 gradient
    steps on the batch, with learning rate `inner_lr`. With \(R_P(w)\) the mean cross-entropy of
    head \(w\) in domain \(P\), and \(R_\alpha(w_Q) = \sum_{P \ne Q} \alpha_{QP} R_P(w_Q)\), TRM
    minimizes

    \[ \overline{\ell(f(x), y)} + \frac{1}{n} \sum_Q \Bigl( R_\alpha(w_Q) - \lambda \,
        \mathrm{stopgrad}(H_Q^{-1} \nabla_w R_\alpha(w_Q)) \cdot \nabla_w R_Q(w_Q) \Bigr) \]

    over the network, with fixed \(w_Q\). Here \(H_Q\) is the Hessian of \(R_Q(w_Q)\) and
    \(\lambda\) is `penalty`. At \(\lambda = 1\) and optimal heads, the gradient includes how the
    heads follow the features. A Neumann series approximates the inverse,
    \(H^{-1} v \approx \sum_{k=0}^{10} (I - H)^k v\); it diverges if an eigenvalue of \(H\) exceeds
    2, so it ends once an entry of the sum exceeds 10. After each step,
    \(\alpha_{QP} \propto \alpha_{QP} e^{\eta R_P(w_Q)}\), where \(\eta\) is `eta`. The first
    `anneal_steps` steps are ERM, and leave heads and \(\alpha\) as they are.

    DomainBed's series is \(2 (I - H) v + \sum_{k=2}^{10} (I - H)^k v\), because an in-place
    operation overwrites its first term, and it covers weights without biases. DomainBed's exponent
    is \(\eta \alpha_{QP} R_P(w_Q)\), which slows down domains of small weight. This class follows
    the paper: the full series over all of a head's parameters, and exponentiated gradient ascent.
    Every pass trains the heads again, from those of the step before; all passes use as many terms
    of the series as the first. Heads and \(\alpha\) are part of checkpoints. With several
    processes, each trains heads on its own images, and heads and \(\alpha\) become the mean over
    processes.

    Args:
        penalty: weight of the gradient-matching term.
        anneal_steps: number of initial steps of ERM.
        eta: step size of the domain weights.
        inner_lr: learning rate of the heads; features of large norm need a smaller one.
    """

    heads: Tensor
    alpha: Tensor
    steps: Tensor

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(LogUniform(-5, 0), drawn_as="cos_lambda")] = 1e-4,
        anneal_steps: Annotated[
            int, Option(LogUniform(0, 4, integer=True), drawn_as="iters")
        ] = 200,
        eta: Annotated[float, Option(LogUniform(-3, -1), drawn_as="groupdro_eta")] = 0.01,
        inner_lr: Annotated[float, Option()] = 0.1,
    ) -> None:
        super().__init__(network, n_domains)
        self.penalty, self.anneal_steps = penalty, anneal_steps
        self.eta, self.inner_lr = eta, inner_lr
        layers = (nn.Linear(network.n_features, network.n_classes) for _ in range(n_domains))
        self.register_buffer("heads", torch.cat([head(layer) for layer in layers]))
        self.register_buffer("alpha", (1 - torch.eye(n_domains)) / (n_domains - 1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        features = self.network.features(prepared.images, prepared.keep)
        logits = self.network.classifier(features)
        risk = F.cross_entropy(logits, prepared.labels)
        features, exact = full_precision(features, self.network)
        with exact:
            task = Task.of(features, prepared)
            fixed, heads = task.frozen(), self.heads
            for _ in range(_STEPS):
                heads = heads - self.inner_lr * fixed.slopes(heads, task.means)
            risks = task.risks(heads)
            follow, terms = self._solve(fixed, heads, None if first is None else first["terms"])
            matching = (follow * task.slopes(heads, task.means)).sum((1, 2))
            transfer = ((self.alpha * risks).sum(1) - self.penalty * matching).mean()
            # A tensor, because the compiler would bake a number into its code.
            started = self.steps >= self.anneal_steps
            transfer = torch.where(started, transfer, 0.0)
            alpha = self.alpha * (self.eta * risks.detach()).exp()
            alpha = alpha / alpha.sum(1, keepdim=True)
        state = {
            "heads": torch.where(started, heads, self.heads),
            "alpha": torch.where(started, alpha, self.alpha),
            "steps": self.steps + 1,
        }
        parts = {"risk": risk, "transfer": transfer}
        return Losses(risk + transfer, parts, {"terms": terms}, state, logits)

    def _solve(self, task: Task, heads: Tensor, terms: Tensor | None) -> tuple[Tensor, Tensor]:
        r"""Return \(H_Q^{-1} \nabla R_\alpha(w_Q)\) for each head, and how many terms it has."""
        power = task.slopes(heads, self.alpha @ task.means)
        total, count = power, self.steps.new_zeros(len(heads))
        for k in range(_TERMS):
            power = power - task.curvature(heads, task.means, power)
            more = total.abs().amax((1, 2)) <= _LIMIT if terms is None else terms > k
            total = torch.where(more[:, None, None], total + power, total)
            count = count + more
        return total, count
