"""Validation of an operator's inputs: batches, losses and parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.errors import UserError


def batch_size(batch: Any) -> int:
    """The length of a batch's first tensor."""
    found = next((leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor)), None)
    if found is None or found.ndim == 0:
        raise UserError(
            f"a batch must be a tensor, or a tuple, list or mapping that contains one; got "
            f"{type(batch).__name__}"
        )
    return len(found)


def mean_loss(loss_fn: Any) -> Callable[[nn.Module, Any], Tensor]:
    """Turn a criterion into a function of the model and a batch; return other functions unchanged.

    A criterion takes outputs and targets: a module such as `nn.CrossEntropyLoss()`, whose `forward`
    does not take the model first, or a function from `torch.nn.functional`.
    """
    if isinstance(loss_fn, nn.Module):
        first = next(iter(inspect.signature(loss_fn.forward).parameters.values()), None)
        takes_model = first is not None and (
            first.name in ("model", "module", "net", "network")
            or "Module" in inspect.formatannotation(first.annotation)
        )
        if takes_model:
            return loss_fn
    elif getattr(loss_fn, "__module__", None) != F.__name__:
        return cast(Callable[[nn.Module, Any], Tensor], loss_fn)
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    if getattr(loss_fn, "reduction", "mean") != "mean":
        raise UserError(
            f"{name} has reduction={loss_fn.reduction!r}, but curvature needs the mean loss: use "
            "reduction='mean'"
        )

    def of_pair(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            got = (
                f"{len(batch)} values" if isinstance(batch, list | tuple) else type(batch).__name__
            )
            raise UserError(
                f"{name} needs batches of (inputs, targets), got {got}: pass a function "
                "loss_fn(model, batch) that returns the mean loss of a batch"
            )
        inputs, targets = batch
        loss: Tensor = loss_fn(model(inputs), targets)
        return loss

    return of_pair


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of nested mappings, tuples and lists, with their paths."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, item in items:
        yield from leaves(item, (*path, key))


def chosen_params(model: nn.Module, params: Iterable[Tensor] | None) -> list[Tensor]:
    """Validate `params` (default: the model's parameters that require a gradient)."""
    if isinstance(params, Tensor):
        raise UserError("params is one tensor: put it in a list")
    found: list[Any] = list(model.parameters() if params is None else params)
    if params is None:
        found = [p for p in found if p.requires_grad]
    if not found:
        raise UserError(
            "no parameter of the model requires a gradient: pass some as params="
            if params is None
            else "params is empty: an operator needs at least one parameter"
        )
    for p in found:
        if not isinstance(p, Tensor):
            raise UserError(
                f"params contains a {type(p).__name__}: pass the parameters themselves, such as "
                "model.layer.parameters()"
            )
    if len({id(p) for p in found}) < len(found):
        raise UserError("params contains a parameter twice: pass each once")
    _check(found)
    return found


def _check(params: list[Tensor]) -> None:
    kinds = {(p.dtype, p.device) for p in params}
    if len(kinds) > 1:
        raise UserError(
            "the parameters differ in type or device: "
            + ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            + ". Convert the model, for example with model.float()."
        )
    dtype = params[0].dtype
    if dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"the parameters are {dtype}, which is too coarse for curvature: use model.float()"
        )
    if any(not p.is_leaf for p in params):
        raise UserError("params must be the model's own parameters, not results computed from them")
