"""DSON: normalization per domain, between batch and instance normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from steppe.errors import UserError
from steppe.options import Option
from steppe.search import Choice

from .algorithm import Algorithm, First, Losses, Objective, Prepared, trainable
from .domainnorm import DomainNorm
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "DSON",
    idea="normalization per domain, a learned mixture of batch and instance normalization",
    differs="not in DomainBed",
    processes="each process normalizes by its own images; running statistics are averaged",
    citation="Seo et al., Learning to Optimize Domain Specific Normalization for Domain "
    "Generalization, ECCV 2020",
    cost=1.60,
)
class DSON(Algorithm):
    r"""Domain-specific optimized normalization (Seo et al., ECCV 2020).

    For images of domain \(d\), each batch norm of the network becomes

    \[ \gamma_d \, \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta_d, \qquad
        \mu = w_d \, \mu_d + (1 - w_d) \, \mu_x, \quad
        \sigma^2 = w_d \, \sigma_d^2 + (1 - w_d) \, \sigma_x^2, \]

    where \(\mu_d\) and \(\sigma_d^2\) are those of a channel over the domain's images, and
    \(\mu_x\) and \(\sigma_x^2\) those over one image. \(\gamma_d\), \(\beta_d\) and the share
    \(w_d\), a sigmoid, are learned per layer and domain. DSON minimizes the mean cross-entropy.
    For predictions, \(\mu_d\) and \(\sigma_d^2\) are running statistics. An image of an unseen
    domain gets the mean of the logits that it would have in each source domain.

    DomainBed does not include DSON, and the authors published no code. All domains start with the
    pretrained batch norm's values and with \(w_d = 1/2\). `freeze_bn` has no effect: frozen
    statistics would be the same in all domains. Running statistics change once per step, from its
    first pass. In training mode, `predict` takes equally many images of each source domain, in
    order, and updates running statistics: SWAD re-estimates them in this way.

    Args:
        lr_factor: learning rate of the shares, relative to the network's.
    """

    independent = True

    def __init__(
        self,
        network: Network,
        n_domains: int,
        lr_factor: Annotated[float, Option(Choice((1.0, 10.0)))] = 1.0,
    ) -> None:
        super().__init__(network, n_domains)
        self.lr_factor = lr_factor
        self.norms: dict[str, DomainNorm] = {}
        """The replaced layers, by their path in the algorithm."""
        modules = list(network.featurizer.named_modules())
        kinds = {type(module).__name__ for _, module in modules if isinstance(module, _BatchNorm)}
        if not kinds or kinds - {"BatchNorm2d", "BatchNormAct2d"}:
            has = " and ".join(sorted(kinds)) or "no batch norm"
            raise UserError(
                "algorithm 'DSON' replaces batch norms of type BatchNorm2d or BatchNormAct2d, but "
                f"this backbone has {has}: choose a ResNet or an EfficientNet"
            )
        for name, norm in modules:
            if isinstance(norm, nn.BatchNorm2d):
                new = DomainNorm(norm, n_domains, network.domains)
                network.featurizer.set_submodule(name, new)
                self.norms[f"network.featurizer.{name}"] = new
        self.train()

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        logits, state = self._logits(prepared.images, prepared.sizes, prepared.keep)
        return Losses(F.cross_entropy(logits, prepared.labels), state=state, logits=logits)

    def _logits(
        self, images: Tensor, sizes: tuple[int, ...], keep: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits of images of all source domains, and new running statistics."""
        with self.network.of_domains(sizes):
            logits = self.network(images, keep)
        state = {
            f"{path}.{name}": value
            for path, norm in self.norms.items()
            for name, value in norm.found.items()
        }
        for norm in self.norms.values():
            norm.found = {}
        return logits, state

    def risks(self, prepared: Prepared, logits: Tensor | None = None) -> Tensor:
        if logits is None:
            logits, _ = self._logits(prepared.images, prepared.sizes, prepared.keep)
        return super().risks(prepared, logits)

    def risk(self, prepared: Prepared, domain: int) -> Tensor:
        with self.network.of_domains(only=domain):
            return super().risk(prepared, domain)

    def predict(self, images: Tensor) -> Tensor:
        if self.training:
            return self._estimate(images)
        return torch.stack([self.predict_source(images, d) for d in range(self.n_domains)]).mean(0)

    def predict_source(self, images: Tensor, domain: int) -> Tensor:
        with self.network.of_domains(only=domain):
            return self.network(images)

    @torch.no_grad()
    def _estimate(self, images: Tensor) -> Tensor:
        """Update running statistics with images of all source domains."""
        if len(images) % self.n_domains:
            raise UserError(
                f"algorithm 'DSON': in training mode, predict takes equally many images of each of "
                f"{self.n_domains} source domains, got {len(images)} images: call eval() first"
            )
        sizes = (len(images) // self.n_domains,) * self.n_domains
        logits, state = self._logits(images, sizes, None)
        for name, value in state.items():
            self.get_buffer(name).copy_(value)
        return logits

    def objectives(self) -> Sequence[Objective]:
        factors = dict.fromkeys((norm.mix for norm in self.norms.values()), self.lr_factor)
        return (Objective("main", tuple(trainable(self)), lr_factors=factors),)

    def train(self, mode: bool = True) -> DSON:
        super().train(mode)
        for norm in self.norms.values():  # even if freeze_bn is on
            norm.train(mode)
        return self
