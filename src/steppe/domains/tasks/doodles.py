"""Tasks from `steppe.domains.datasets.doodles`, reduced to 16 x 16 pixels."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.random import RandomState

from steppe.domains.dataset import Indices
from steppe.domains.datasets.doodles import CLASSES, SIZE, STYLES, Drawings, draw, inside, over

from .family import Family, Floats
from .tools import colors


def _halved(images: Floats) -> Floats:
    """Average blocks of 2 x 2 pixels."""
    half = SIZE // 2
    blocks = np.clip(images, 0, 1).reshape(-1, half, 2, half, 2, 3)
    means: Floats = blocks.mean(axis=(2, 4))
    return means


def _style(labels: Indices, rng: RandomState, style: str) -> Floats:
    return _halved(draw(style, labels, rng))


def _background(labels: Indices, rng: RandomState, agree: float) -> Floats:
    """A dark shape on stripes in a color that agrees with the class in a share of the images."""
    sheet = Drawings(labels, rng)
    hue = colors(labels, agree, rng)[:, None, None]
    ground = sheet.color(hue, (0.4, 0.8), (0.6, 0.9)) + (0.1 * sheet.stripes(6.0))[..., None]
    shape = inside(sheet.distance(wobble=0.5), softness=1.5)
    return _halved(over(ground, sheet.each(0.1, 0.3)[..., None], shape))


_FAMILY = partial(Family, base="doodles", classes=CLASSES, size=SIZE // 2, channels=3)
FAMILIES = (
    _FAMILY(name="styles", painters={style: partial(_style, style=style) for style in STYLES}),
    _FAMILY(
        name="backgrounds",
        painters={
            f"{share}%": partial(_background, agree=share / 100) for share in (80, 70, 60, 0)
        },
    ),
)
