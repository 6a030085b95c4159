"""One warning: bfloat16 autocast blurs the differences of gradients that flatness lives in."""

from __future__ import annotations

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


@contextmanager
def on_bfloat16(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` if bfloat16 autocast is on, or is entered by what runs inside.

    The autocast region is inside the user's closure, over before the optimizer runs again, so
    entering it is watched for the time of the pass. (Hooks on saved tensors would see it too, but
    exclude `torch.func` from the closure.)
    """
    plain = torch.autocast.__enter__

    def enter(self: torch.autocast) -> object:
        entered: object = plain(self)  # type: ignore[no-untyped-call]
        look(self.device)
        return entered

    def look(kind: str) -> None:
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16:
            tell()

    for kind in ("cpu", "cuda"):
        look(kind)
    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = plain  # type: ignore[method-assign]
