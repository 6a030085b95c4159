"""LoRA: train low-rank updates of a transformer's linear layers instead of their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from steppe.errors import UserError

_PLACE = ".parametrizations.weight."
"""What torch puts between a module's path and its weight's parts."""


class LowRank(nn.Module):
    r"""Adds \(BA\) to a fixed matrix (Hu et al., LoRA, ICLR 2022), with scale 1.

    \(B\) starts at zero, so the network starts as it was.

    Args:
        weight: the matrix.
        rank: the number of rows of \(A\) and columns of \(B\).
    """

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.A = nn.Parameter(weight.new_empty(rank, columns))
        self.B = nn.Parameter(weight.new_zeros(rows, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))  # as in the authors' code

    def forward(self, weight: Tensor) -> Tensor:
        return torch.addmm(weight, self.B, self.A)


def add_lora(featurizer: nn.Module, rank: int, name: str) -> None:
    """Freeze a backbone, and give each of its linear layers a low-rank update to train.

    Args:
        featurizer: the backbone, without a classifier.
        rank: the rank of the updates.
        name: the backbone's name, for messages.

    Raises:
        UserError: it has no linear layers, or the rank is too large for one of them.
    """
    found = {path: m for path, m in featurizer.named_modules() if isinstance(m, nn.Linear)}
    if not found:
        raise UserError(f"lora={rank}: {name!r} has no linear layers. LoRA is for transformers")
    path, smallest = min(found.items(), key=lambda one: min(one[1].weight.shape))
    if rank >= (limit := min(smallest.weight.shape)):
        raise UserError(f"lora={rank}: {path} of {name!r} allows ranks below {limit}")
    featurizer.requires_grad_(False)
    for linear in found.values():
        parametrize.register_parametrization(linear, "weight", LowRank(linear.weight, rank))


def merged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in a state dict, with the updates added under the backbone's own names.

    Examples:
        >>> state = {"fc.parametrizations.weight.original": torch.ones(2, 3)}
        >>> state["fc.parametrizations.weight.0.A"] = torch.ones(1, 3)
        >>> state["fc.parametrizations.weight.0.B"] = torch.ones(2, 1)
        >>> merged(state | {"fc.bias": torch.zeros(2)})
        {'fc.bias': tensor([0., 0.]), 'fc.weight': tensor([[2., 2., 2.],
                [2., 2., 2.]])}
    """
    found = {key: value for key, value in state.items() if _PLACE not in key}
    for key, weight in state.items():
        path, place, kind = key.partition(_PLACE)
        if place and kind == "original":
            factors = (state[f"{path}{_PLACE}0.{factor}"] for factor in "BA")
            found[f"{path}.weight"] = torch.addmm(weight, *factors)
    return found


def merge_lora(module: nn.Module) -> None:
    """Add the updates to the weights, which restores the backbone's own layers and names."""
    for part in list(module.modules()):
        if not parametrize.is_parametrized(part, "weight"):
            continue
        if isinstance(cast(Any, part).parametrizations.weight[0], LowRank):
            parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)
