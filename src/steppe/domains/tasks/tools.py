"""What several bases share: random values per image, resampling, and misleading colors."""

from __future__ import annotations

import numpy as np
from numpy.random import RandomState

from steppe.domains.dataset import Indices

from .family import Floats


def each(rng: RandomState, n: int, low: float, high: float) -> Floats:
    """Draw a random number per image: N x 1 x 1."""
    return rng.uniform(low, high, (n, 1, 1))


def grid(size: int) -> tuple[Floats, Floats]:
    """Return the pixels' x (1 x 1 x size) and y (1 x size x 1); 0 is the center, y points down."""
    ticks = np.arange(size, dtype=np.float64) - (size - 1) / 2
    return ticks[None, None, :], ticks[None, :, None]


def sample(images: Floats, x: Floats, y: Floats) -> Floats:
    """Read square images, N x size x size, at points (x, y) of `grid`; bilinear, black outside."""
    size = images.shape[1]
    images = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    x, y = np.broadcast_arrays(*(np.clip(at + (size + 1) / 2, 0, size + 1) for at in (x, y)))
    left, top = (np.minimum(at.astype(np.int64), size) for at in (x, y))
    right, down = x - left, y - top
    one = np.arange(len(images))[:, None, None]
    upper = images[one, top, left] * (1 - right) + images[one, top, left + 1] * right
    lower = images[one, top + 1, left] * (1 - right) + images[one, top + 1, left + 1] * right
    result: Floats = upper * (1 - down) + lower * down
    return result


def colors(labels: Indices, agree: float, rng: RandomState) -> Floats:
    """Return a hue per image in [0, 1) that is its class's own in the share `agree` of images.

    The other images have the hue of another class.
    """
    n = int(labels.max()) + 1
    misled = rng.permutation(len(labels)) >= round(agree * len(labels))
    return np.where(misled, labels + rng.randint(1, n, len(labels)), labels) % n / n


def rgb(hue: Floats) -> Floats:
    """Return the saturated color of each hue: (..., 3)."""
    sector = (np.array([5.0, 3.0, 1.0]) + 6 * hue[..., None]) % 6
    color: Floats = 1 - np.clip(np.minimum(sector, 4 - sector), 0, 1)
    return color
