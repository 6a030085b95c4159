"""Compute time of runs, in device hours."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping

from .runs import Run

_KINDS = {"cpu": "CPU", "cuda": "GPU", "mps": "GPU", "xpu": "GPU"}
DIGITS = 3
"""Decimals of hours, in sentences and tables alike."""
UNKNOWN = "device"
"""Device of runs whose config does not name one, such as imported runs."""


def step_time(runs: Iterable[Run]) -> float | None:
    """Median seconds per step over all evaluations.

    Each run's first evaluation is left out, because its few steps include the setup.
    """
    records = (record for run in runs for record in run.records[1:] or run.records)
    found = [r.seconds_per_step for r in records if r.seconds_per_step is not None]
    return statistics.median(found) if found else None


def device_of(run: Run) -> str:
    """`GPU`, `CPU`, or `UNKNOWN`."""
    resolved = run.config.get("resolved")
    found = resolved.get("device") if isinstance(resolved, Mapping) else None
    name = str(found or run.config.get("device")).partition(":")[0]
    return _KINDS.get(name, UNKNOWN)


def hours(runs: Iterable[Run]) -> dict[str, float]:
    """Hours by device kind; kinds with no time are left out."""
    total: Counter[str] = Counter()
    for run in runs:
        total[device_of(run)] += run.seconds / 3600  # type: ignore[assignment]
    return {kind: value for kind, value in sorted(total.items(), reverse=True) if value > 0}


def hours_text(spent: Mapping[str, float]) -> str:
    """Format device hours.

    Examples:
        >>> hours_text({"GPU": 6.06, "CPU": 0.0042})
        '6.060 GPU-hours and 0.004 CPU-hours'
        >>> hours_text({"CPU": 0.0002})
        'less than 0.001 CPU-hours'
    """
    least = 10**-DIGITS
    return " and ".join(
        f"{'' if value >= least else 'less than '}{max(value, least):,.{DIGITS}f} {kind}-hours"
        for kind, value in spent.items()
    )
