"""CLIPood: fine-tuning of CLIP towards fixed text embeddings, with a margin between classes."""

import logging
from typing import Annotated

import torch
from torch.nn import functional as F

from steppe.options import Option
from steppe.search import Uniform

from .algorithm import Algorithm, First, Losses, Prepared, full_precision
from .network import SCALE, Network
from .registry import register_algorithm

log = logging.getLogger("steppe")


@register_algorithm(
    "CLIPood",
    idea="a margin between similar class names",
    citation="Shu et al., CLIPood: Generalizing CLIP to Out-of-Distributions, ICML 2023",
    linear=True,
    keeps_classifier=True,
)
class CLIPood(Algorithm):
    r"""CLIPood's margin metric softmax (Shu et al., ICML 2023).

    With \(f\) an image's features and \(t_c\) the text embedding of class \(c\), all of length 1,
    the loss is the cross-entropy of

    \[ 100 \, \langle f - \lambda t_y, t_c \rangle \]

    with \(\lambda\) the option `margin` and \(y\) the image's class: classes with similar texts
    must be told apart by more. This is the authors' code. The paper writes the margin as
    \(\lambda (1 - \langle t_y, t_c \rangle)\), which adds the same number to every logit and gives
    the same loss. Predictions have no margin.

    Use it with `class_embeddings`. Without them, the classifier's fixed directions are random. The
    authors average the weights with `bma`. DomainBed does not have this algorithm.

    Args:
        margin: \(\lambda\), the weight of the similarity between texts; 0 is the cross-entropy.
    """

    def __init__(
        self,
        network: Network,
        n_domains: int,
        margin: Annotated[float, Option(Uniform(0.0, 0.6))] = 0.3,
    ) -> None:
        super().__init__(network, n_domains)
        self.margin = margin
        if not network.unit_features:
            log.warning("CLIPood without class_embeddings: its fixed classifier is random")
            network.unit_features = True
        classifier = network.classifier.requires_grad_(False)
        with torch.no_grad():  # changes nothing if the embeddings come from a file
            classifier.weight.copy_(SCALE * F.normalize(classifier.weight))
            classifier.bias.zero_()

    def forward(self, prepared: Prepared, objective: str = "main", first: First = None) -> Losses:
        logits = self.network(prepared.images, prepared.keep)
        exact_logits, exact = full_precision(logits, self.network)
        with exact:
            texts = self.network.classifier.weight  # 100 t_c
            similar = texts[prepared.labels] @ texts.T / SCALE
            loss = F.cross_entropy(exact_logits - self.margin * similar, prepared.labels)
        return Losses(loss, logits=logits)
