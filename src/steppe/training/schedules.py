"""Learning rates that drop during a run: on a plateau of the validation loss, or as recorded."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

FACTOR = 10.0
"""What a drop divides the learning rates by."""
PATIENCE = 1
"""Looks in a row without a lower loss that a learning rate survives."""
DROPS = 3
"""The drop at which a run ends."""
THRESHOLD = 1e-4
"""The share of the lowest loss by which a lower one must be lower."""


def drop(optimizer: Optimizer) -> None:
    """Divide an optimizer's learning rates by `FACTOR`."""
    for group in optimizer.param_groups:
        group["lr"] /= FACTOR


class Schedule(ABC):
    """Decides at each record of a run whether the learning rates drop; this one never does."""

    needs_loss = False
    """Whether `look` needs the validation loss."""
    drops = 0
    """Number of drops so far."""
    last_look = -1
    """The step of the last look."""

    def look(self, step: int, loss: float = math.nan) -> bool:
        """Process the record after a step; return whether the learning rates drop now."""
        before, self.last_look = self.drops, step
        self._look(step, loss)
        return self.drops > before

    @abstractmethod
    def _look(self, step: int, loss: float) -> None:
        """Update `drops`."""

    def ends(self, step: int) -> bool:
        """Whether the run ends after a step, before it has made all of its steps."""
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"drops": self.drops, "last_look": self.last_look}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class Constant(Schedule):
    """The learning rates stay as they are."""

    def _look(self, step: int, loss: float) -> None:
        pass


class Plateau(Schedule):
    """Drop when the validation loss has stopped falling; the third drop ends the run.

    This is torch's `ReduceLROnPlateau` with a patience of 1, as ERM++ uses it.

    Examples:
        >>> plateau = Plateau()
        >>> [plateau.look(step, loss) for step, loss in enumerate([0.9, 0.8, 0.8, 0.9, 0.8])]
        [False, False, False, True, False]
    """

    needs_loss = True

    def __init__(self) -> None:
        self.lowest: float | None = None
        self.worse = 0

    def _look(self, step: int, loss: float) -> None:
        if self.lowest is None or loss < self.lowest * (1 - THRESHOLD):
            self.lowest, self.worse = loss, 0
            return
        self.worse += 1
        if self.worse > PATIENCE:
            self.drops, self.worse = self.drops + 1, 0

    def ends(self, step: int) -> bool:
        return self.drops >= DROPS

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "lowest": self.lowest, "worse": self.worse}


class Replay(Schedule):
    """Repeat what another run recorded: drop after the same steps, and end after the same step.

    Args:
        records: that run's.
    """

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._drops = {record["step"]: record.get("drops", 0) for record in records}
        self._last = records[-1]["step"]

    def _look(self, step: int, loss: float) -> None:
        self.drops = self._drops[step]

    def ends(self, step: int) -> bool:
        return bool(step >= self._last)


SCHEDULES: Mapping[str, type[Schedule]] = {"constant": Constant, "plateau": Plateau}
