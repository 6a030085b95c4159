"""Fishr: equal gradient variances in all domains."""

from typing import Annotated

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from steppe.options import Option
from steppe.search import LogUniform, Uniform

from .algorithm import First, Losses, Prepared, full_precision
from .annealing import Annealed
from .network import Network
from .registry import register_algorithm


@register_algorithm(
    "Fishr",
    idea="penalty on differing gradient variances",
    citation="Rame et al., Fishr: Invariant Gradient Variances for Out-of-Distribution "
    "Generalization, ICML 2022",
    cost=0.99,
    min_domains=2,
    min_batch=2,
)
class Fishr(Annealed):
    r"""Fishr (Rame et al., ICML 2022).

    Let \(\mathrm{Var}_d\) be the elementwise variance, over the images of domain \(d\), of the
    gradient of the cross-entropy with respect to the \(P\) weights of the classifier. Fishr keeps
    a moving average \(v_d \leftarrow m v_d + (1 - m) \mathrm{Var}_d\), where \(m\) is `ema`, and
    minimizes

    \[ \overline{\ell(f(x), y)} + \frac{w}{n} \sum_d \frac{1}{P}
        \left\| \frac{v_d - \bar v}{1 - m} \right\|^2, \]

    where \(w\) is 0 in the first `anneal_steps` steps and `penalty` afterwards.

    Matches DomainBed, with per-image gradients from `torch.func`. With several processes, each
    compares the variances of its own images, and the moving average is the mean over processes.

    Args:
        penalty: penalty weight after annealing.
        anneal_steps: number of initial steps without the penalty.
        ema: decay of the moving average of the variances.
    """

    variances: Tensor

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(LogUniform(1, 4), drawn_as="lambda")] = 1000.0,
        anneal_steps: Annotated[
            int, Option(Uniform(0, 5000, integer=True), drawn_as="penalty_anneal_iters")
        ] = 1500,
        ema: Annotated[float, Option(Uniform(0.9, 0.99), high=0.999999)] = 0.95,
    ) -> None:
        super().__init__(network, n_domains, penalty, anneal_steps, before=0.0)
        self.ema = ema
        weights = sum(p.numel() for p in network.classifier.parameters())
        self.register_buffer("variances", torch.zeros(n_domains, weights))

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        features = self.network.features(prepared.images, prepared.keep)
        logits = self.network.classifier(features)
        risk = F.cross_entropy(logits, prepared.labels)
        features, exact = full_precision(features, self.network)
        with exact:
            gradients = self._gradients(features, prepared.labels)
            now = torch.stack([g.var(0, correction=0) for g in prepared.split(gradients)])
            averaged = self.ema * self.variances + (1 - self.ema) * now
            # Undo the factor of `now`, so that the penalty's gradient does not shrink with `ema`.
            rescaled = averaged / (1 - self.ema)
            penalty = (rescaled - rescaled.mean(0)).square().mean()
        return self.losses(risk, penalty, logits, variances=averaged.detach())

    def _gradients(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return each image's gradient with respect to the classifier's weights as a row."""

        def loss(weight: Tensor, bias: Tensor, x: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(x, weight, bias), label)

        classifier = self.network.classifier
        of_each = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, None, 0, 0))
        weight, bias = of_each(classifier.weight, classifier.bias, features, labels)
        return torch.cat([weight.flatten(1), bias], 1)
