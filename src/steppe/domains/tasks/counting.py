"""Tasks whose classes are numbers of blobs, one to six, 16 x 16 pixels."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.random import RandomState

from steppe.domains.dataset import Indices

from .family import Family, Floats
from .tools import each, grid

_SIZE, _CELLS = 16, 3
_CLASSES = tuple(str(number) for number in range(1, 7))


def _blobs(
    labels: Indices,
    rng: RandomState,
    radius: tuple[float, float],
    light: tuple[float, float] = (0.6, 0.7),
    ground: tuple[float, float] = (0.12, 0.18),
) -> Floats:
    """Draw blobs in different cells of a 3 x 3 grid, `light` brighter than the ground."""
    n, (x, y) = len(labels), grid(_SIZE)
    image = np.broadcast_to(each(rng, n, *ground), (n, _SIZE, _SIZE))
    cells = rng.uniform(size=(n, _CELLS**2)).argsort(axis=1)
    for k in range(len(_CLASSES)):
        cell, pitch = cells[:, k, None, None], _SIZE / _CELLS
        x0 = (cell % _CELLS - 1) * pitch + each(rng, n, -0.3, 0.3)
        y0 = (cell // _CELLS - 1) * pitch + each(rng, n, -0.3, 0.3)
        blob = np.clip(0.5 + each(rng, n, *radius) - np.hypot(x - x0, y - y0), 0, 1)
        there = (k <= labels)[:, None, None]
        image = image + there * each(rng, n, *light) * blob
    return image + rng.normal(0, 0.02, image.shape)


FAMILIES = (
    Family(
        name="blobs",
        base="counting",
        classes=_CLASSES,
        size=_SIZE,
        channels=1,
        painters={
            "small": partial(_blobs, radius=(1.0, 1.2)),
            "medium": partial(_blobs, radius=(1.4, 1.6)),
            "faint": partial(_blobs, radius=(1.4, 1.6), light=(0.45, 0.55)),
            "large": partial(_blobs, radius=(1.6, 1.8), ground=(0.15, 0.3)),
        },
    ),
)
