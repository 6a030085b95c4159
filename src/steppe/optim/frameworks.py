"""Guards, in `steppe.integrations`, against settings of a framework that would change a step.

A guard is imported when its framework first trains with one of our optimizers: nothing here depends
on a framework, and a loop without one pays for a look into `sys.modules`.
"""

from __future__ import annotations

import importlib
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch._compile import _disable_dynamo

if TYPE_CHECKING:
    from .engine import FlatnessOptimizer

GUARDS = {
    "lightning.pytorch.trainer.trainer": "steppe.integrations.lightning:Guard",
    "pytorch_lightning.trainer.trainer": "steppe.integrations.pytorch_lightning:Guard",
}
"""A framework's module whose methods run the training, and the guard's class."""


def guard(opt: FlatnessOptimizer) -> Any:
    """The guard of the training that this call is a part of, after its checks; None without one.

    Its ``closure(opt, closure)`` says what a step is to evaluate. The call stack leads to it in
    every case. What a framework hands to `step` does not: under fp16 Lightning steps without a
    closure, and a loop over the phases steps past it.
    """
    if sys.modules.keys().isdisjoint(GUARDS):
        return None
    return _on_the_stack(opt)


@_disable_dynamo  # which cannot trace a look at the call stack
def _on_the_stack(opt: FlatnessOptimizer) -> Any:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        target = GUARDS.get(frame.f_globals.get("__name__", ""))
        if target is not None:
            module, _, name = target.partition(":")
            return getattr(importlib.import_module(module), name).of(opt, frame.f_locals["self"])
        frame = frame.f_back
    return None
