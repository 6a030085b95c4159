"""An optimizer that does nothing."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class Still(Optimizer):
    """A base that does not move, so that only what is around it is timed."""

    _step_supports_amp_scaling = True
    """It asks the host nothing."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing."""
