"""Tasks from seven-segment displays with the digits 0 to 9, 16 x 16 pixels."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.random import RandomState

from steppe.domains.dataset import Indices

from .family import Family, Floats
from .tools import each, grid

_SIZE = 16
_LIT = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")
"""The segments of each digit, in the usual notation."""
_ON = np.array([[segment in lit for segment in "abcdefg"] for lit in _LIT])
_PLACES = {  # the middle, in half widths and half heights, and whether it is horizontal
    "a": (0, -1, True),
    "b": (1, -0.5, False),
    "c": (1, 0.5, False),
    "d": (0, 1, True),
    "e": (-1, 0.5, False),
    "f": (-1, -0.5, False),
    "g": (0, 0, True),
}
_WIDE, _HIGH = 2.6, 5.0
"""Half the width and half the height of a digit, in pixels."""


def _display(
    labels: Indices,
    rng: RandomState,
    slant: tuple[float, float] = (-0.1, 0.1),
    thickness: tuple[float, float] = (0.9, 1.4),
    broken: float = 0.0,
    dim: float = 1.0,
    noise: float = 0.1,
) -> Floats:
    """Draw displays.

    `broken` is the share of lit segments that are dark, and `dim` the least brightness of one.
    """
    n, (x, y) = len(labels), grid(_SIZE)
    x, y = x - each(rng, n, -1.5, 1.5), y - each(rng, n, -1.5, 1.5)
    x, half = x + each(rng, n, *slant) * y, each(rng, n, *thickness) / 2
    image = np.zeros((n, _SIZE, _SIZE))
    for i, (right, down, flat) in enumerate(_PLACES.values()):
        length = _WIDE if flat else _HIGH / 2
        along, across = x - right * _WIDE, y - down * _HIGH
        if not flat:
            along, across = across, along
        distance = np.hypot(np.maximum(abs(along) - length, 0), across)
        works = _ON[labels, i] & (rng.uniform(size=n) >= broken)
        light = works[:, None, None] * each(rng, n, dim, 1)
        image = np.maximum(image, light * np.clip(half + 0.5 - distance, 0, 1))
    return 0.1 + 0.8 * image + rng.normal(0, noise, image.shape)


_FAMILY = partial(Family, base="segments", classes=tuple("0123456789"), size=_SIZE, channels=1)
FAMILIES = (
    _FAMILY(
        name="slants",
        painters={
            "left": partial(_display, slant=(-0.35, -0.2)),
            "upright": _display,
            "thick": partial(_display, thickness=(1.6, 2.4)),
            "right": partial(_display, slant=(0.4, 0.6), thickness=(1.8, 2.6)),
        },
    ),
    _FAMILY(
        name="broken",
        painters={
            "new": _display,
            "dim": partial(_display, dim=0.4),
            "noisy": partial(_display, noise=0.3),
            "broken": partial(_display, broken=0.12, dim=0.4, noise=0.2),
        },
    ),
)
