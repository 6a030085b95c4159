"""ADRMX: features of the class as the difference between two networks' features."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.options import Option
from steppe.search import Choice

from .algorithm import Algorithm, First, Losses, Objective, Prepared, full_precision, trainable
from .dann import MLP
from .network import Network
from .nonlinear import Classifier
from .pairs import contrastive_loss, draw_pairs, is_pair
from .registry import register_algorithm


@register_algorithm(
    "ADRMX",
    idea="second network for the domain, and mixed features of two domains",
    differs="remixed pairs are images of one class and different domains, as in the paper; "
    "DomainBed takes positions within the class for positions in the batch, so it mixes any of the "
    "first images. Weight decay and the search over learning rates are the optimizer's",
    processes="each process contrasts and remixes its own images",
    citation="Demirel et al., ADRMX: Additive Disentanglement of Domain Features with Remix Loss, "
    "arXiv 2308.06624",
    cost=1.09,
    min_domains=2,
)
class ADRMX(Algorithm):
    r"""Additive disentanglement with remix loss (Demirel et al., arXiv 2308.06624).

    A second network \(\psi\), a copy of the featurizer \(\varphi\), learns features of the domain
    \(d\); the difference \(z(x) = \varphi(x) - \psi(x)\) should not depend on it. `d_steps` steps
    that minimize \(D = \overline{\ell(h(z), d)}\) over a discriminator \(h\) alternate with one
    step that minimizes, over everything else,

    \[ \overline{\ell(c_1(\varphi), y)} + \overline{\ell(c_2(z), y)}
        + w_d \, \overline{\ell(c_d(\psi), d)} + w_c \, (S(\varphi) + S(z))
        + \frac{w_r}{C} \sum_c \ell(c_1(z(x_c) + \psi(x_c')), c) - w_a D. \]

    \(S\) is the supervised contrastive loss of normalized features, with temperature 0.07, averaged
    over images that share their class. The images \(x_c\) and \(x_c'\) are drawn from class \(c\)
    and different domains; classes without such a pair are left out of the sum over all \(C\)
    classes. All classifiers have two hidden layers. Predictions use \(c_1(\varphi(x))\), so
    \(\psi\), \(c_2\) and \(c_d\) only serve training. Checkpoints hold both networks.

    DomainBed draws positions among the images of a class, but uses them as positions in the batch,
    so that it remixes any two of the first images. Its contrastive loss adds 1e-5 to probabilities
    and 1 to the number of images, which ours does not. Ours normalizes no feature shorter than 1,
    because \(z\) starts as zero up to rounding; DomainBed scales it to length 1. DomainBed ignores
    weight decay and has its own list of learning rates. Both optimizers have
    `betas=(beta1, 0.9)`, as in `DANN`.

    Args:
        penalty: weight \(w_a\) of the discriminator's loss.
        domain_weight: weight \(w_d\) of the domain classifier's loss.
        contrast: weight \(w_c\) of both contrastive losses.
        remix: weight \(w_r\) of the loss of remixed features.
        d_steps: discriminator steps per network step.
        beta1: first of the optimizer's `betas`, if it has any.
        width: width of the discriminator's hidden layers.
        depth: number of layers of the discriminator.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(drawn_as="disc_lambda")] = 0.75,
        domain_weight: Annotated[float, Option(drawn_as="dclf_lambda")] = 1.0,
        contrast: Annotated[float, Option(drawn_as="cnt_lambda")] = 1.0,
        remix: Annotated[float, Option(drawn_as="rmxd_lambda")] = 1.0,
        d_steps: Annotated[int, Option(low=1, drawn_as="d_steps_per_g_step")] = 2,
        beta1: Annotated[float, Option(high=0.999999)] = 0.5,
        width: Annotated[int, Option(low=1, drawn_as="mlp_width")] = 256,
        depth: Annotated[int, Option(Choice((8, 9, 10)), low=2, drawn_as="mlp_depth")] = 9,
    ) -> None:
        super().__init__(network, n_domains)
        self.penalty, self.domain_weight, self.contrast = penalty, domain_weight, contrast
        self.remix, self.d_steps, self.beta1 = remix, d_steps, beta1
        n_features, n_classes = network.n_features, network.n_classes
        network.classifier = Classifier(n_features, n_classes)
        self.domain_network = copy.deepcopy(network)
        self.domain_network.classifier = Classifier(n_features, n_domains)
        self.difference_classifier = Classifier(n_features, n_classes)
        self.discriminator = MLP(n_features, n_domains, width, depth, dropout=0.0)

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        prepared = super().prepare(batches)
        domains = torch.cat([torch.full_like(b.labels, d) for d, b in enumerate(batches)])
        draws = {
            "domains": domains,
            "keep": self.network.draw_mask(prepared.images),
            "remixed": draw_pairs(prepared.labels, domains, self.network.n_classes),
        }
        return replace(prepared, draws=draws)

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        labels, draws = prepared.labels, prepared.draws
        domains, keep, pairs = draws["domains"], draws["keep"], draws["remixed"]
        with torch.set_grad_enabled(torch.is_grad_enabled() and objective == "main"):
            features = self.network.features(prepared.images, prepared.keep)
            of_domain = self.domain_network.features(prepared.images, keep)
            difference = features - of_domain
        adversary = F.cross_entropy(self.discriminator(difference), domains)
        if objective == "discriminator":
            return Losses(adversary)
        mixed = self.network.classifier(difference[pairs[0]] + of_domain[pairs[1]])
        classes = torch.arange(self.network.n_classes, device=labels.device)
        losses = F.cross_entropy(mixed, classes, reduction="none")
        logits = self.network.classifier(features)
        with full_precision(features, self.network)[1]:
            full = (full_precision(x, self.network)[0] for x in (features, difference))
            contrasts = [contrastive_loss(x, labels) for x in full]
        parts = {
            "risk": F.cross_entropy(logits, labels),
            "difference": F.cross_entropy(self.difference_classifier(difference), labels),
            "domain": F.cross_entropy(self.domain_network.classifier(of_domain), domains),
            "contrast": torch.stack(contrasts).sum(),
            "remix": torch.where(is_pair(pairs, labels, domains), losses, 0.0).mean(),
            "adversary": adversary,
        }
        weights = (1.0, 1.0, self.domain_weight, self.contrast, self.remix, -self.penalty)
        total = torch.stack([w * x for w, x in zip(weights, parts.values(), strict=True)]).sum()
        return Losses(total, parts, logits=logits)

    def objectives(self) -> Sequence[Objective]:
        def discriminates(step: int) -> bool:  # DomainBed counts steps from 1 here
            return (step + 1) % (1 + self.d_steps) < self.d_steps

        betas: dict[str, Any] = {"betas": (self.beta1, 0.9)}
        own = tuple(trainable(self.discriminator))
        others = tuple(trainable(*(m for m in self.children() if m is not self.discriminator)))
        return (
            Objective("discriminator", own, discriminates, options=betas),
            Objective("main", others, lambda step: not discriminates(step), options=betas),
        )
