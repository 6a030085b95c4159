"""What a run shows while it goes: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from steppe.strangers import printable

from .directory import validation_accuracy
from .evaluation import EnsembleScores, Scores

QUIET_SECONDS = 30.0
"""Without a terminal, a line at least this often."""


class Display(Protocol):
    """Where a run's progress goes."""

    def start(self, title: str, done: int, steps: int, records: int) -> None:
        """The run begins, or goes on after `done` steps; so many records are still to be made."""
        ...

    def step(self, done: int) -> None:
        """So many steps are done."""
        ...

    def evaluating(self, images: int, total: int) -> None:
        """So many images of an evaluation are done."""
        ...

    def record(self, record: Mapping[str, Any]) -> None:
        """An evaluation was recorded."""
        ...

    def stop(self) -> None:
        """The run is over, in whatever way."""
        ...


class Silent:
    """Shows nothing."""

    def start(self, title: str, done: int, steps: int, records: int) -> None:
        """Does nothing."""

    def step(self, done: int) -> None:
        """Does nothing."""

    def evaluating(self, images: int, total: int) -> None:
        """Does nothing."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""


class Remaining:
    """The time that is left: steps and evaluations cost what the last ones did.

    Examples:
        >>> remaining = Remaining(steps=101, records=3)
        >>> remaining.note({"step": 0, "seconds_per_step": 2.0, "evaluation_seconds": 10.0})
        >>> remaining.text(done=1)
        '0:03:40'
    """

    def __init__(self, steps: int, records: int) -> None:
        self._steps, self._records = steps, records
        self._step = self._evaluation = 0.0

    def note(self, record: Mapping[str, Any]) -> None:
        """A record was made."""
        self._records -= 1
        self._step, self._evaluation = record["seconds_per_step"], record["evaluation_seconds"]

    def text(self, done: int) -> str:
        """The time left after so many steps, or a question mark before the first record."""
        if not self._step:
            return "?"
        left = self._step * (self._steps - done) + self._evaluation * self._records
        return str(timedelta(seconds=round(left)))


class Bar:
    """A bar with the time that remains, and a line for every record above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )

    def start(self, title: str, done: int, steps: int, records: int) -> None:
        """Draws the bar."""
        self._remaining = Remaining(steps, records)
        self._progress.start()
        title = printable(title)
        self._task = self._progress.add_task(title, total=steps, completed=done, note="")

    def step(self, done: int) -> None:
        """Moves the bar."""
        note = f"{self._remaining.text(done)} left"
        self._progress.update(self._task, completed=done, note=note)

    def evaluating(self, images: int, total: int) -> None:
        """Says how far the evaluation is."""
        self._progress.update(self._task, note=f"evaluating {images:,} of {total:,} images")

    def record(self, record: Mapping[str, Any]) -> None:
        """Prints the record above the bar."""
        self._remaining.note(record)
        text = printable(summary(record))
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Removes the bar."""
        self._progress.stop()


class Lines:
    """A line for every record, and in between at least every half a minute."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self, title: str, done: int, steps: int, records: int) -> None:
        """Prints what begins."""
        self._steps, self._done = steps, done
        self._remaining = Remaining(steps, records)
        self._print(f"{title}: {steps} steps" + (f", {done} done" if done else ""))

    def step(self, done: int) -> None:
        """Prints how far it is, if nothing has been printed for a while."""
        self._done = done
        self._now_and_then(f"step {done} of {self._steps}, {self._remaining.text(done)} left")

    def evaluating(self, images: int, total: int) -> None:
        """Prints how far the evaluation is, if nothing has been printed for a while."""
        self._now_and_then(f"evaluating: {images:,} of {total:,} images")

    def record(self, record: Mapping[str, Any]) -> None:
        """Prints the record."""
        self._remaining.note(record)
        self._print(f"{summary(record)}  {self._remaining.text(self._done)} left")

    def stop(self) -> None:
        """Does nothing: every line is out."""

    def _now_and_then(self, text: str) -> None:
        if time.monotonic() - self._last > QUIET_SECONDS:
            self._print(text)

    def _print(self, text: str) -> None:
        self._last = time.monotonic()
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def display(console: Console) -> Display:
    """A bar on a terminal, lines elsewhere."""
    return Bar(console) if console.is_terminal else Lines(console)


def weights(which: str, scores: Iterable[Scores]) -> str:
    """Which weights the scores are of, in words.

    Examples:
        >>> weights("last", [Scores(0.9, 0.1, 0.1, 8, step=30), Scores(0.8, 0.2, 0.1, 8, step=20)])
        'last weights (steps 20, 30)'
    """
    steps = sorted({score.step for score in scores if score.step is not None})
    after = f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    return f"weights after {after}" if which.startswith("step:") else f"{which} weights ({after})"


def score_table(scores: Mapping[str, Scores], title: str) -> Table:
    """Scores by domain, accuracies in percent."""
    return _score_table(("domain",), [((domain,), s) for domain, s in scores.items()], title)


def ensemble_table(scores: Mapping[str, EnsembleScores], runs: Sequence[str], title: str) -> Table:
    """Scores of an ensemble by domain, below those of its members."""
    rows = [
        ((domain, name), s)
        for domain, of_domain in scores.items()
        for name, s in zip(
            (*runs, "ensemble"), (*of_domain.members, of_domain.ensemble), strict=True
        )
    ]
    return _score_table(("domain", "run"), rows, title)


def _score_table(
    names: Sequence[str], rows: Sequence[tuple[Sequence[str], Scores]], title: str
) -> Table:
    table = Table(title=Text(printable(title)))
    for name in names:
        table.add_column(name, overflow="fold")
    for heading in ("images", "accuracy", "cross-entropy", "calibration error"):
        table.add_column(heading, justify="right")
    for of_row, s in rows:
        accuracy, error = f"{100 * s.accuracy:.1f}", f"{100 * s.calibration_error:.1f}"
        names_of_row = (Text(printable(name)) for name in of_row)  # none of it is markup
        table.add_row(*names_of_row, str(s.images), accuracy, f"{s.cross_entropy:.3f}", error)
    return table


def summary(record: Mapping[str, Any]) -> str:
    """A record on one line: the loss, the mean validation accuracy, the targets', in percent."""
    parts = [f"step {record['step']:>5}"]
    if "total" in record["loss"]:  # an adversary's turns have losses of other names
        parts.append(f"loss {record['loss']['total']:.4f}")
    if (validated := validation_accuracy(record)) is not None:
        parts.append(f"validation {100 * validated:.1f}")
    tests = {n: d["test"]["accuracy"] for n, d in record["domains"].items() if "test" in d}
    if tests:
        shown = ", ".join(f"{name}: {100 * value:.1f}" for name, value in tests.items())
        parts.append(f"test {shown}")
    if record.get("averaged"):
        parts.append("(averaged weights)")
    return "  ".join(parts)
