"""EISNet: features that also solve jigsaw puzzles and keep classes apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import Algorithm, First, Losses, Prepared, full_precision
from .jigsaw import N_ORDERS, orders, shuffled
from .keys import Keys, draw_columns, embed
from .network import Network
from .registry import register_algorithm

_WIDTH = 128
"""Dimensions of an embedding, as in the authors' repository."""


@register_algorithm(
    "EISNet",
    idea="jigsaw puzzles, and triplets with a memory of past images",
    differs="not in DomainBed",
    processes="positives are images of the same process; the memory holds those of all processes",
    citation="Wang et al., Learning from Extrinsic and Intrinsic Supervisions for Domain "
    "Generalization, ECCV 2020",
    cost=1.34,
)
class EISNet(Algorithm):
    r"""Extrinsic and intrinsic supervisions (Wang et al., ECCV 2020).

    An image keeps its order with probability `in_order`; otherwise its 3 x 3 tiles move to one of
    31 orders \(o\). From the result \(x\), the network predicts the class \(y\), and a second
    classifier \(h\) predicts the order. Let \(q\) be a linear embedding of the features, scaled to
    length 1, and \(k\) the same of the original image by a momentum network, whose weights are a
    moving average of the network's, \(\theta' \leftarrow e \, \theta' + (1 - e) \, \theta\).
    EISNet minimizes

    \[ \overline{\ell(f(x), y)} + w_j \, \overline{\ell(h(\varphi(x)), o)} + w_t \,
        \overline{\left[ \|q_i - k_j\|^2 - \|q_i - k_n\|^2 + m \right]_+}, \]

    where \(w_j\) is `jigsaw`, \(w_t\) is `triplet`, \(e\) is `ema` and \(m\) is `margin`. The last
    mean is over all pairs \(i < j\) of a class, in random order, with up to `negatives` keys
    \(k_n\) of other classes each. They are drawn, with replacement, from this step's keys and the
    `queue` last ones, if they are farther from \(q_i\) than \(k_j\), but by less than \(m\).

    DomainBed does not include EISNet. This follows the authors' repository with five differences:
    the second classifier has one output per order, the momentum network's batch-norm statistics
    follow the network's, the orders are our own, `queue` does not count this step's keys, and the
    momentum network never sees gray. If the image size is not divisible by 3, one or two pixels at
    the right and bottom stay in place. With accumulated batches, the queue gets the keys of the
    first part. Checkpoints hold both networks.

    Args:
        jigsaw: weight of the loss of the order.
        triplet: weight of the triplet loss.
        in_order: probability of keeping an image's order; the others draw one of all orders.
        gray: probability of making a tile gray.
        margin: margin of the triplet loss, in squared distances.
        negatives: largest number of negatives per pair.
        queue: number of past keys to remember.
        ema: decay of the momentum network.
    """

    orders: Tensor

    def __init__(
        self,
        network: Network,
        n_domains: int,
        jigsaw: Annotated[float, Option(LogUniform(-1.5, 0.5))] = 0.7,
        triplet: Annotated[float, Option(LogUniform(-2, 0))] = 0.5,
        in_order: Annotated[float, Option(high=1.0)] = 0.9,
        gray: Annotated[float, Option(high=1.0)] = 0.1,
        margin: Annotated[float, Option()] = 2.0,
        negatives: Annotated[int, Option(low=1)] = 256,
        queue: Annotated[int, Option(low=1)] = 1024,
        ema: Annotated[float, Option(high=1.0)] = 0.999,
    ) -> None:
        super().__init__(network, n_domains)
        self.jigsaw, self.triplet, self.in_order, self.gray = jigsaw, triplet, in_order, gray
        self.margin, self.negatives = margin, negatives
        self.order_classifier = nn.Linear(network.n_features, N_ORDERS)
        self.embedding = nn.Linear(network.n_features, _WIDTH)
        self.keys = Keys(network.featurizer, self.embedding, queue, ema)
        self.register_buffer("orders", orders(), persistent=False)
        self.train()

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        prepared = super().prepare(batches)
        images, n, device = prepared.images, len(prepared.labels), prepared.images.device
        order = torch.randint(N_ORDERS, (n,), device=device)
        order = order.where(torch.rand(n, device=device) >= self.in_order, 0)
        gray = torch.rand(n, 9, device=device) < self.gray
        shape = (n * (n - 1) // 2, self.negatives)
        draws = {
            "order": order,
            "shuffle": torch.randperm(n, device=device),
            "uniforms": torch.rand(shape, device=device, dtype=images.dtype),
            "keys": self.keys(images),
        }
        network = self.network
        images = shuffled(images, self.orders[order], gray, network.mean, network.std)
        return replace(prepared, images=images, draws=draws)

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        features = self.network.features(prepared.images, prepared.keep)
        logits = self.network.classifier(features)
        risk = F.cross_entropy(logits, prepared.labels)
        puzzle = F.cross_entropy(self.order_classifier(features), prepared.draws["order"])
        keys, labels = prepared.draws["keys"], prepared.labels
        queries = embed(self.embedding, features)
        pool = torch.cat([keys, self.keys.memory])
        with full_precision(queries, self.network)[1]:
            distances = 2 - 2 * queries @ pool.T  # squared, between vectors of length 1
        pairs = torch.triu_indices(len(keys), len(keys), 1, device=keys.device)
        i, j = prepared.draws["shuffle"][pairs]  # else, anchors would be of the first domains
        positive = distances[i, j, None]  # the pool starts with this step's keys
        if first is None:
            pool_labels = torch.cat([labels, self.keys.labels])
            other = (pool_labels != labels[:, None]) & (pool_labels >= 0)
            gaps = (positive - distances[i] + self.margin).detach()
            near = (gaps > 0) & (gaps < self.margin) & other[i]
            negatives, used = draw_columns(near, prepared.draws["uniforms"])
            first = {"negatives": negatives, "used": used & (labels[i] == labels[j])[:, None]}
        negatives, used = first["negatives"], first["used"]
        hinges = (positive - distances[i[:, None], negatives] + self.margin).relu()
        triplet = (hinges * used).sum() / used.sum().clamp(min=1)
        return Losses(
            risk + self.jigsaw * puzzle + self.triplet * triplet,
            {"risk": risk, "jigsaw": puzzle, "triplet": triplet},
            aux=first,
            logits=logits,
        )

    def commit(self, prepared: Prepared, first: Mapping[str, Losses]) -> None:
        super().commit(prepared, first)
        self.keys.follow(self.network.featurizer, self.embedding)
        self.keys.remember(prepared.draws["keys"], prepared.labels)
