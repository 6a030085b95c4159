"""Plain values, as JSON has them: read leniently, written strictly."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import orjson


def parse(text: bytes) -> Any:
    r"""Read JSON; NaN and Infinity are let through, as Python's own writer has them.

    Half a character (a lone surrogate), which stands for a byte of a name that is not UTF-8, is
    spelled out as ``\udcff``: no file could be written with it.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return _spelled_out(json.loads(text))
        except RecursionError:
            raise ValueError("nested too deeply") from None


def _spelled_out(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_spelled_out(key): _spelled_out(item) for key, item in value.items()}
    return [_spelled_out(item) for item in value] if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """What JSON can hold: a number that is not finite becomes null.

    Examples:
        >>> plain({"lr": float("nan"), "betas": (0.9, float("inf"))})
        {'lr': None, 'betas': [0.9, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def dumps(value: Any) -> str:
    """The text of a JSON file."""
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def finite(value: Any) -> bool:
    """Whether a value from JSON is a number, and neither NaN nor too large to compute with."""
    return type(value) in (float, int) and abs(value) < 1e300


def finite_or_none(value: Any) -> float | None:
    return value if finite(value) else None
