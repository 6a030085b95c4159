"""Warnings about passes that will not do what the user expects, given at the user's own line.

The first step's loss carries its graph, and the graph shows what went into it: batch norm that
updates its statistics, and the number format of every intermediate. Nothing is patched or watched.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor


class Bfloat16Warning(UserWarning):
    """A flatness-aware step computed in bfloat16."""


class BatchNormWarning(UserWarning):
    """Every pass of a flatness-aware step updates batch-norm statistics."""


_BFLOAT16 = (
    "{method}'s passes computed in bfloat16. It acts on differences of gradients "
    "(g1 - g0), of which bfloat16's 8 bits of mantissa lose more than float16's 11. Prefer "
    "torch.autocast(..., dtype=torch.float16) with a GradScaler, TF32 or float32. This is said "
    "once per optimizer."
)
_BATCH_NORM = (
    "The loss goes through batch norm in training mode, and {method} was not given the model: all "
    "{passes} passes of a step update the running statistics, at perturbed weights too. Pass "
    "model=model to {method} so that only the first pass counts. This is said once per optimizer."
)
_FRAMEWORKS = {"lightning", "pytorch_lightning", "accelerate", "transformers"}
_PACKAGES = {"steppe", "torch", "contextlib", *_FRAMEWORKS}
"""Whose lines are not the user's."""
NODES = 10_000
"""How much of a graph is looked at. Networks have fewer; to free Python's handles of the hundred
thousand of a long recurrence overflows the stack."""


def look(loss: Any, method: str, passes: int, *, model_given: bool) -> bool:
    """Warns of what the graph of a first loss shows; returns whether there was a graph."""
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return False
    nodes = list(islice(_nodes(loss.grad_fn), NODES))
    if any(part.dtype is torch.bfloat16 for node in nodes for part in node._input_metadata):
        tell_bfloat16(method)
    if not model_given and any(map(_updates_statistics, nodes)):
        tell(_BATCH_NORM.format(method=method, passes=passes), BatchNormWarning)
    return True


def tell_bfloat16(method: str) -> None:
    tell(_BFLOAT16.format(method=method), Bfloat16Warning)


def tell(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns, pointing at the innermost line that is neither ours, torch's nor a framework's."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level if frame is not None else 2)


def _nodes(root: Any) -> Iterator[Any]:
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield node
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        waiting += new


def _updates_statistics(node: Any) -> bool:
    """Whether it is a batch norm in training mode that has running statistics."""
    if "BatchNorm" not in node.name() or not getattr(node, "_saved_training", False):
        return False
    try:
        return node._saved_running_mean is not None
    except RuntimeError:  # freed by backward: there were some
        return True
