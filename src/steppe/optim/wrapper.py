"""An optimizer that is another one to everybody who looks."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer


class Wrapper(Optimizer):
    """Holds a base optimizer and shows its groups, its state and its hooks as its own.

    Copies made by torch (`load_state_dict`, deepcopy and pickling rebind `param_groups`) cannot
    tear the two apart, because nothing is copied here. Hooks registered on the wrapper are the
    base's: they fire once per step, with the global ones, and are given the base.
    """

    def __init__(self, base: Optimizer) -> None:
        # Optimizer.__init__ is left out on purpose: it would make a second set of param_groups
        # and hooks, and fire the global step hooks twice per step.
        _check_base(base, type(self).__name__)
        self.base = base

    def parameters(self) -> list[Any]:
        """All parameters, in the order of their groups."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base's groups, the very list."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base's state."""
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The base's defaults."""
        return self.base.defaults

    def __getattr__(self, name: str) -> Any:
        # torch keeps hooks in private dicts that its own methods read; they are the base's.
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            return getattr(self.base, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; `step` does so by itself."""
        self.base.zero_grad(set_to_none)


def _check_base(base: Optimizer, method: str) -> None:
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"{method} wraps an optimizer instance, got {type(base).__name__}. Write "
            f"{method}(torch.optim.SGD(model.parameters(), lr=1e-3), ...)."
        )
    if isinstance(base, Wrapper):
        raise TypeError(f"{method} cannot wrap {type(base).__name__}: wrap its base instead.")
    closure = inspect.signature(base.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{method} cannot wrap {type(base).__name__}, which itself needs a closure."
        )
    if getattr(base, "needs_graph", False):
        raise TypeError(
            f"{method} cannot wrap {type(base).__name__}: it needs the graph of its gradient, "
            "and the direction has none."
        )
