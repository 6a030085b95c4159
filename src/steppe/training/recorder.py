"""Append a run's records to its file, show them, and send them to its trackers."""

from __future__ import annotations

import itertools
import logging
import math
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from steppe.errors import RunError
from steppe.validation import first_best

from .config import RunConfig
from .directory import RunDirectory, validation_accuracy
from .loggers import Trackers, flatten, open_loggers
from .processes import Processes
from .progress import Display, summary

log = logging.getLogger("steppe")


class Recorder:
    """Writes the records of a run, and tracks the best one."""

    def __init__(
        self, config: RunConfig, run: RunDirectory, processes: Processes, display: Display
    ) -> None:
        self._config, self._dir, self._processes = config, run, processes
        self._display = display
        self.best: tuple[float, int] | None = None
        """The best validation accuracy so far, and its step."""
        self._trackers = Trackers()

    @contextmanager
    def recording(self, resumed: bool) -> Iterator[None]:
        """Open the run's trackers, and send them earlier records first."""
        if self._processes.first:
            values = self._config.model_dump(mode="json")
            self._trackers = open_loggers(self._config.loggers, self._dir.path, values, resumed)
            for record in self._dir.records():  # a killed process may not have sent them
                self._track(record)
        state = "failed"
        try:
            yield
            state = "done"
        finally:
            self._trackers.close(state)

    def not_finite(self, record: Mapping[str, Any]) -> str | None:
        """Describe the first value of a record that is NaN or infinite, if any.

        Raises:
            RunError: only held-out domains are affected. This must not count as divergence: users
                choose learning rates by divergence, which would leak the target.
        """
        flat = flatten(record)
        wrong = [name for name, value in flat.items() if not math.isfinite(value)]
        if not wrong:
            return None
        parts = itertools.product(("domains", "raw"), self._config.targets)
        held_out = tuple(f"{kind}/{target}/" for kind, target in parts)
        learned = [name for name in wrong if not name.startswith(held_out)]
        name = (learned or wrong)[0]
        what = f"{name} became {flat[name]} at step {record['step']}"
        if learned:
            return what
        raise RunError(f"{what}, but only on the held-out domain: it cannot be recorded")

    def add(self, record: Mapping[str, Any], candidate: bool) -> float | None:
        """Append a record; return its validation accuracy if it is the best candidate so far."""
        if self._processes.first:
            self._dir.append(record)
        value = validation_accuracy(record) if candidate else None
        so_far = None if self.best is None else self.best[0]
        if value is None or first_best([so_far, value]) == 0:
            return None
        self.best = (value, record["step"])
        return value

    def tell(self, record: Mapping[str, Any]) -> None:
        """Show a record, and send it to the trackers."""
        self._display.record(record)
        log.debug("%s", summary(record))
        self._track(record)

    def _track(self, record: Mapping[str, Any]) -> None:
        values = {name: value for name, value in flatten(record).items() if name != "step"}
        self._trackers.record(record["step"], values)


def records_due(first: int, steps: int, every: int) -> int:
    """Count the records from step `first` on: one per `every` steps, and one at the last step.

    Examples:
        >>> records_due(0, 21, 10), records_due(0, 22, 10), records_due(11, 22, 10)
        (3, 4, 2)
    """
    if first >= steps:
        return 0
    regular = (steps - 1) // every - (first - 1) // every
    return regular + ((steps - 1) % every > 0)


def peak_memory(device: torch.device) -> float:
    """Peak memory in GiB, of the GPU or else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
