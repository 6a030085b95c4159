"""Warnings about passes that will not do what the user expects, reported at the user's line.

The autograd graph of the first loss shows the dtype of every intermediate, and batch norm that
updates its statistics.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
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
    "{method} computed its passes in bfloat16. It uses differences of gradients (g1 - g0), which "
    "bfloat16 (8 bits of mantissa) rounds more than float16 (11 bits). Prefer "
    "torch.autocast(..., dtype=torch.float16) with a GradScaler, TF32 or float32. This warning "
    "appears once per optimizer."
)
_BATCH_NORM = (
    "The loss goes through batch norm in training mode, and {method} was not given the model: all "
    "{passes} passes of a step update the running statistics, even at perturbed weights. Pass "
    "model=model to {method} so that only the first pass counts. This warning appears once per "
    "optimizer."
)
USAGE = """\
{method}.step() needs a closure, because it evaluates the loss {passes}:

    def closure():
        loss = loss_fn(model(x), y)
        loss.backward({graph})
        return loss

    opt.step(closure)

In a loop that owns backward, step() without a closure follows the phases:

    for phase in opt.phases():
        with phase:
            loss_fn(model(x), y).backward({graph})
    opt.step()

steppe.integrations has this for Lightning, Hugging Face's Trainer and Accelerate."""


_NAMED = """\
{method} asks for the loss {loss!r}, so the {function} needs its name as {place}:

{example}"""
_CLOSURE = """\
    def closure(name="main"):
        loss = loss_fn(model(x), y)
        (loss if name == "main" else other_loss(name)).backward()
        return loss  # the main one, which step() returns"""
_FRAMEWORKS = {"lightning", "pytorch_lightning", "accelerate", "transformers"}
_PACKAGES = {"steppe", "torch", "contextlib", *_FRAMEWORKS}
"""Packages whose lines are not the user's."""
NODES = 10_000
"""Most nodes of a graph to inspect. Networks have fewer; freeing Python's handles of the hundred
thousand nodes of a long recurrence overflows the stack."""


def check_named(
    function: Callable[..., Any],
    method: str,
    loss: str,
    *before: object,
    called: str = "closure",
    example: str = _CLOSURE,
) -> None:
    """Raise TypeError if a function does not take the name of a loss after other arguments."""
    try:
        bound = inspect.signature(function).bind(*before, loss)
        names = [p for p in bound.signature.parameters.values() if p.name in bound.arguments]
        default = names[-1].default
        takes = default in (inspect.Parameter.empty, None) or isinstance(default, str)
    except TypeError:
        takes = False
    except ValueError:  # a builtin without a signature
        return
    if not takes:
        place = "its second argument" if before else "its argument"
        raise TypeError(
            _NAMED.format(method=method, loss=loss, function=called, place=place, example=example)
        )


def look(loss: Any, method: str, passes: int, *, model_given: bool) -> bool:
    """Warn about what the graph of a first loss shows; return whether there was a graph."""
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
    """Warn at the innermost line outside steppe, torch and the frameworks."""
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
    """Whether a node is a batch norm in training mode with running statistics."""
    if "BatchNorm" not in node.name() or not getattr(node, "_saved_training", False):
        return False
    try:
        return node._saved_running_mean is not None
    except RuntimeError:  # backward freed them, so they existed
        return True
