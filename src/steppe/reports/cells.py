"""Table cells: means over trials with their standard errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

MISSING = "–"


class Cell(NamedTuple):
    """Mean and standard error over trials, in percent."""

    mean: float
    err: float
    n: int
    """Number of trials."""
    partial: bool = False
    """Whether some trial lacks targets."""


def standard_error(values: Sequence[float]) -> float:
    """DomainBed's standard error: the population standard deviation over the root of its size.

    Examples:
        >>> standard_error([1.0, 3.0])
        0.7071067811865475
    """
    data = np.array(values)
    return float(np.std(data / np.sqrt(len(data))))  # in DomainBed's order, to the last bit


def cell_of(values: Iterable[float], partial: bool = False) -> Cell | None:
    """Mean and standard error of accuracies in [0, 1]; None if there are none."""
    data = list(values)
    if not data:
        return None
    return Cell(100 * float(np.mean(data)), 100 * standard_error(data), len(data), partial)


def cell_text(cell: Cell | None) -> str:
    """Mean and standard error with one decimal, as DomainBed prints them.

    Examples:
        >>> cell_text(Cell(83.25, 0.5, 3)), cell_text(Cell(83.25, 0.0, 1)), cell_text(None)
        ('83.2 ± 0.5', '83.2', '–')
    """
    if cell is None:
        return MISSING
    error = "" if cell.n == 1 else f" ± {cell.err:.1f}"
    return f"{cell.mean:.1f}{error}{'*' * cell.partial}"


def number_text(value: float, digits: int) -> str:
    """A number with a fixed number of decimals, none of which may hide that it is positive.

    Examples:
        >>> number_text(1.25, 1), number_text(0.0004, 3), number_text(0.0, 3)
        ('1.2', '< 0.001', '0.000')
    """
    least = 10**-digits
    return f"< {least:.{digits}f}" if 0 < value < least else f"{value:.{digits}f}"


def points_text(value: float) -> str:
    """A difference in points with its sign and one decimal.

    Examples:
        >>> points_text(1.25), points_text(-0.04), points_text(-0.5)
        ('+1.2', '0.0', '-0.5')
    """
    written = f"{value:+.1f}"
    return "0.0" if float(written) == 0 else written


def interval_text(low: float, high: float) -> str:
    return f"{points_text(low)} to {points_text(high)}"


def p_text(value: float) -> str:
    """A p value with enough digits to show on which side of 0.05 it lies.

    Examples:
        >>> p_text(0.0314), p_text(0.0002), p_text(1.0), p_text(0.0496), p_text(0.0504)
        ('0.031', '< 0.001', '1', '0.0496', '0.0504')
    """
    if value < 0.001:
        return "< 0.001"
    texts = (f"{value:.{digits}g}" for digits in range(2, 18))
    return next((text for text in texts if float(text) != 0.05), "0.05")
