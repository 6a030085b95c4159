"""JSON values, read leniently and written strictly."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import orjson


def parse(text: bytes) -> Any:
    r"""Parse JSON, including the NaN and Infinity that Python's own writer emits.

    Lone surrogates, which come from file names that are not UTF-8, become text such as
    ``\udcff``, because they cannot be encoded when a report is written.
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
    """Convert to values that JSON can hold. Non-finite numbers become null.

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
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def finite(value: Any) -> bool:
    """Whether a JSON value is a number, not NaN, and small enough to compute with."""
    return type(value) in (float, int) and abs(value) < 1e300


def finite_or_none(value: Any) -> float | None:
    return value if finite(value) else None
