"""Guards against framework settings that would silently change a step.

They live in `steppe.integrations` and are imported when the framework first trains with one of our
optimizers. Without a framework, a step only pays for a lookup in `sys.modules`.
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
"""Maps the framework module that runs training to the class of its guard."""


def guard(opt: FlatnessOptimizer) -> Any:
    """The guard of the training run that made this call, after its checks; None without one.

    Its ``closure(opt, closure)`` returns the closure to evaluate. We search the call stack because
    the arguments of `step` are not enough: under fp16, Lightning calls it without a closure, and a
    loop over the phases bypasses Lightning.
    """
    if sys.modules.keys().isdisjoint(GUARDS):
        return None
    return _on_the_stack(opt)


@_disable_dynamo  # dynamo cannot trace access to the call stack
def _on_the_stack(opt: FlatnessOptimizer) -> Any:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        target = GUARDS.get(frame.f_globals.get("__name__", ""))
        if target is not None:
            module, _, name = target.partition(":")
            return getattr(importlib.import_module(module), name).of(opt, frame.f_locals["self"])
        frame = frame.f_back
    return None
