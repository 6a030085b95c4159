"""DMG: features of which each domain uses its own part."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.errors import UserError
from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import Algorithm, First, Losses, Prepared
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "DMG",
    idea="learned random masks of features per domain, with a penalty on their overlap",
    differs="not in DomainBed",
    citation="Chattopadhyay et al., Learning to Balance Specificity and Invariance for In and Out "
    "of Domain Generalization, ECCV 2020",
    cost=1.05,
    min_domains=2,
)
class DMG(Algorithm):
    r"""Domain-specific masks for generalization (Chattopadhyay et al., ECCV 2020).

    Domain \(d\) keeps feature \(k\) with a learned probability \(p_{dk} = \sigma(m_{dk})\). Each
    image draws a mask \(b \sim \mathrm{Bernoulli}(p_d)\) with the gradient of \(p_d\). The loss is

    \[ \overline{\ell(c(b \odot \varphi(x)), y)} + \lambda \, \overline{
        \frac{\sum_k p_{ik} p_{jk}}{\sum_k p_{ik} + p_{jk} - p_{ik} p_{jk}}}, \]

    where \(\lambda\) is `penalty` and the second mean is over pairs of domains \(i, j\). The
    penalty is small if domains use different features. An image of an unseen domain gets the mean
    of the logits with each domain's \(p_d\) as its mask; one of a source domain gets its domain's
    features with \(p_{dk} > 1/2\).

    DomainBed does not include DMG. This follows the authors' repository, in which \(m\) starts
    uniform in [0, 1]. Their ResNets also mask channels of the two stages before the last, as
    `stages=2` does here; the penalty is then summed over the masked places.

    Args:
        penalty: weight of the overlap of the domains' masks.
        stages: number of stages before the last whose output channels are masked, too.
    """

    independent = True

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(LogUniform(-2, 1))] = 0.1,
        stages: Annotated[int, Option()] = 0,
    ) -> None:
        super().__init__(network, n_domains)
        available = max(len(network.stages) - 1, 0)
        if stages > available:
            raise UserError(
                f"algorithm 'DMG': stages must be <= {available}, the number of stages before this "
                f"backbone's last, got {stages}: choose fewer, or a ResNet"
            )
        self.penalty = penalty
        self.masked = network.stages[-1 - stages : -1]
        widths = (*(stage.channels for stage in self.masked), network.n_features)
        self.mask_logits = nn.ParameterList(torch.rand(n_domains, width) for width in widths)

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        prepared = super().prepare(batches)
        images, n = prepared.images, len(prepared.labels)
        uniforms = [
            torch.rand(n, m.shape[1], device=images.device, dtype=images.dtype)
            for m in self.mask_logits
        ]
        return replace(prepared, draws={"uniforms": uniforms})

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        probabilities, sizes = self._probabilities(), list(enumerate(prepared.sizes))
        each = [torch.cat([p[d].expand(n, -1) for d, n in sizes]) for p in probabilities]
        if first is None:
            kept = _kept(prepared.draws["uniforms"], each)
        else:  # a new threshold at other weights would make the loss jump
            kept = [first[f"kept {place}"] for place in range(len(each))]
        logits = self._logits(prepared.images, prepared.keep, _straight_through(kept, each))
        risk = F.cross_entropy(logits, prepared.labels)
        overlap = torch.stack([_overlap(p) for p in probabilities]).sum()
        return Losses(
            risk + self.penalty * overlap,
            {"risk": risk, "overlap": overlap},
            aux={f"kept {place}": mask for place, mask in enumerate(kept)},
            logits=logits,
        )

    def _probabilities(self) -> list[Tensor]:
        """Return the probability that a domain keeps a channel, for each masked place."""
        return [logits.sigmoid() for logits in self.mask_logits]

    def _logits(self, images: Tensor, keep: Tensor | None, masks: Sequence[Tensor]) -> Tensor:
        def tap(number: int, maps: Tensor) -> Tensor:
            shape = [len(masks[number]), *[1] * (maps.dim() - 1)]
            shape[self.masked[number].dim] = -1
            return maps * masks[number].to(maps.dtype).view(shape)

        features = self.network.features(images, keep, tap if self.masked else None, self.masked)
        logits: Tensor = self.network.classifier(features * masks[-1])
        return logits

    def risks(self, prepared: Prepared, logits: Tensor | None = None) -> Tensor:
        return super().risks(prepared, self(prepared).logits if logits is None else logits)

    def risk(self, prepared: Prepared, domain: int) -> Tensor:
        own = prepared.only(domain)
        each = [p[domain].expand(len(own.labels), -1) for p in self._probabilities()]
        kept = _kept([prepared.split(u)[domain] for u in prepared.draws["uniforms"]], each)
        masks = _straight_through(kept, each)
        return F.cross_entropy(self._logits(own.images, own.keep, masks), own.labels)

    def predict(self, images: Tensor) -> Tensor:
        probabilities = self._probabilities()
        if not self.masked:  # the classifier is linear, so the mean mask gives the mean of logits
            return self._logits(images, None, [probabilities[0].mean(0, keepdim=True)])
        own = ([p[d : d + 1] for p in probabilities] for d in range(self.n_domains))
        return torch.stack([self._logits(images, None, masks) for masks in own]).mean(0)

    def predict_source(self, images: Tensor, domain: int) -> Tensor:
        own = [p[domain : domain + 1] for p in self._probabilities()]
        return self._logits(images, None, [(p > 0.5).to(p.dtype) for p in own])


def _kept(uniforms: Sequence[Tensor], probabilities: Sequence[Tensor]) -> list[Tensor]:
    return [u < p for u, p in zip(uniforms, probabilities, strict=True)]


def _straight_through(kept: Sequence[Tensor], probabilities: Sequence[Tensor]) -> list[Tensor]:
    """Return 0s and 1s with the gradient of the probabilities."""
    pairs = zip(kept, probabilities, strict=True)
    return [mask.to(p.dtype) + (p - p.detach()) for mask, p in pairs]


def _overlap(p: Tensor) -> Tensor:
    """Return the mean over pairs of domains of their masks' soft intersection over union."""
    both = [(p[i] * p[j], p[i] + p[j]) for i, j in combinations(range(len(p)), 2)]
    return torch.stack([(x.sum() / (total - x).sum()) for x, total in both]).mean()
