"""Progress of a computation with several phases."""

from __future__ import annotations

from collections.abc import Mapping

from steppe.console import Meter
from steppe.curvature.results import Report


class Phases:
    """Combines the progress of successive phases into one share, which never decreases.

    Args:
        costs: expected cost of each phase in any unit, in order.
        meter: shows the combined share.

    Examples:
        >>> import sys
        >>> from steppe.console import Console
        >>> meter = Meter("all of it", 1.0, unit="share", console=Console(file=sys.stdout))
        >>> phases = Phases({"eigenvalues": 3.0, "trace": 1.0}, meter)
        >>> _ = phases.begin("eigenvalues")
        eigenvalues: 0% done
        >>> _ = phases.begin("trace")
        trace: 75% done...
    """

    def __init__(self, costs: Mapping[str, float], meter: Meter) -> None:
        self._costs, self._meter = costs, meter
        self._reached = 0.0

    def begin(self, phase: str) -> Report:
        """Start a phase, and return the function that takes its reports."""
        names, total = list(self._costs), sum(self._costs.values())
        before = sum(self._costs[name] for name in names[: names.index(phase)]) / total
        own = self._costs[phase] / total

        def advance(share: float, note: str) -> None:
            self._reached = max(self._reached, before + own * min(max(share, 0.0), 1.0))
            self._meter.update(self._reached, title=phase, detail=note)

        advance(0.0, "")
        return lambda said: advance(said.share, said.note)
