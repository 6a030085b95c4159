"""What an operator is given: batches with a length, parameters that can be differentiated by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steppe.errors import UserError


def batch_size(batch: Any) -> int:
    """The length of a batch's first tensor."""
    found = _first_tensor(batch)
    if found is None or found.ndim == 0:
        raise UserError(
            f"a batch is a tensor, or a tuple, list or mapping with one; got {type(batch).__name__}"
        )
    return len(found)


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return next((t for part in batch if (t := _first_tensor(part)) is not None), None)
    return None


def chosen_params(model: nn.Module, params: Iterable[Tensor] | None) -> list[Tensor]:
    """The parameters given, or those of the model that require a gradient; refuses what is none."""
    found = _found(model, params)
    _check(found)
    return found


def _found(model: nn.Module, params: Iterable[Tensor] | None) -> list[Tensor]:
    if params is None:
        found: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        if not found:
            raise UserError("no parameter of the model requires a gradient: name some in params=")
        return found
    if isinstance(params, Tensor):
        raise UserError("params is one tensor: put it in a list")
    given: list[Any] = list(params)
    wrong = [type(p).__name__ for p in given if not isinstance(p, Tensor)]
    if wrong:
        raise UserError(
            f"params has a {wrong[0]} in it: give the parameters themselves, for instance "
            "model.layer.parameters()"
        )
    found = given
    if not found:
        raise UserError("params is empty: an operator needs at least one parameter")
    if len({id(p) for p in found}) < len(found):
        raise UserError("a parameter is in params twice: name each once")
    return found


def _check(params: list[Tensor]) -> None:
    kinds = {(p.dtype, p.device) for p in params}
    if len(kinds) > 1:
        raise UserError(
            "the parameters differ in type or device: "
            + ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            + ". Convert the model, for instance with model.float()."
        )
    dtype = params[0].dtype
    if dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"the parameters are {dtype}, which is too coarse for curvature: use model.float()"
        )
    if any(not p.is_leaf for p in params):
        raise UserError("params must be the model's own parameters, not results computed from them")
