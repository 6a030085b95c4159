"""Tasks from scikit-learn's handwritten digits, 8 x 8 pixels; each digit is in one domain only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
from numpy.random import RandomState

from steppe.domains.dataset import Indices

from .family import Family, Floats, Painter
from .tools import colors, each, grid, rgb, sample

_CLASSES = tuple(str(digit) for digit in range(10))
_PER_SOURCE = 40
"""Digits of a class that a source domain may use; 54 or more are left for the target."""


@cache
def _pool() -> tuple[Floats, ...]:
    """Return the digits of each class, shuffled, in [0, 1]."""
    from sklearn.datasets import load_digits  # slow to import, and naming datasets does not need it

    bunch = load_digits()
    order = RandomState(0).permutation(len(bunch.target))
    images, target = bunch.images[order] / 16, bunch.target[order]
    return tuple(images[target == digit] for digit in range(10))


def _digits(labels: Indices, domain: int) -> Floats:
    images = np.empty((len(labels), 8, 8))
    for digit in np.unique(labels):
        chosen = labels == digit
        images[chosen] = _pool()[digit][domain * _PER_SOURCE :][: chosen.sum()]
    return images


Change = Callable[[Floats, Indices, RandomState], Floats]


def _paint(labels: Indices, rng: RandomState, domain: int, change: Change) -> Floats:
    return change(_digits(labels, domain), labels, rng)


def _family(name: str, changes: dict[str, Change], size: int = 8, channels: int = 1) -> Family:
    painters: dict[str, Painter] = {
        domain: partial(_paint, domain=i, change=change)
        for i, (domain, change) in enumerate(changes.items())
    }
    return Family(name, "digits", _CLASSES, size, channels, painters)


def _rotate(images: Floats, labels: Indices, rng: RandomState, degrees: float) -> Floats:
    x, y = grid(8)
    cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    return sample(images, cos * x - sin * y, sin * x + cos * y)


def _color(images: Floats, labels: Indices, rng: RandomState, agree: float) -> Floats:
    return images[..., None] * rgb(colors(labels, agree, rng))[:, None, None]


def _shift(
    images: Floats,
    labels: Indices,
    rng: RandomState,
    scale: float = 1.0,
    x0: tuple[float, float] = (-1, 1),
) -> Floats:
    """Put a digit of this scale at a random place of a 12 x 12 canvas."""
    n, (x, y) = len(images), grid(12)
    x, y = x - each(rng, n, *x0), y - each(rng, n, -1, 1)
    return sample(images, x / scale, y / scale)


def _clean(images: Floats, labels: Indices, rng: RandomState) -> Floats:
    return images


def _noise(images: Floats, labels: Indices, rng: RandomState) -> Floats:
    return images + rng.normal(0, 0.3, images.shape)


def _blur(images: Floats, labels: Indices, rng: RandomState) -> Floats:
    x, y = grid(8)
    near = [(right, down) for right in (-1, 0, 1) for down in (-1, 0, 1)]
    total: Floats = np.sum([sample(images, x + right, y + down) for right, down in near], axis=0)
    return total / len(near)


def _occlude(images: Floats, labels: Indices, rng: RandomState) -> Floats:
    """Halve the contrast on gray, and hide a square of 3 x 3 pixels."""
    n, (x, y) = len(images), grid(8)
    hidden = np.maximum(abs(x - each(rng, n, -2, 2)), abs(y - each(rng, n, -2, 2))) < 1.5
    return np.where(hidden, 0.3, 0.3 + 0.5 * images)


FAMILIES = (
    _family(
        "rotations", {str(angle): partial(_rotate, degrees=angle) for angle in (0, 20, 40, 60)}
    ),
    _family(
        "colors",
        {f"{share}%": partial(_color, agree=share / 100) for share in (90, 80, 70, 0)},
        channels=3,
    ),
    _family(
        "corruptions", {"clean": _clean, "noise": _noise, "blur": _blur, "occlusion": _occlude}
    ),
    _family(
        "shifts",
        {
            "left": partial(_shift, x0=(-2, -1)),
            "right": partial(_shift, x0=(1, 2)),
            "small": partial(_shift, scale=0.8),
            "large": partial(_shift, scale=1.45),
        },
        size=12,
    ),
)
