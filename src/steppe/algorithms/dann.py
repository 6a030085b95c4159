"""DANN: features that do not tell which domain an image is from."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.options import Like, Option
from steppe.search import Choice, LogUniform

from .algorithm import Algorithm, First, Losses, Objective, Prepared, full_precision, trainable
from .mlp import MLP
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "DANN",
    citation="Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016",
    min_domains=2,
    linear=True,
    drawn_as={"lr": "lr_g", "weight_decay": "weight_decay_g"},
)
class DANN(Algorithm):
    r"""Domain-adversarial training (Ganin et al., JMLR 2016).

    A perceptron \(h\) learns to tell the domain \(d\) from the features \(\varphi(x)\), which in
    turn learn to mislead it. `d_steps` steps that minimize over \(h\)

    \[ D = \overline{\ell(h(\varphi(x)), d)}
        + w_g \, \overline{\|\partial \ell(h(\varphi(x)), d) / \partial \varphi(x)\|^2} \]

    are followed by one that minimizes, over the rest of the network,

    \[ \overline{\ell(f(x), y)} - \lambda D, \]

    with \(\lambda\) the `penalty` and \(w_g\) the `grad_penalty`; means are over all images.

    As in DomainBed: the two take turns, where the paper makes one step of both with a gradient
    reversed. Both optimizers come from the optimizer axis. `beta1` (and 0.9 for the other) are the
    `betas` of those that have some.

    Args:
        penalty: the weight of the discriminator's loss.
        d_steps: its steps for each of the network.
        grad_penalty: the weight of its gradient's square.
        beta1: the first of the optimizers' `betas`, where they have some.
        width: of its hidden layers.
        depth: its number of layers.
        dropout: in it.
        lr: its learning rate; None: the optimizer's.
        weight_decay: its weight decay; None: the optimizer's.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(LogUniform(-2, 2), drawn_as="lambda")] = 1.0,
        d_steps: Annotated[
            int,
            Option(LogUniform(0, 3, base=2.0, integer=True), low=1, drawn_as="d_steps_per_g_step"),
        ] = 1,
        grad_penalty: Annotated[float, Option(LogUniform(-2, 1))] = 0.0,
        beta1: Annotated[float, Option(Choice((0.0, 0.5)), high=0.999999)] = 0.5,
        width: Annotated[
            int, Option(LogUniform(6, 10, base=2.0, integer=True), low=1, drawn_as="mlp_width")
        ] = 256,
        depth: Annotated[int, Option(Choice((3, 4, 5)), low=2, drawn_as="mlp_depth")] = 3,
        dropout: Annotated[
            float, Option(Choice((0.0, 0.1, 0.5)), high=0.999999, drawn_as="mlp_dropout")
        ] = 0.0,
        lr: Annotated[float | None, Option(Like("lr"), drawn_as="lr_d")] = None,
        weight_decay: Annotated[
            float | None, Option(LogUniform(-6, -2), drawn_as="weight_decay_d")
        ] = None,
    ) -> None:
        super().__init__(network, n_domains)
        self.penalty, self.d_steps, self.grad_penalty = penalty, d_steps, grad_penalty
        self.beta1, self.lr, self.weight_decay = beta1, lr, weight_decay
        self.discriminator = MLP(network.n_features, n_domains, width, depth, dropout)

    def adversary(self) -> Sequence[nn.Module]:
        return (self.discriminator,)

    def discriminator_input(self, features: Tensor, labels: Tensor) -> Tensor:
        """What the discriminator sees of an image."""
        return features

    def discriminator_risk(self, losses: Tensor, labels: Tensor) -> Tensor:
        """The discriminator's risk, from every image's loss."""
        return losses.mean()

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        """Draws dropout's masks, of the discriminator too."""
        prepared = super().prepare(batches)
        domains = [torch.full_like(batch.labels, d) for d, batch in enumerate(batches)]
        masks = self.discriminator.draw_masks(prepared.images)
        return replace(prepared, draws={"domains": torch.cat(domains), "masks": masks})

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        if objective == "discriminator":
            with torch.no_grad():
                features = self.network.features(prepared.images, prepared.keep)
            return Losses(self._discriminate(features, prepared))
        features = self.network.features(prepared.images, prepared.keep)
        risk = F.cross_entropy(self.network.classifier(features), prepared.labels)
        adversary = self._discriminate(features, prepared)
        return Losses(risk - self.penalty * adversary, {"risk": risk, "adversary": adversary})

    def _discriminate(self, features: Tensor, prepared: Prepared) -> Tensor:
        if not self.grad_penalty:
            losses = self._losses(self.discriminator_input(features, prepared.labels), prepared)
            return self.discriminator_risk(losses, prepared.labels)
        features, exact = full_precision(features, self.network)
        with exact, torch.enable_grad():  # a gradient is part of the value, whoever asks for it
            seen = self.discriminator_input(features, prepared.labels)
            if not seen.requires_grad:
                seen = seen.detach().requires_grad_()
            losses = self._losses(seen, prepared)
            (slopes,) = torch.autograd.grad(losses.sum(), seen, create_graph=True)
            risk = self.discriminator_risk(losses, prepared.labels)
            return risk + self.grad_penalty * slopes.square().sum(1).mean()

    def _losses(self, seen: Tensor, prepared: Prepared) -> Tensor:
        """The discriminator's cross-entropy, of every image."""
        outputs = self.discriminator(seen, prepared.draws["masks"])
        return F.cross_entropy(outputs, prepared.draws["domains"], reduction="none")

    def objectives(self) -> Sequence[Objective]:
        cycle = 1 + self.d_steps

        def discriminates(step: int) -> bool:  # DomainBed counts steps from 1 here
            return (step + 1) % cycle < self.d_steps

        betas: dict[str, Any] = {"betas": (self.beta1, 0.9)}
        own = {"lr": self.lr, "weight_decay": self.weight_decay}
        return (
            Objective(
                "discriminator",
                tuple(trainable(*self.adversary())),
                active=discriminates,
                options=betas | {name: value for name, value in own.items() if value is not None},
            ),
            Objective(
                "main",
                tuple(trainable(self.network)),
                active=lambda step: not discriminates(step),
                options=betas,
            ),
        )
