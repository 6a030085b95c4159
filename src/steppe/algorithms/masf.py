"""MASF: after a gradient step, an unseen domain should confuse and separate classes alike."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.options import Option
from steppe.search import Choice, LogUniform

from .algorithm import Algorithm, First, Losses, Prepared, domain_risks, full_precision
from .inner import detached_gradients, trainable_weights
from .network import Network
from .registry import register_algorithm
from .triplets import semihard, squared_distances, triplet_loss

_TEMPERATURE = 2.0
_CLIP = 2.0
"""The largest norm of a tensor's gradient in the inner step."""


@register_algorithm(
    "MASF",
    idea="after a gradient step, equal class relations in another domain, and compact classes",
    differs="not in DomainBed",
    processes="each process draws its own meta-test domain, takes the inner step on its own "
    "images, and compares only those",
    citation="Dou et al., Domain Generalization via Model-Agnostic Learning of Semantic Features, "
    "NeurIPS 2019",
    cost=2.18,
    min_domains=2,
)
class MASF(Algorithm):
    r"""Model-agnostic learning of semantic features (Dou et al., NeurIPS 2019), first order.

    Each step draws a domain \(j\) for meta-testing. The others' mean risk \(L\) gives an inner step
    \(\theta' = \theta - \alpha \, \mathrm{stopgrad}(\mathrm{clip}(\nabla L(\theta)))\), where clip
    limits each tensor's norm to 2 and \(\alpha\) is `inner_lr`. MASF minimizes

    \[ L(\theta) + \beta_g G(\theta') + \beta_l T(\theta'). \]

    In \(G\), \(s_d^c\) is the softmax of the mean logits of class \(c\) in domain \(d\), divided by
    the temperature 2. With \(C\) classes, of which those absent from either domain add nothing,

    \[ G = \frac{1}{n - 1} \sum_{i \ne j} \frac{1}{C} \sum_c
        \frac{\mathrm{KL}(s_i^c \| s_j^c) + \mathrm{KL}(s_j^c \| s_i^c)}{2}. \]

    \(T\) is the triplet loss with semi-hard negatives, on the first third of each domain's images,
    rounded up. Its squared distances are between outputs of a perceptron, without dropout.

    DomainBed does not include MASF. The authors' repository has three sources and three optimizers
    at once, sums the inner gradient over images instead of averaging it, and also clips the
    gradient of \(G\) and \(T\). Their inner step is tiny, too. All passes keep a step's negatives.

    Args:
        beta_global: weight of \(G\), which compares class relations between domains.
        beta_local: weight of the triplet loss.
        margin: margin of the triplet loss, in squared units of the perceptron's outputs.
        inner_lr: learning rate of the inner step.
    """

    differentiates = True

    def __init__(
        self,
        network: Network,
        n_domains: int,
        beta_global: Annotated[float, Option(LogUniform(-1, 1))] = 1.0,
        beta_local: Annotated[float, Option(LogUniform(-4, -1))] = 0.005,
        margin: Annotated[float, Option(Choice((5.0, 10.0, 20.0)))] = 10.0,
        inner_lr: Annotated[float, Option()] = 1e-5,
    ) -> None:
        super().__init__(network, n_domains)
        self.beta_global, self.beta_local = beta_global, beta_local
        self.margin, self.inner_lr = margin, inner_lr
        self.metric = nn.Sequential(
            *(nn.Linear(network.n_features, 1024), nn.LeakyReLU(0.2)),
            *(nn.Linear(1024, 256), nn.LeakyReLU(0.2)),
        )

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        test = int(torch.randint(len(batches), ()))
        pairs = tuple((i, test) for i in range(len(batches)) if i != test)
        return replace(super().prepare(batches), draws={"pairs": pairs})

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        pairs: Sequence[tuple[int, int]] = prepared.draws["pairs"]
        own = _of_domains(prepared, [i for i, _ in pairs])
        with torch.enable_grad():  # the loss contains a gradient, even under no_grad
            risk = domain_risks(self.network(own.images, own.keep), own).mean()
            moved = self._inner_step(risk)
        features = _call(self.network.featurizer, moved, prepared.images)
        features, exact = full_precision(features, self.network)
        with exact:
            kept = features if prepared.keep is None else features * prepared.keep
            logits = _call(self.network.classifier, moved, kept)
            labels = prepared.split(prepared.labels)
            relations = [*map(class_relations, prepared.split(logits), labels)]
            alignment = torch.stack([divergence(*relations[i], *relations[j]) for i, j in pairs])
            thirds = [x[: -(-len(x) // 3)] for x in prepared.split(features)]
            classes = torch.cat([y[: len(x)] for x, y in zip(thirds, labels, strict=True)])
            distances = squared_distances(self.metric(torch.cat(thirds)))
            negatives = semihard(distances, classes) if first is None else first["negatives"]
            local = triplet_loss(distances, classes, negatives, self.margin)
        total = risk + self.beta_global * alignment.mean() + self.beta_local * local
        parts = {"risk": risk, "global": alignment.mean(), "local": local}
        return Losses(total, parts, aux={"negatives": negatives})

    def _inner_step(self, risk: Tensor) -> dict[Tensor, Tensor]:
        """Return the weights after the inner step, by parameter."""
        weights = trainable_weights(self.network)
        inner = detached_gradients(risk, weights, retain=True)
        clipped = {name: g * (_CLIP / g.norm().clamp(min=_CLIP)) for name, g in inner.items()}
        return {p: p - self.inner_lr * clipped[name] for name, p in weights.items()}


def _of_domains(prepared: Prepared, domains: Sequence[int]) -> Prepared:
    def pick(values: Tensor) -> Tensor:
        return torch.cat([prepared.split(values)[domain] for domain in domains])

    keep = None if prepared.keep is None else pick(prepared.keep)
    sizes = tuple(prepared.sizes[domain] for domain in domains)
    return Prepared(pick(prepared.images), pick(prepared.labels), sizes, keep)


def _call(module: nn.Module, moved: Mapping[Tensor, Tensor], inputs: Tensor) -> Tensor:
    weights = {name: moved.get(p, p) for name, p in module.named_parameters()}
    outputs: Tensor = functional_call(module, weights, (inputs,))
    return outputs


def class_relations(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a domain's log s, one row per class, and which classes it has."""
    members = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    counts = members.sum(0)
    means = members.T @ logits / counts.clamp(min=1)[:, None]
    return (means / _TEMPERATURE).log_softmax(1), counts > 0


def divergence(log_s: Tensor, has: Tensor, log_t: Tensor, also_has: Tensor) -> Tensor:
    """Return the mean symmetric KL divergence over classes, 0 for those that a domain lacks."""
    each = ((log_s.exp() - log_t.exp()) * (log_s - log_t)).sum(1) / 2
    return torch.where(has & also_has, each, 0).mean()
