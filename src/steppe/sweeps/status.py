"""The progress of a sweep: counts, throughput, time left, failures."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import fmean
from typing import Any

from steppe.console import Console, Group, Live, table, text
from steppe.errors import UserError, unknown

from . import store
from .sweep import AXES, Sweep, read_plan

LEFT = ("planned", "running", "lost")
STATES = (*LEFT, "done", "failed", "cancelled")
RECENT_SECONDS = 3600.0
"""The window for throughput."""
PROBLEMS = 10
"""How many problems the terminal shows."""


@dataclass(frozen=True)
class Failure:
    name: str
    attempts: int
    error: str
    traceback: str


@dataclass(frozen=True)
class Status:
    """The progress of a sweep.

    Attributes:
        counts: number of runs in each state.
        axes: the same, for every value of every axis.
        runs_per_hour: throughput in the last hour, or since the first run started.
        seconds_left: estimated from finished runs; None before the first.
        running: seconds since each active run started.
        failures: runs that failed and will not be retried.
        problems: damaged or missing files. Their runs are still counted.
    """

    counts: Mapping[str, int]
    axes: Mapping[str, Mapping[str, Mapping[str, int]]]
    runs_per_hour: float
    seconds_left: float | None
    running: Mapping[str, float]
    failures: tuple[Failure, ...]
    problems: tuple[str, ...] = ()

    @property
    def left(self) -> int:
        """The number of unfinished runs."""
        return sum(self.counts[state] for state in LEFT)

    @property
    def over(self) -> bool:
        return not self.left

    @property
    def complete(self) -> bool:
        """Whether every run is done, and none failed or was cancelled."""
        return self.counts["done"] == sum(self.counts.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def look(sweep: Sweep, stale: float = store.STALE_SECONDS) -> Status:
    """Read the state of every run, including runs that were added since `sweep` was read."""
    sweep = read_plan(sweep.path)
    now = first = store.clock(sweep.path)
    states: dict[str, str] = {}
    seconds: dict[str, float] = {}
    running: dict[str, float] = {}
    ends: list[float] = []
    failures, problems = [], []
    axes: dict[str, dict[str, Counter[str]]] = {axis: defaultdict(Counter) for axis in AXES}
    for job, events, state in sweep.survey(now, stale):
        states[job.name] = state
        for axis in AXES:
            axes[axis][str(sweep.axes[job.name][axis])][state] += 1
        problems += store.damage(job, events)
        claims = [event for event in events if event.kind == "claim"]
        first = min([first, *(event.time for event in claims[:1])])
        if state == "done":
            with suppress(OSError):  # without write permission
                job.settle(events[-1])
            seconds[job.name] = sum(
                max(0.0, after.time - event.time)
                for event, after in itertools.pairwise(events)
                if event.kind == "claim"
            )
            ends.append(events[-1].time)
        elif state == "running":
            running[job.name] = max(0.0, now - events[-1].time)
        elif state == "failed":
            gone = {"error": "the run finished, but its result is missing", "traceback": ""}
            facts = gone if events[-1].kind == "done" else events[-1].facts
            failures.append(Failure(job.name, len(claims), facts["error"], facts["traceback"]))
    span = min(RECENT_SECONDS, max(now - first, 1.0))
    return Status(
        {state: list(states.values()).count(state) for state in STATES},
        {axis: {value: dict(c) for value, c in values.items()} for axis, values in axes.items()},
        3600 * sum(end > now - span for end in ends) / span,
        _seconds_left(sweep, states, seconds, running),
        running,
        tuple(failures),
        tuple(problems),
    )


def _seconds_left(
    sweep: Sweep,
    states: Mapping[str, str],
    seconds: Mapping[str, float],
    running: Mapping[str, float],
) -> float | None:
    """Estimate the time left from similar finished runs and the number of active workers."""
    if not seconds:
        return None

    def kind(name: str) -> tuple[Any, ...]:
        axes = sweep.axes[name]
        return axes["dataset"], axes["algorithm"], axes["optimizer"], axes["steps"]

    known: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for name, value in seconds.items():
        known[kind(name)].append(value)
    left = 0.0
    for name, state in states.items():
        if state in LEFT:
            expected = fmean(known.get(kind(name)) or seconds.values())
            left += max(0.0, expected - running.get(name, 0.0))
    return left / max(len(running), 1)


def summary(status: Status) -> tuple[str, str]:
    """Two lines: the counts, and the throughput."""
    total, done = sum(status.counts.values()), status.counts["done"]
    states = ", ".join(f"{n:,} {state}" for state, n in status.counts.items() if n)
    if status.over:
        return states, f"{done:,} of {total:,} runs done"
    left = status.seconds_left
    time_left = "?" if left is None else str(timedelta(seconds=round(left)))
    rate = f"{status.runs_per_hour:,.1f} runs/h"
    return states, f"{done:,} of {total:,} runs ({done / total:.0%}), {rate}, {time_left} left"


def show(sweep: Sweep, status: Status) -> Group:
    states, line = summary(status)
    parts: list[Any] = [text(f"{sweep.path}: {states}"), text(line)]
    rows = [
        (axis if place == 0 else "", value, *(_number(counts.get(state)) for state in STATES))
        for axis, values in status.axes.items()
        if len(values) > 1
        for place, (value, counts) in enumerate(values.items())
    ]
    if rows:
        parts.append(table(("", "", *STATES), rows, labels=2, plain=True))
    alike: dict[str, list[Failure]] = defaultdict(list)
    for failure in status.failures:
        alike[failure.error].append(failure)
    for error, (first, *more) in alike.items():
        others = f", and {len(more):,} more" if more else ""
        attempts = f"{first.attempts} attempt{'s' * (first.attempts != 1)}"
        line = f"failed after {attempts}: {first.name}{others}: {error}"
        parts.append(text(line, style="red"))
        if first.traceback:
            parts.append(text(first.traceback.rstrip(), style="dim"))
    lines = list(status.problems[:PROBLEMS])
    if len(status.problems) > PROBLEMS:
        lines.append(f"and {len(status.problems) - PROBLEMS:,} more problems (--json lists all)")
    return Group(*parts, *(text(line, style="yellow") for line in lines))


def _number(n: int | None) -> str:
    return f"{n:,}" if n else ""


def watch(sweep: Sweep, console: Console, stale: float = store.STALE_SECONDS) -> None:
    """Show the status, updated in place, until the sweep is over."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            status = look(sweep, stale)
            live.update(show(sweep, status), refresh=True)
            if status.over:
                return
            time.sleep(2.0)


def retry(sweep: Sweep, names: tuple[str, ...] = ()) -> list[str]:
    """Make failed and cancelled runs available again; return their names."""
    return _change(sweep, names, ("failed", "cancelled"), "retry")


def cancel(sweep: Sweep, names: tuple[str, ...] = ()) -> list[str]:
    """Cancel planned, running and lost runs; return their names."""
    return _change(sweep, names, LEFT, "cancelled")


def _change(sweep: Sweep, names: tuple[str, ...], states: tuple[str, ...], kind: str) -> list[str]:
    for name in names:
        if name not in sweep.axes:
            message = unknown("run", name, sweep.names).partition(" Known:")[0]
            raise UserError(f"{message} See {sweep.path / 'runs'} for all names")
    now = store.clock(sweep.path)
    changed = []
    for job, events, state in sweep.survey(now, store.STALE_SECONDS, names or None):
        if state in states and job.note(store.next_number(events), kind):
            changed.append(job.name)
        elif names:
            verb = "retried" if kind == "retry" else "cancelled"
            which = f"{', '.join(states[:-1])} or {states[-1]}"
            raise UserError(f"{job.name} is {state}; only {which} runs can be {verb}")
    return changed
