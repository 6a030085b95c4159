"""What a run shows while it goes: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .evaluation import Scores

QUIET_SECONDS = 30.0
"""Without a terminal, a line at least this often."""


class Display(Protocol):
    """Where a run's progress goes."""

    def start(self, title: str, done: int, steps: int) -> None:
        """The run begins, or goes on after `done` steps."""
        ...

    def step(self, done: int) -> None:
        """So many steps are done."""
        ...

    def record(self, record: Mapping[str, Any]) -> None:
        """An evaluation was recorded."""
        ...

    def stop(self) -> None:
        """The run is over, in whatever way."""
        ...


class Silent:
    """Shows nothing."""

    def start(self, title: str, done: int, steps: int) -> None:
        """Does nothing."""

    def step(self, done: int) -> None:
        """Does nothing."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""


class Bar:
    """A bar with the time that remains, and a line for every record above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )

    def start(self, title: str, done: int, steps: int) -> None:
        """Draws the bar."""
        self._progress.start()
        self._task = self._progress.add_task(title, total=steps, completed=done)

    def step(self, done: int) -> None:
        """Moves the bar."""
        self._progress.update(self._task, completed=done)

    def record(self, record: Mapping[str, Any]) -> None:
        """Prints the record above the bar."""
        self._console.print(summary(record), highlight=False, markup=False)

    def stop(self) -> None:
        """Removes the bar."""
        self._progress.stop()


class Lines:
    """A line for every record, and in between at least every half a minute."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self, title: str, done: int, steps: int) -> None:
        """Prints what begins."""
        self._steps, self._first, self._done = steps, done, done
        self._began = self._last = time.monotonic()
        self._print(f"{title}: {steps} steps" + (f", {done} done" if done else ""))

    def step(self, done: int) -> None:
        """Prints how far it is, if nothing has been printed for a while."""
        self._done = done
        if time.monotonic() - self._last > QUIET_SECONDS:
            self._print(f"step {done} of {self._steps}, {self._left()} left")

    def record(self, record: Mapping[str, Any]) -> None:
        """Prints the record."""
        self._print(f"{summary(record)}  {self._left()} left")

    def stop(self) -> None:
        """Does nothing: every line is out."""

    def _left(self) -> str:
        fresh = self._done - self._first
        if not fresh:
            return "?"
        seconds = (time.monotonic() - self._began) / fresh * (self._steps - self._done)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}"

    def _print(self, text: str) -> None:
        self._last = time.monotonic()
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def display(console: Console) -> Display:
    """A bar on a terminal, lines elsewhere."""
    return Bar(console) if console.is_terminal else Lines(console)


def score_table(scores: Mapping[str, Scores]) -> Table:
    """Scores by domain, accuracies in percent."""
    table = Table()
    for heading in ("domain", "images", "accuracy", "cross-entropy", "calibration error"):
        table.add_column(heading, justify="left" if heading == "domain" else "right")
    for domain, s in scores.items():
        accuracy, error = f"{100 * s.accuracy:.1f}", f"{100 * s.calibration_error:.1f}"
        table.add_row(domain, str(s.images), accuracy, f"{s.cross_entropy:.3f}", error)
    return table


def summary(record: Mapping[str, Any]) -> str:
    """A record on one line: the loss, and accuracies in percent."""
    parts = [f"step {record['step']:>5}  loss {record['loss']['total']:.4f}"]
    for split, title in (("val", "validation"), ("test", "test")):
        scores = {n: d[split]["accuracy"] for n, d in record["domains"].items() if split in d}
        if scores:
            shown = ", ".join(f"{name}: {100 * value:.1f}" for name, value in scores.items())
            parts.append(f"{title} {shown}")
    return "  ".join(parts)
