"""What a long computation tells about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a solver is.

    Attributes:
        share: the part that is done, from 0 to 1; an estimate where the end is not known.
        products: vectors multiplied so far.
        note: in words.
    """

    share: float
    products: int
    note: str


Report = Callable[[Progress], None]
"""Called now and then by a solver."""
