"""One warning: bfloat16 autocast blurs the differences of gradients that flatness lives in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Bfloat16Warning(UserWarning):
    """A flatness-aware step ran under bfloat16 autocast."""


MESSAGE = (
    "{method} ran its passes under bfloat16 autocast. It acts on differences of gradients "
    "(g1 - g0), of which bfloat16's 8 bits of mantissa lose more than float16's 11: "
    "'steppe bench fidelity' measures how much. Prefer torch.autocast(..., dtype=torch.float16) "
    "with a GradScaler, TF32 or float32. This is said once per optimizer."
)


_plain_enter = torch.autocast.__enter__
_lock = threading.Lock()
_watching = 0  # passes under watch in all threads: the method is replaced while there are any
_local = threading.local()  # whom to tell in this thread


@contextmanager
def on_bfloat16(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` if bfloat16 autocast is on, or is entered by what runs inside, in this thread.

    The autocast region is inside the user's closure, over before the optimizer runs again, so
    entering it is watched for the time of the pass. (Hooks on saved tensors would see it too, but
    exclude `torch.func` from the closure.)
    """
    global _watching
    listeners: list[Callable[[], None]] = _local.__dict__.setdefault("listeners", [])
    listeners.append(tell)
    with _lock:
        _watching += 1
        torch.autocast.__enter__ = _watched_enter  # type: ignore[method-assign]
    try:
        for kind in ("cpu", "cuda"):  # the step itself may be under autocast
            _look(kind)
        yield
    finally:
        with _lock:
            _watching -= 1
            if _watching == 0:
                torch.autocast.__enter__ = _plain_enter  # type: ignore[method-assign]
        listeners.remove(tell)


def _watched_enter(self: torch.autocast) -> object:
    entered: object = _plain_enter(self)  # type: ignore[no-untyped-call]
    try:
        _look(self.device)
    except Warning:  # an error, where warnings are: then the region was never entered
        self.__exit__(None, None, None)
        raise
    return entered


def _look(kind: str) -> None:
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16:
        for tell in list(getattr(_local, "listeners", ())):
            tell()
