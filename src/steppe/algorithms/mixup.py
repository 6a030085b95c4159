"""Mixup: interpolated images and labels of two domains."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor
from torch.distributions import Beta
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import Algorithm, First, Losses, Prepared, full_precision
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "Mixup",
    idea="images mixed across domains",
    processes="the same as one process, except that each process draws its own shares",
    citation="Wang et al., Heterogeneous Domain Generalization via Domain Mixup, ICASSP 2020; "
    "Zhang et al., mixup, ICLR 2018",
    cost=1.08,
    min_domains=2,
    linear=True,
)
class Mixup(Algorithm):
    r"""Inter-domain mixup (Wang et al., ICASSP 2020; Zhang et al., ICLR 2018).

    Each step puts the domains in random cyclic order and mixes each with the next:
    \(\tilde x = \lambda x_i + (1 - \lambda) x_j\), with one
    \(\lambda \sim \mathrm{Beta}(\alpha, \alpha)\) per pair of domains. Mixup minimizes

    \[ \frac{1}{n} \sum_{(i, j)} \lambda \, \ell(f(\tilde x), y_i)
        + (1 - \lambda) \, \ell(f(\tilde x), y_j). \]

    Matches DomainBed.

    Args:
        alpha: both parameters of the Beta distribution of mixing shares.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        alpha: Annotated[float, Option(LogUniform(-1, 1), low=0.05, drawn_as="mixup_alpha")] = 0.2,
    ) -> None:
        super().__init__(network, n_domains)
        self.alpha = alpha

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        ring = torch.randperm(len(batches)).tolist()
        after = dict(zip(ring, [*ring[1:], ring[0]], strict=True))
        pairs = [(batch, batches[after[domain]]) for domain, batch in enumerate(batches)]
        sizes = tuple(min(len(a.labels), len(b.labels)) for a, b in pairs)
        ours, theirs = (
            Batch(*(torch.cat([t[:n] for t, n in zip(part, sizes, strict=True)]) for part in parts))
            for parts in (zip(*side, strict=True) for side in zip(*pairs, strict=True))
        )
        images = self.network.normalize(ours.images)
        alpha = images.new_full((len(pairs),), self.alpha)
        shares = Beta(alpha, alpha, validate_args=False).sample()
        each = torch.cat([s.expand(n) for s, n in zip(shares, sizes, strict=True)])
        mixed = torch.lerp(self.network.normalize(theirs.images), images, each.view(-1, 1, 1, 1))
        draws = {"others": theirs.labels, "shares": each}
        return Prepared(mixed, ours.labels, sizes, self.network.draw_mask(mixed), draws)

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        logits = self.network(prepared.images, prepared.keep)
        return Losses(self._of_pairs(logits, prepared).mean(), logits=logits)

    def risks(self, prepared: Prepared, logits: Tensor | None = None) -> Tensor:
        """Compute the loss of each domain's own images, which are mixed with another's."""
        if logits is None:
            logits = self.network(prepared.images, prepared.keep)
        logits, exact = full_precision(logits, self.network)
        with exact:
            return self._of_pairs(logits, prepared)

    def risk(self, prepared: Prepared, domain: int) -> Tensor:
        return self.risks(prepared)[domain]

    def _of_pairs(self, logits: Tensor, prepared: Prepared) -> Tensor:
        ours, theirs = (
            F.cross_entropy(logits, labels, reduction="none")
            for labels in (prepared.labels, prepared.draws["others"])
        )
        losses = torch.lerp(theirs, ours, prepared.draws["shares"])
        return torch.stack([pair.mean() for pair in prepared.split(losses)])
