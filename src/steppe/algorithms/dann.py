"""DANN: features that do not reveal an image's domain."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.options import Like, Option
from steppe.search import Choice, LogUniform

from .algorithm import Algorithm, First, Losses, Objective, Prepared, full_precision, trainable
from .network import Network, draw_mask
from .registry import register_algorithm


class MLP(nn.Module):
    """DomainBed's perceptron: `depth` linear layers, with dropout masks drawn by `draw_masks`."""

    def __init__(
        self, n_inputs: int, n_outputs: int, width: int, depth: int, dropout: float
    ) -> None:
        super().__init__()
        sizes = [n_inputs, *[width] * (depth - 1), n_outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.width, self.dropout = width, dropout

    def draw_masks(self, images: Tensor) -> tuple[Tensor, ...]:
        """Draw a mask for each hidden layer; none without dropout or in evaluation mode."""
        hidden = len(self.layers) - 1 if self.dropout and self.training else 0
        return tuple(draw_mask(images, self.width, self.dropout) for _ in range(hidden))

    def forward(self, x: Tensor, masks: Sequence[Tensor] = ()) -> Tensor:
        for number, layer in enumerate(self.layers[:-1]):
            x = layer(x)
            x = (x * masks[number] if masks else x).relu()
        outputs: Tensor = self.layers[-1](x)
        return outputs


@register_algorithm(
    "DANN",
    idea="discriminator that the features learn to mislead",
    citation="Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016",
    cost=0.67,
    min_domains=2,
    linear=True,
    drawn_as={"lr": "lr_g", "weight_decay": "weight_decay_g"},
)
class DANN(Algorithm):
    r"""Domain-adversarial training (Ganin et al., JMLR 2016).

    A discriminator \(h\) learns to predict the domain \(d\) from the features \(\varphi(x)\),
    which learn to mislead it. `d_steps` steps that minimize, over \(h\),

    \[ D = \overline{\ell(h(\varphi(x)), d)}
        + w_g \, \overline{\|\partial \ell(h(\varphi(x)), d) / \partial \varphi(x)\|^2} \]

    alternate with one step that minimizes, over the rest of the network,

    \[ \overline{\ell(f(x), y)} - \lambda D, \]

    where \(\lambda\) is `penalty`, \(w_g\) is `grad_penalty`, and means are over all images.

    Matches DomainBed, which alternates the two kinds of step; the paper makes both updates in one
    step with a gradient reversal layer. Both parts use the run's optimizer, with
    `betas=(beta1, 0.9)` if it has `betas`.

    Args:
        penalty: weight of the discriminator's loss.
        d_steps: discriminator steps per network step.
        grad_penalty: weight of the discriminator's squared gradient norm.
        beta1: first of the optimizer's `betas`, if it has any.
        width: width of the discriminator's hidden layers.
        depth: number of layers of the discriminator.
        dropout: dropout of the discriminator.
        lr: learning rate of the discriminator; None uses the optimizer's.
        weight_decay: weight decay of the discriminator; None uses the optimizer's.
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
        """Build the discriminator's input for each image."""
        return features

    def discriminator_risk(self, losses: Tensor, labels: Tensor) -> Tensor:
        """Reduce the discriminator's loss per image to its risk."""
        return losses.mean()

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
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
        logits = self.network.classifier(features)
        risk = F.cross_entropy(logits, prepared.labels)
        adversary = self._discriminate(features, prepared)
        parts = {"risk": risk, "adversary": adversary}
        return Losses(risk - self.penalty * adversary, parts, logits=logits)

    def _discriminate(self, features: Tensor, prepared: Prepared) -> Tensor:
        if not self.grad_penalty:
            losses = self._losses(self.discriminator_input(features, prepared.labels), prepared)
            return self.discriminator_risk(losses, prepared.labels)
        features, exact = full_precision(features, self.network)
        with exact, torch.enable_grad():  # the loss contains a gradient, even under no_grad
            seen = self.discriminator_input(features, prepared.labels)
            if not seen.requires_grad:
                seen = seen.detach().requires_grad_()
            losses = self._losses(seen, prepared)
            (slopes,) = torch.autograd.grad(losses.sum(), seen, create_graph=True)
            risk = self.discriminator_risk(losses, prepared.labels)
            return risk + self.grad_penalty * slopes.square().sum(1).mean()

    def _losses(self, seen: Tensor, prepared: Prepared) -> Tensor:
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
