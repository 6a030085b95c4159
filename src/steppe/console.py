"""Terminal output: lines, tables, and progress.

Only this module and `steppe.cli` import rich. All text goes through `printable` and is never
interpreted as markup, because names of files and domains are not trusted.
"""

import shutil
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Literal, Self

from rich.box import SIMPLE_HEAD, SIMPLE_HEAVY as SIMPLE_HEAVY
from rich.console import Console as Console, Group as Group, RenderableType as RenderableType
from rich.filesize import decimal as decimal
from rich.live import Live as Live
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table as Table
from rich.text import Text as Text

from steppe.strangers import printable

Unit = Literal["count", "bytes", "share"]


def stdout() -> Console:
    """For results."""
    return Console()


def stderr() -> Console:
    """For progress and messages, so that results can be piped."""
    return Console(stderr=True)


def text(value: object, style: str = "") -> Text:
    """Literal text, without markup and control codes."""
    return Text(printable(str(value)), style=style)


def say(console: Console | None, line: object) -> None:
    """Print a literal line without wrapping; do nothing if `console` is None."""
    if console is not None:
        console.print(printable(str(line)), highlight=False, markup=False, soft_wrap=True)


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str = "",
    labels: int = 1,
    plain: bool = False,
) -> Table:
    """A table of plain text.

    Args:
        headings: the columns' headings.
        rows: the cells.
        title: shown above the table.
        labels: how many of the first columns are text, left-aligned and wrapped on a narrow
            terminal. The others are numbers, right-aligned.
        plain: draw only a rule below the headings.
    """
    made = Table(title=text(title) if title else None)
    if plain:
        made.box, made.show_edge, made.pad_edge, made.padding = SIMPLE_HEAD, False, False, (0, 1)
    for place, heading in enumerate(headings):
        side: Literal["left", "right"] = "left" if place < labels else "right"
        made.add_column(text(heading), justify=side, overflow="fold", no_wrap=place >= labels)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else text(cell) for cell in row))
    return made


def printed(tables: Sequence[Table]) -> str:
    """Render tables at their full width."""
    # A line that a narrow terminal wraps is readable; a truncated number is not.
    roomy = Console(width=100_000)
    natural = [Measurement.get(roomy, roomy.options, table).maximum for table in tables]
    console = Console(width=max(80, shutil.get_terminal_size((120, 40)).columns, *natural))
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get()


class Meter:
    """Progress: a bar on a terminal, periodic lines elsewhere.

    The estimated time left assumes the average speed so far; a caller's note replaces it.

    Args:
        title: the current task.
        total: the amount of work, or None if unknown.
        console: where to show it; None shows nothing.
        unit: what is counted; a share goes from 0 to 1.
        done: the amount already done.
        every: seconds between lines without a terminal.

    Examples:
        >>> import sys
        >>> console = Console(file=sys.stdout, width=80)
        >>> with Meter("decoding", 2, console=console) as meter:
        ...     meter.advance()
        ...     meter.advance()
        decoding: 2 of 2
    """

    def __init__(
        self,
        title: str,
        total: float | None = None,
        *,
        console: Console | None,
        unit: Unit = "count",
        done: float = 0,
        every: float = 30.0,
    ) -> None:
        self.title, self.total, self.done, self.note, self.detail = title, total, done, "", ""
        self._console, self._unit, self._every, self._first = console, unit, every, done
        self._began = self._said = time.monotonic()
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[state]}", markup=False),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task(printable(title), total=total, state="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, by: float = 1) -> None:
        self.update(self.done + by)

    def update(
        self,
        done: float,
        *,
        total: float | None = None,
        title: str | None = None,
        note: str = "",
        detail: str = "",
    ) -> None:
        """Set the total amount done.

        Args:
            done: the amount done.
            total: the new total, if it changed.
            title: the new task, if it changed; shown at once.
            note: text in place of the time left.
            detail: text before it.
        """
        anew = title is not None and title != self.title
        if done < self.done:  # work started over
            self._first, self._began = done, time.monotonic()
        before, self.done, self.note, self.detail = self.done, done, note, detail
        self.total = self.total if total is None else total
        ends = done == self.total != before
        self.title = title if title is not None else self.title
        if self._bar is not None:
            title, state = printable(self.title), printable(self._state())
            self._bar.update(
                self._task, description=title, completed=done, total=self.total, state=state
            )
        elif anew or ends or time.monotonic() - self._said > self._every:
            self.say(f"{self.title}: {self._state()}")

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._said = time.monotonic()
        say(self._console, line)

    def _state(self) -> str:
        if self._unit == "share":
            parts = [f"{100 * self.done:.0f}% done"]
        else:
            values = [self.done] if self.total is None else [self.done, self.total]
            sized = self._unit == "bytes"
            parts = [" of ".join(decimal(int(n)) if sized else f"{n:,.0f}" for n in values)]
        elapsed, gained = time.monotonic() - self._began, self.done - self._first
        rate = gained / elapsed if elapsed > 0 else 0.0
        if self._unit == "bytes" and rate:
            parts.append(f"{decimal(int(rate))}/s")
        note = self.note
        if not note and rate and self.total is not None and self.done < self.total:
            note = f"{timedelta(seconds=round((self.total - self.done) / rate))} left"
        return ", ".join(filter(None, (*parts, self.detail, note)))
