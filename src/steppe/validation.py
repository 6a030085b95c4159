"""The rule by which validation ranks a run's steps, shared by training and reports.

The two must agree to the last bit: otherwise a run could save the weights of a different step
than the one in the table.
"""

from collections.abc import Sequence

import numpy as np


def mean(values: Sequence[float]) -> float:
    """The mean, bit-identical to numpy's, which DomainBed uses: rounding decides ties.

    Python's `sum` rounds differently since 3.12.
    """
    if len(values) >= 8:  # numpy adds in another order
        return float(np.mean(values))
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def first_best(values: Sequence[float | None]) -> int | None:
    """The index of the first maximum, ignoring None.

    Examples:
        >>> first_best([None, 0.5, 0.75, 0.75])
        2
        >>> first_best([None]) is None
        True
    """
    known = [value for value in values if value is not None]
    return values.index(max(known)) if known else None
