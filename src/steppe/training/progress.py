"""Terminal output of runs: progress, records, and tables of scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from steppe.console import Console, Meter, Table, table

from .directory import validation_accuracy

if TYPE_CHECKING:
    from .evaluation import EnsembleScores, Scores


class Display:
    """Shows a run's progress: a bar on a terminal, lines elsewhere, and a line per record.

    The remaining time assumes that steps and evaluations cost as much as the last ones.

    Args:
        console: where to show it (default: nowhere).

    Examples:
        >>> import sys
        >>> display = Display(Console(file=sys.stdout, width=80))
        >>> display.start("digits", done=0, steps=101, records=3)
        digits: 101 steps
        >>> display.step(1)
        >>> scores = {"step": 0, "loss": {}, "domains": {}}
        >>> display.record({**scores, "seconds_per_step": 2.0, "evaluation_seconds": 10.0})
        step     0  0:03:40 left
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._done = self._steps = self._records = 0
        self._step = self._evaluation = 0.0

    def start(self, title: str, done: int, steps: int, records: int) -> None:
        """Start, or resume after `done` steps, with this many records to come."""
        self._done, self._steps, self._records = done, steps, records
        self._meter = Meter(title, steps, console=self._console, done=done)
        self._meter.__enter__()
        if self._console is not None and not self._console.is_terminal:
            self._meter.say(f"{title}: {steps} steps" + (f", {done} done" if done else ""))

    def step(self, done: int) -> None:
        self._done = done
        self._meter.update(done, note=self._left())

    def evaluating(self, images: int, total: int) -> None:
        self._meter.update(self._done, note=f"evaluating {images:,} of {total:,} images")

    def record(self, record: Mapping[str, Any]) -> None:
        self._records -= 1
        self._step, self._evaluation = record["seconds_per_step"], record["evaluation_seconds"]
        self._meter.say(f"{summary(record)}  {self._left()}")

    def stop(self) -> None:
        self._meter.__exit__(None, None, None)

    def _left(self) -> str:
        if not self._step:  # before the first record
            return "? left"
        left = self._step * (self._steps - self._done) + self._evaluation * self._records
        return f"{timedelta(seconds=round(left))} left"


def weights(asked: str | None, found: Iterable[tuple[str | None, int | None]]) -> str:
    """Describe the weights in use.

    Args:
        asked: the requested choice; None means the best, or the last if there is no best.
        found: each model's choice, ``best``, ``last`` or ``step:N``, and its step.

    Examples:
        >>> weights("last", [("last", 30), ("last", 20)])
        'last weights (steps 20, 30)'
        >>> weights(None, [("best", 10), ("last", 30)])
        'best weights (step 10), last weights (step 30; no best)'
    """
    steps: dict[str, set[int]] = {}
    for which, step in found:
        if step is not None:
            steps.setdefault(which if which in ("best", "last") else "", set()).add(step)
    parts = []
    for which, known in sorted(steps.items()):
        after = f"step{'s' * (len(known) > 1)} {', '.join(map(str, sorted(known)))}"
        why = "; no best" if asked is None and which == "last" else ""
        parts.append(f"{which} weights ({after}{why})" if which else f"weights after {after}")
    return ", ".join(parts)


def score_table(scores: Mapping[str, Scores], title: str) -> Table:
    """Table of scores by domain, with accuracies in percent."""
    rows = [(domain, *_cells(s)) for domain, s in scores.items()]
    return table(("domain", *_HEADINGS), rows, title=title)


def ensemble_table(scores: Mapping[str, EnsembleScores], runs: Sequence[str], title: str) -> Table:
    """Table of scores by domain, of the members and then of their ensemble."""
    rows = [
        (domain, name, *_cells(s))
        for domain, found in scores.items()
        for name, s in zip((*runs, "ensemble"), (*found.members, found.ensemble), strict=True)
    ]
    return table(("domain", "run", *_HEADINGS), rows, title=title, labels=2)


_HEADINGS = ("images", "accuracy", "cross-entropy", "calibration error")


def _cells(s: Scores) -> tuple[object, ...]:
    accuracy, calibration = (f"{100 * v:.1f}" for v in (s.accuracy, s.calibration_error))
    return s.images, accuracy, f"{s.cross_entropy:.3f}", calibration


def summary(record: Mapping[str, Any]) -> str:
    """A record on one line: loss, mean validation accuracy and target accuracies in percent."""
    parts = [f"step {record['step']:>5}"]
    if "total" in record["loss"]:  # missing if only an adversary was updated
        parts.append(f"loss {record['loss']['total']:.4f}")
    if (validated := validation_accuracy(record)) is not None:
        parts.append(f"validation {100 * validated:.1f}")
    if tests := _tests(record["domains"]):
        parts.append(f"test {tests}")
    if record.get("averaged"):
        parts.append("(averaged weights)")
    if raw := _tests(record.get("raw", {})):
        parts.append(f"raw {raw}")
    return "  ".join(parts)


def _tests(domains: Mapping[str, Any]) -> str:
    tests = {name: d["test"]["accuracy"] for name, d in domains.items() if "test" in d}
    return ", ".join(f"{name}: {100 * value:.1f}" for name, value in tests.items())
