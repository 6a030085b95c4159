"""Checks that a loss is deterministic; if not, finds the random part of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from steppe.errors import UserError

from .inputs import leaves

Evaluation = tuple[Tensor, Sequence[Tensor | None]]
"""A loss and its gradient."""


def check_repeatable(
    model: nn.Module,
    evaluate: Callable[[], object],
    before: Evaluation,
    after: Evaluation,
    batches: tuple[Any, Any],
) -> None:
    """Raise an error if two evaluations of a batch differ, or if two passes start differently.

    `evaluate` computes the loss again, to find the random part of the model.
    """
    if not same(*batches):
        raise UserError(
            "the batches differ from one pass to the next, so the loss is not well defined: pass "
            "list(loader), or a loader with shuffle=False and without random augmentation"
        )
    if not (_close([before[0]], [after[0]]) and _close(before[1], after[1])):
        culprit = _culprit(model, evaluate) or "the loss function"
        raise UserError(
            f"the loss of a batch differs from one evaluation to the next: {culprit} is random in "
            "evaluation mode. Remove the randomness, or seed it inside loss_fn."
        )


@contextmanager
def check_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers that change in evaluation mode, and raise an error about them."""
    before = [
        (module, key, buffer, buffer.clone(), f"{path}.{key}" if path else key)
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    changed = []
    try:
        yield
    finally:
        for module, key, buffer, value, name in before:
            if not same(module._buffers.get(key), value):
                changed.append(name)
                module._buffers[key] = buffer
            if not same(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)
    if changed:
        raise UserError(
            f"the model's buffer {changed[0]!r} changes when the loss is computed, even in "
            "evaluation mode, so the loss would differ each time"
        )


def same(x: Any, y: Any) -> bool:
    """Whether two batches, or inputs or outputs of modules, are equal bit by bit."""
    ours, theirs = dict(leaves(x)), dict(leaves(y))
    return ours.keys() == theirs.keys() and all(_same(ours[path], theirs[path]) for path in ours)


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
            return False
        return bool(((x == y) | ((x != x) & (y != y))).all())
    if isinstance(x, (str, bytes, int, float)):
        return bool(x == y or (x != x and y != y))
    return type(x) is type(y)  # holds no numbers


def _close(before: Sequence[Tensor | None], after: Sequence[Tensor | None]) -> bool:
    """Whether values are equal up to the order of summation, which some kernels do not fix.

    Relative to the largest entry of all parts, because a part may be zero up to rounding.
    """
    gap = scale = tolerance = 0.0
    for x, y in zip(before, after, strict=True):
        if x is None or y is None:
            if x is not y:
                return False
        elif x.numel():
            gap = max(gap, float((x - y).abs().max()))
            scale = max(scale, float(x.abs().max()), float(y.abs().max()))
            tolerance = torch.finfo(x.dtype).eps ** 0.5
    return gap <= tolerance * scale


def _culprit(model: nn.Module, evaluate: Callable[[], object]) -> str | None:
    """The innermost module that returns different outputs for equal inputs."""
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
    """Inputs and outputs of all module calls, in the order in which they end: inner ones first."""
    names = {module: name for name, module in model.named_modules()}
    found: list[tuple[str, nn.Module, object, object]] = []

    def record(module: nn.Module, args: object, kwargs: object, output: object) -> None:
        found.append((names[module], module, _copied((args, kwargs)), _copied(output)))

    with ExitStack() as stack:
        for module in names:
            stack.enter_context(module.register_forward_hook(record, with_kwargs=True))
        evaluate()
    return found


def _copied(value: object) -> dict[tuple[object, ...], object]:
    """Detached copies, safe from later in-place changes."""
    return {
        path: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
        for path, leaf in leaves(value)
    }
