"""Is a loss the same function every time? If not, which part of the model is to blame?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from steppe.errors import UserError

Evaluation = tuple[Tensor, Sequence[Tensor | None]]
"""A loss and its gradient."""


def check_repeatable(
    model: nn.Module,
    evaluate: Callable[[], object],
    before: Evaluation,
    after: Evaluation,
    batches: tuple[Any, Any],
) -> None:
    """Refuse what differs between two evaluations of the same thing.

    Args:
        model: whose parts may be to blame.
        evaluate: computes the loss once more, to find out which.
        before: the loss and gradient of a batch.
        after: the same, computed again.
        batches: the first batch of two passes over the data.
    """
    if not same(*batches):
        raise UserError(
            "the batches differ from one pass to the next, so that there is no one loss to "
            "differentiate: give list(loader), or a loader with shuffle=False and without random "
            "augmentation"
        )
    pairs = zip((before[0], *before[1]), (after[0], *after[1]), strict=True)
    if not all(_close(x, y) for x, y in pairs):
        culprit = _culprit(model, evaluate) or "the loss function"
        raise UserError(
            f"the loss of a batch differs from one evaluation to the next: {culprit} is random in "
            "evaluation mode. Remove the randomness, or seed it inside loss_fn."
        )


@contextmanager
def check_buffers(model: nn.Module) -> Iterator[None]:
    """Refuse a model whose buffers change in evaluation mode."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        if name in before and not same(before[name], buffer):
            with torch.no_grad():
                buffer.copy_(before[name])
            raise UserError(
                f"the model's buffer {name!r} changes when the loss is computed, also in "
                "evaluation mode: the loss would be another one each time"
            )


def same(x: Any, y: Any) -> bool:
    """Whether two batches, or what modules take and give, are equal bit by bit."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        return bool(((x == y) | ((x != x) & (y != y))).all())
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        return x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and all(same(a, b) for a, b in zip(x, y, strict=True))
    return True  # nothing that holds numbers


def _close(x: Tensor | None, y: Tensor | None) -> bool:
    """Equal up to the order of sums, which some kernels leave to chance."""
    if x is None or y is None:
        return x is y
    tolerance = torch.finfo(x.dtype).eps ** 0.5
    return bool((x - y).abs().max() <= tolerance * torch.maximum(x.abs().max(), y.abs().max()))


def _culprit(model: nn.Module, evaluate: Callable[[], object]) -> str | None:
    """The innermost module that gives different outputs for equal inputs."""
    first, second = _recorded(model, evaluate), _recorded(model, evaluate)
    for (name, module, inputs, output), (_, _, inputs_2, output_2) in zip(
        first, second, strict=False
    ):
        if same(inputs, inputs_2) and not same(output, output_2):
            kind = type(module).__name__
            return f"{name} ({kind})" if name else f"the model ({kind})"
    return None


def _recorded(
    model: nn.Module, evaluate: Callable[[], object]
) -> list[tuple[str, nn.Module, object, object]]:
    """Inputs and outputs of every module in the order in which they end: inner ones first."""
    found: list[tuple[str, nn.Module, object, object]] = []
    handles = []
    for name, module in model.named_modules():

        def record(
            module: nn.Module,
            args: object,
            kwargs: object,
            output: object,
            name: str = name,
        ) -> None:
            found.append((name, module, _copied((args, kwargs)), _copied(output)))

        handles.append(module.register_forward_hook(record, with_kwargs=True))
    try:
        evaluate()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _copied(value: object) -> object:
    """Detached, and safe from what later modules do in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_copied(item) for item in value]
    return value
