"""Tasks whose classes are patterns, 16 x 16 pixels: gratings, checkers, dots, rings, noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.random import RandomState

from steppe.domains.dataset import Indices

from .family import Family, Floats
from .tools import each, grid

_SIZE = 16


def _noise(u: Floats, v: Floats, rng: RandomState) -> Floats:
    """Five waves in random directions."""
    turns, phases = (each(rng, len(u), 0, 2 * np.pi) for _ in range(2))
    waves = [
        np.cos(np.cos(turns * k) * u + np.sin(turns * k) * v + phases * k) for k in range(1, 6)
    ]
    total: Floats = np.sum(waves, axis=0) / np.sqrt(len(waves))
    return total


_PATTERNS: dict[str, Callable[[Floats, Floats, RandomState], Floats]] = {
    "vertical": lambda u, v, rng: np.cos(u),
    "checkers": lambda u, v, rng: np.cos(u) * np.cos(v),
    "dots": lambda u, v, rng: (1 + np.cos(u)) * (1 + np.cos(v)) * 0.75 - 1,
    "rings": lambda u, v, rng: np.cos(np.hypot(u, v)),
    "horizontal": lambda u, v, rng: np.cos(v),
    "rising": lambda u, v, rng: np.cos((u + v) * np.sqrt(0.5)),
    "falling": lambda u, v, rng: np.cos((u - v) * np.sqrt(0.5)),
    "noise": _noise,
}


def _texture(
    labels: Indices,
    rng: RandomState,
    period: tuple[float, float] = (3.5, 6.0),
    contrast: tuple[float, float] = (0.25, 0.4),
    level: tuple[float, float] = (0.4, 0.6),
    slope: float = 0.0,
    noise: float = 0.12,
) -> Floats:
    """Draw patterns, slightly turned, at random places.

    `slope` is how much brighter than the middle the light's side is, from a random direction.
    """
    n, (x, y) = len(labels), grid(_SIZE)
    turn, wave = each(rng, n, -0.25, 0.25), 2 * np.pi / each(rng, n, *period)
    x0, y0 = each(rng, n, -5, 5), each(rng, n, -5, 5)
    u = wave * (np.cos(turn) * (x - x0) + np.sin(turn) * (y - y0))
    v = wave * (np.cos(turn) * (y - y0) - np.sin(turn) * (x - x0))
    image = np.empty((n, _SIZE, _SIZE))
    for label, pattern in enumerate(_PATTERNS.values()):
        chosen = labels == label
        image[chosen] = pattern(u[chosen], v[chosen], rng)
    image = each(rng, n, *level) + each(rng, n, *contrast) * image
    side = each(rng, n, 0, 2 * np.pi)
    image = image * (1 + slope * (np.cos(side) * x + np.sin(side) * y) / (_SIZE / 2))
    return image + rng.normal(0, noise, image.shape)


_FAMILY = partial(Family, base="textures", classes=tuple(_PATTERNS), size=_SIZE, channels=1)
FAMILIES = (
    _FAMILY(
        name="scales",
        painters={
            "3px": partial(_texture, period=(2.8, 3.2)),
            "4px": partial(_texture, period=(3.7, 4.3)),
            "6px": partial(_texture, period=(5.5, 6.5)),
            "10px": partial(_texture, period=(9.0, 11.0)),
        },
    ),
    _FAMILY(
        name="lighting",
        painters={
            "even": _texture,
            "bright": partial(_texture, level=(0.65, 0.8)),
            "sloped": partial(_texture, slope=0.5),
            "dusk": partial(_texture, level=(0.15, 0.3), contrast=(0.15, 0.25), slope=0.8),
        },
    ),
)
