"""SagNet: a classifier that relies on content, and features that carry no style."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.options import Option
from steppe.search import LogUniform

from .algorithm import Algorithm, First, Losses, Objective, Prepared, trainable
from .mixstyle import Mix
from .network import Network
from .registry import register_algorithm

_EPS = 1e-5


@register_algorithm(
    "SagNet",
    idea="random styles, and features that do not reveal style",
    differs="the first and the third update share an optimizer, because a separate Adam would "
    "cancel `penalty`",
    processes="the same in distribution; images are mixed with others of the same process",
    citation="Nam et al., Reducing Domain Gap by Reducing Style Bias, CVPR 2021",
    cost=2.37,
)
class SagNet(Algorithm):
    r"""Style-agnostic networks (Nam et al., CVPR 2021).

    The style of an image is the mean \(\mu\) and the standard deviation \(\sigma\) of its
    features \(z\); its content is \((z - \mu) / \sigma\). A step draws another image at random,
    with features \(z'\), and makes three updates:

    1. It updates the network with the risk of its classifier on \(z\) in a style interpolated
       between those of \(z\) and \(z'\) (mean and variance, at a random point).
    2. It updates a second classifier with its risk on the content of \(z'\) in the style of \(z\).
    3. It updates the featurizer with `penalty` times the cross-entropy between the second
       classifier's predictions and the uniform distribution, so that style predicts nothing.

    Matches DomainBed, which takes the style of the features before the classifier; the paper takes
    that of feature maps inside the network. The first and third updates share an optimizer: a
    separate Adam would cancel the scale `penalty`.

    Args:
        penalty: weight of the adversarial loss.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        penalty: Annotated[float, Option(LogUniform(-2, 1), drawn_as="sag_w_adv")] = 0.1,
    ) -> None:
        super().__init__(network, n_domains)
        self.penalty = penalty
        self.style = nn.Linear(network.n_features, network.n_classes)

    def prepare(self, batches: Sequence[Batch]) -> Prepared:
        prepared = super().prepare(batches)
        n, device = len(prepared.labels), prepared.labels.device
        draws = {
            name: Mix(
                torch.randperm(n, device=device),
                torch.rand(n, 1, device=device, dtype=prepared.images.dtype),
            )
            for name in ("main", "style", "adversarial")
        }
        return replace(prepared, draws=draws)

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        swap: Mix = prepared.draws[objective]
        with torch.set_grad_enabled(torch.is_grad_enabled() and objective != "style"):
            features = self.network.features(prepared.images, prepared.keep)
        if objective == "main":
            logits = self.network.classifier(_other_style(features, swap))
            return Losses(F.cross_entropy(logits, prepared.labels), logits=logits)
        logits = self.style(_other_content(features, swap))
        if objective == "style":
            return Losses(F.cross_entropy(logits, prepared.labels))
        # Cast explicitly: on a CPU, unlike a GPU, autocast keeps log_softmax in half precision.
        logp = logits.log_softmax(1, dtype=self.style.weight.dtype)
        return Losses(-self.penalty * logp.mean())

    def objectives(self) -> Sequence[Objective]:
        return (
            Objective("main", tuple(trainable(self.network))),
            Objective("style", tuple(trainable(self.style))),
            Objective("adversarial", tuple(trainable(self.network.featurizer)), optimizer="main"),
        )


def _parts(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the content of features, and their style as mean and variance."""
    mean, var = features.mean(1, keepdim=True), features.var(1, keepdim=True)
    return (features - mean) / (var + _EPS).sqrt(), mean, var


def _other_style(features: Tensor, swap: Mix) -> Tensor:
    content, mean, var = _parts(features)
    mean = swap.share * mean + (1 - swap.share) * mean[swap.partner]
    var = swap.share * var + (1 - swap.share) * var[swap.partner]
    return content * (var + _EPS).sqrt() + mean


def _other_content(features: Tensor, swap: Mix) -> Tensor:
    content, mean, var = _parts(features)
    return content[swap.partner].detach() * (var + _EPS).sqrt() + mean
