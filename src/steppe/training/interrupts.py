"""SIGTERM and Ctrl-C, noted when they arrive and acted on between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Self

_ONE_SECOND = 1.0


class Interrupts:
    """Holds back the first SIGTERM or SIGINT; a second one takes effect at once.

    A repeat within a second does not count as a second one: schedulers signal a process and its
    group.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._noted = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
                outer = getattr(self._before[number], "__self__", None)
                if isinstance(outer, Interrupts) and outer.number is not None:
                    # It came after the outer one was last asked, and before this one began.
                    self.number, self._noted = outer.number, outer._noted
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self._noted = number, time.monotonic()
            text = f"\n{signal.Signals(number).name}: stopping as soon as the state is saved\n"
            os.write(2, text.encode())  # print is not reentrant: the handler may interrupt one
        elif number != self.number or time.monotonic() - self._noted > _ONE_SECOND:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()
