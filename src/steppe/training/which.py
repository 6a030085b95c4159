"""Which of a run's weights to use: the last, the best by validation, or those after a step."""

from __future__ import annotations

import re

from steppe.errors import UserError, shown

Which = str
"""``last``, ``best``, or ``step:N`` for the checkpoint after step N."""

PATTERN = r"^(last|best|step:(0|[1-9][0-9]{0,17}))$"


def chosen_step(which: Which) -> int | None:
    """The N of ``step:N``; None for ``last`` and ``best``.

    Raises:
        UserError: `which` has none of the three forms.

    Examples:
        >>> chosen_step("step:30"), chosen_step("best")
        (30, None)
    """
    found = re.fullmatch(PATTERN, str(which))
    if found is None:
        raise UserError(
            f"which={shown(which)}: expected last, best, or step:N for the checkpoint after step N"
        )
    return None if found[2] is None else int(found[2])
