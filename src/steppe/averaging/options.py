"""What the options of averages may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from steppe.errors import UserError

from .valley import VALLEYS


def _whole(low: int) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= low,
        f"a whole number, at least {low}",
    )


def _positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "start": _whole(0),
    "every": _whole(1),
    "n_converge": _whole(1),
    "n_tolerance": _whole(1),
    "tolerance": (_positive, "a number greater than 0"),
    "counting": (lambda value: value in tuple(VALLEYS), " or ".join(map(repr, VALLEYS))),
}


def check_options(averaging: str, options: Mapping[str, Any]) -> None:
    """Refuses values that make no sense.

    Args:
        averaging: whose options they are, for the message.
        options: values by name.

    Examples:
        >>> check_options("swad", {"every": 0})
        Traceback (most recent call last):
        steppe.errors.UserError: averaging 'swad': every=0: expected a whole number, at least 1
    """
    for name, value in options.items():
        fits, expected = _RULES[name]
        if not fits(value):
            raise UserError(f"averaging {averaging!r}: {name}={value!r}: expected {expected}")
