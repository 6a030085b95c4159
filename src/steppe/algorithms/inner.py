"""Gradients inside a loss: inner steps, and gradients of single domains."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from .algorithm import Prepared
from .network import Network

Weights = Mapping[str, Tensor]

SCALE = 1024.0
"""Loss scale against underflow in half precision; exact, as a power of 2."""


def trainable_weights(network: Network) -> dict[str, Tensor]:
    """Return the network's trainable parameters by name."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


def logits_at(network: Network, weights: Weights, own: Prepared) -> Tensor:
    """Compute logits with other weights than the network's."""
    logits: Tensor = functional_call(network, dict(weights), (own.images, own.keep))
    return logits


def risk_at(network: Network, weights: Weights, own: Prepared) -> Tensor:
    """Compute the mean cross-entropy with other weights than the network's."""
    return F.cross_entropy(logits_at(network, weights, own), own.labels)


def detached_gradients(risk: Tensor, weights: Weights, retain: bool = False) -> dict[str, Tensor]:
    """Differentiate a risk; the result is a constant for further derivatives.

    Args:
        risk: computed while gradients were enabled.
        weights: what to differentiate by.
        retain: keep the graph, to differentiate the risk again.
    """
    found = torch.autograd.grad(
        risk * SCALE, list(weights.values()), retain_graph=retain, materialize_grads=True
    )
    return {name: g / SCALE for name, g in zip(weights, found, strict=True)}
