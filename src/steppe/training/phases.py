"""A long computation in several phases, as people see it: how far the whole is, what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from .progress import QUIET_SECONDS


@dataclass(frozen=True)
class Advance:
    """How far a computation is.

    Attributes:
        phase: what it is at.
        share: of the whole, from 0 to 1; an estimate.
        note: in words, perhaps none.
    """

    phase: str
    share: float
    note: str = ""


class Reporter(Protocol):
    """What a phase tells of itself."""

    @property
    def share(self) -> float:
        """Of the phase, from 0 to 1."""
        ...

    @property
    def note(self) -> str:
        """In words."""
        ...


class Phases:
    """Makes one share of several: phase after phase, each with its part of the cost.

    The share never falls, whatever a phase says of itself.

    Args:
        costs: what each phase is expected to cost, in any unit, in their order.
        report: told of every step; None: nobody is.

    Examples:
        >>> phases = Phases({"eigenvalues": 3.0, "trace": 1.0}, lambda a: print(a.phase, a.share))
        >>> _ = phases.begin("eigenvalues")
        eigenvalues 0.0
        >>> _ = phases.begin("trace")
        trace 0.75
    """

    def __init__(
        self, costs: Mapping[str, float], report: Callable[[Advance], None] | None
    ) -> None:
        self._costs, self._report = costs, report
        self._reached = 0.0

    def begin(self, phase: str) -> Callable[[Reporter], None]:
        """A phase begins; what is returned takes its reports."""
        names, total = list(self._costs), sum(self._costs.values())
        before = sum(self._costs[name] for name in names[: names.index(phase)]) / total
        own = self._costs[phase] / total

        def advance(share: float, note: str) -> None:
            self._reached = max(self._reached, before + own * min(max(share, 0.0), 1.0))
            if self._report is not None:
                self._report(Advance(phase, self._reached, note))

        advance(0.0, "")
        return lambda said: advance(said.share, said.note)


class Shown:
    """Shows a computation: a bar on a terminal; elsewhere a line for a phase and now and then.

    A context manager, to be called with every `Advance`.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._began = self._last = time.monotonic()
        self._phase: str | None = None
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._bar is None:
            self._print(self._title)
        else:
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=1.0, note="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, advance: Advance) -> None:
        """Shows how far it is."""
        left = self._left(advance.share)
        text = ", ".join(part for part in (advance.note, left) if part)
        if self._bar is not None:
            self._bar.update(
                self._task, description=advance.phase, completed=advance.share, note=text
            )
        elif advance.phase != self._phase:
            self._print(f"{advance.phase}: {100 * advance.share:.0f} % done" + _after(left))
        elif time.monotonic() - self._last > QUIET_SECONDS:
            self._print(f"{advance.phase}: {100 * advance.share:.0f} % done" + _after(text))
        self._phase = advance.phase

    def _left(self, share: float) -> str:
        """The time that is left, if the rest goes as what was done."""
        if share < 0.01:
            return ""
        seconds = (time.monotonic() - self._began) * (1 - share) / share
        return f"about {timedelta(seconds=round(seconds))} left"

    def _print(self, text: str) -> None:
        self._last = time.monotonic()
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _after(text: str) -> str:
    return f", {text}" if text else ""
