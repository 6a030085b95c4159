"""How validation ranks the steps of a run: one rule, for the run's own best and for reports.

The two must agree to the last bit. If they added up differently, the weights saved as best could be
those of another step than the one in the table.
"""

from collections.abc import Sequence

import numpy as np


def mean(values: Sequence[float]) -> float:
    """The mean, added up as numpy does it for DomainBed: bits decide ties.

    Python's own `sum` rounds differently from 3.12 on.
    """
    if len(values) >= 8:  # numpy adds in another order from there
        return float(np.mean(values))
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def first_best(values: Sequence[float | None]) -> int | None:
    """The index of the first highest value; None stands for no value, and is never chosen.

    Examples:
        >>> first_best([None, 0.5, 0.75, 0.75])
        2
        >>> first_best([None]) is None
        True
    """
    known = [value for value in values if value is not None]
    return values.index(max(known)) if known else None
