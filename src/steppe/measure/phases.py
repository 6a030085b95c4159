"""How far a computation of several phases is, as one share."""

from __future__ import annotations

from collections.abc import Mapping

from steppe.console import Meter
from steppe.curvature.results import Report


class Phases:
    """Makes one share of several: phase after phase, each with its part of the cost.

    The share never falls, whatever a phase says of itself.

    Args:
        costs: what each phase is expected to cost, in any unit, in their order.
        meter: shows the whole.

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
        """A phase begins; what is returned takes its reports."""
        names, total = list(self._costs), sum(self._costs.values())
        before = sum(self._costs[name] for name in names[: names.index(phase)]) / total
        own = self._costs[phase] / total

        def advance(share: float, note: str) -> None:
            self._reached = max(self._reached, before + own * min(max(share, 0.0), 1.0))
            self._meter.update(self._reached, title=phase, detail=note)

        advance(0.0, "")
        return lambda said: advance(said.share, said.note)
