"""Mean losses over the steps since the last record, accumulated on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class Means:
    """Running sums and counts by name, without host-device synchronization until `take`.

    Examples:
        >>> means = Means()
        >>> means.add({"total": torch.tensor(1.0)})
        >>> means.add({"total": torch.tensor(2.0), "penalty": torch.tensor(5.0)})
        >>> means.take()
        {'total': 1.5, 'penalty': 5.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + 1

    def not_finite(self) -> float | None:
        """The first sum that is NaN or infinite, if any; synchronizes with the device."""
        sums = torch.stack([*self._sums.values()]).tolist() if self._sums else []
        return next((value for value in sums if not math.isfinite(value)), None)

    def take(self, average: Callable[[Tensor], Tensor] = lambda means: means) -> dict[str, float]:
        """Return the means, averaged over processes, and start over."""
        names = list(self._sums)
        if not names:
            return {}
        means = torch.stack([self._sums[name] / self._counts[name] for name in names])
        self._sums, self._counts = {}, {}
        return dict(zip(names, average(means).tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums, "counts": self._counts}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._sums = {name: value.to(device) for name, value in state["sums"].items()}
        self._counts = dict(state["counts"])
