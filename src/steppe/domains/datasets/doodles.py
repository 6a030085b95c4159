"""Doodles: eight shapes in four drawing styles, 32 x 32 pixels, drawn on demand.

It needs no download. As in PACS, the domains are styles: a heart keeps its shape in all of them,
and nearly everything else differs. A shape is a signed distance to its edge, negative inside. A
style colors distances: it fills where they are negative, draws a line where they are small, and
derives a surface's slope from their gradient.

All randomness comes from NumPy's `RandomState`, whose streams never change, so everyone gets the
same images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from steppe.domains.dataset import Arrays, Contents, Domain, Indices
from steppe.domains.spec import DatasetSpec

SIZE = 32
PER_STYLE = 800

Floats = NDArray[np.float64]
Shape = Callable[[Floats, Floats], Floats]
"""The signed distance to a shape's edge at points (x, y); y points down, the radius is about 1."""


def _disc(radius: float, x0: float = 0.0, y0: float = 0.0) -> Shape:
    return lambda x, y: np.hypot(x - x0, y - y0) - radius


def _box(width: float, height: float) -> Shape:
    return lambda x, y: np.maximum(np.abs(x) - width, np.abs(y) - height)


def _star(tips: int, outer: float, inner: float) -> Shape:
    """A star with tips at the radius `outer`, and corners between them at `inner`."""
    half = math.pi / tips
    dx, dy = inner * math.cos(half) - outer, inner * math.sin(half)  # from a tip to a corner
    length = math.hypot(dx, dy)

    def shape(x: Floats, y: Floats) -> Floats:
        # Fold the plane into the wedge between a tip and the next corner, which has only one edge.
        angle = np.abs((np.arctan2(x, -y) + half) % (2 * half) - half)
        radius = np.hypot(x, y)
        folded: Floats = dy * (radius * np.cos(angle) - outer) - dx * radius * np.sin(angle)
        return folded / length

    return shape


def _cross(x: Floats, y: Floats) -> Floats:
    return np.minimum(_box(0.95, 0.3)(x, y), _box(0.3, 0.95)(x, y))


def _heart(x: Floats, y: Floats) -> Floats:
    # A square standing on a corner, and a disc on each of its two upper sides.
    x, side = np.abs(x), math.sqrt(0.125)
    square = (x + np.abs(y - 0.1)) * math.sqrt(0.5) - 0.5
    return np.minimum(square, _disc(0.5, side, 0.1 - side)(x, y))


def _crescent(x: Floats, y: Floats) -> Floats:
    return np.maximum(_disc(0.95)(x, y), -_disc(0.72, 0.45, -0.1)(x, y))


def _ring(x: Floats, y: Floats) -> Floats:
    return np.abs(np.hypot(x, y) - 0.7) - 0.22


_SHAPES: dict[str, Shape] = {
    "circle": _disc(0.85),
    "square": _box(0.75, 0.75),
    "triangle": _star(3, 1.05, 0.525),  # the corners lie on the edges
    "star": _star(5, 1.05, 0.44),
    "cross": _cross,
    "heart": _heart,
    "crescent": _crescent,
    "ring": _ring,
}
CLASSES = tuple(_SHAPES)


class Drawings:
    """One shape per sheet of paper: the shapes' positions, and the tools that styles share.

    Values per drawing have the shape N x 1 x 1, values per pixel N x height x width. Colors have
    one more axis.
    """

    def __init__(self, labels: Indices, rng: RandomState) -> None:
        self.labels = labels
        self.rng = rng
        ticks = np.arange(SIZE) + 0.5 - SIZE / 2
        self.x, self.y = ticks[None, None, :], ticks[None, :, None]
        self.radius = self.each(0.6, 0.8) * SIZE / 2
        self.turn = self.each(-0.35, 0.35)
        room = 0.9 * SIZE / 2 - self.radius
        self.x0, self.y0 = room * self.each(-1, 1), room * self.each(-1, 1)

    def each(self, low: float, high: float) -> Floats:
        """Draw a random number for each drawing."""
        return self.rng.uniform(low, high, (len(self.labels), 1, 1))

    def distance(self, wobble: float = 0.0, shift: float = 0.0) -> Floats:
        """Return the signed distance of each pixel to the shape's edge, in pixels.

        `wobble` is the amplitude of an unsteady hand; `shift` moves the shape down and right.
        """
        x, y = self.x - self.x0 - shift, self.y - self.y0 - shift
        if wobble:
            x, y = x + wobble * self.clouds(5), y + wobble * self.clouds(5)
        cos, sin = np.cos(self.turn) / self.radius, np.sin(self.turn) / self.radius
        x, y = cos * x + sin * y, cos * y - sin * x
        distance = np.empty((len(self.labels), SIZE, SIZE))
        for label, shape in enumerate(_SHAPES.values()):
            chosen = self.labels == label
            distance[chosen] = shape(x[chosen], y[chosen])
        return distance * self.radius

    def clouds(self, cells: int) -> Floats:
        """Return smooth noise in [-1, 1], interpolated between the corners of a grid of cells."""
        corners = self.rng.uniform(-1, 1, (len(self.labels), cells + 1, cells + 1))
        at = np.linspace(0, cells, SIZE)
        left = np.minimum(at.astype(np.int64), cells - 1)
        share = (at - left) ** 2 * (3 - 2 * (at - left))  # the right corner's weight, smooth
        join = np.zeros((SIZE, cells + 1))
        join[np.arange(SIZE), left] = 1 - share
        join[np.arange(SIZE), left + 1] = share
        return join @ corners @ join.T

    def stripes(self, period: float) -> Floats:
        """Return parallel waves in [-1, 1], `period` pixels apart, in a random direction each."""
        angle, phase = self.each(0, np.pi), self.each(0, 2 * np.pi)
        across = np.cos(angle) * self.x + np.sin(angle) * self.y
        waves: Floats = np.sin(across * 2 * np.pi / period + phase)
        return waves

    def color(
        self, hue: Floats, saturation: tuple[float, float], value: tuple[float, float]
    ) -> Floats:
        """Draw a color with this hue (a full circle is 1) for each drawing."""
        s, v = self.each(*saturation)[..., None], self.each(*value)[..., None]
        sector = (np.array([5.0, 3.0, 1.0]) + 6 * hue[..., None]) % 6
        color: Floats = v - v * s * np.clip(np.minimum(sector, 4 - sector), 0, 1)
        return color


def inside(distance: Floats, softness: float = 1.0) -> Floats:
    """Return how much of each pixel is inside the shape; the edge is `softness` pixels wide."""
    return np.clip(0.5 - distance / softness, 0, 1)


def over(below: Floats, above: Floats | float, cover: Floats) -> Floats:
    """Blend `above` over `below` with the opacity `cover` of each pixel."""
    return below + cover[..., None] * (above - below)


def _paint(draw: Drawings) -> Floats:
    """Brush strokes, hand-drawn edges, neighboring hues that run into each other."""
    distance, hue = draw.distance(wobble=1.1), draw.each(0, 1)
    ground = over(
        draw.color(hue, (0.05, 0.4), (0.75, 1.0)),
        draw.color(hue + draw.each(-0.1, 0.1), (0.05, 0.4), (0.75, 1.0)),
        0.5 + 0.5 * draw.clouds(4),
    )
    fill = draw.color(hue + draw.each(0.25, 0.75), (0.2, 0.9), (0.2, 0.65))
    ground = ground + (0.03 * draw.stripes(3.7))[..., None]
    fill = fill + (0.07 * draw.stripes(3.1) + 0.06 * draw.clouds(5))[..., None]
    return over(ground, fill, inside(distance, softness=1.5))


def _cartoon(draw: Drawings) -> Floats:
    """Flat bright colors, half shaded, with a thick black outline."""
    distance, hue = draw.distance(), draw.each(0, 1)
    ground = draw.color(hue, (0.15, 0.45), (0.9, 1.0))
    ground = ground + (0.03 * np.sign(draw.stripes(9.0)))[..., None]
    fill = draw.color(hue + draw.each(0.25, 0.75), (0.6, 1.0), (0.7, 1.0))
    lit = inside(draw.x - draw.x0 + draw.y - draw.y0 - 2)
    image = over(ground, over(0.72 * fill, fill, lit), inside(distance))
    return over(image, 0.06, inside(np.abs(distance) - 0.95))


def _photo(draw: Drawings) -> Floats:
    """A rounded object lit from the upper left, its shadow on rough ground, and camera noise."""
    distance, hue = draw.distance(), draw.each(0, 1)
    ground = over(
        draw.color(hue, (0.03, 0.3), (0.6, 0.95)),
        draw.color(draw.each(0, 1), (0.03, 0.3), (0.6, 0.95)),
        0.5 + 0.5 * draw.clouds(2),
    )
    ground = ground + (0.1 * draw.clouds(9))[..., None]
    ground = over(ground, 0.55 * ground, inside(draw.distance(shift=2), softness=4))
    depth = np.clip(-distance, 0, 5)
    down, right = np.gradient(np.sqrt(depth * (10 - depth)), axis=(1, 2))  # a quarter circle
    light = (1 + 0.6 * (down + right)) / np.sqrt(1 + down**2 + right**2)
    fill = draw.color(hue + draw.each(0.3, 0.7), (0.2, 0.8), (0.25, 0.7))
    fill = fill * (0.25 + 0.75 * np.clip(light, 0, 1.2))[..., None]
    fill = fill + (0.35 * np.clip(light - 0.95, 0, 1))[..., None]
    image = over(ground, fill, inside(distance, softness=1.5))
    return image + draw.rng.normal(0, 0.035, image.shape)


def _sketch(draw: Drawings) -> Floats:
    """Pencil on paper: two outlines that do not quite match, and hatching."""
    paper = draw.color(draw.each(0.06, 0.16), (0.0, 0.15), (0.85, 1.0))
    paper = paper + (0.02 * draw.clouds(12))[..., None]
    first, second = draw.distance(wobble=0.6), draw.distance(wobble=1.0)
    pencil = draw.each(0.15, 0.3)[..., None]
    hatching = 0.35 + 0.2 * draw.stripes(2.7)
    image = over(paper, pencil, hatching * inside(first + 1))
    image = over(image, pencil, 0.95 * inside(np.abs(first) - 0.3))
    return over(image, pencil, 0.6 * inside(np.abs(second) - 0.2))


_STYLES: dict[str, Callable[[Drawings], Floats]] = {
    "paint": _paint,
    "cartoon": _cartoon,
    "photo": _photo,
    "sketch": _sketch,
}
STYLES = tuple(_STYLES)


def read(root: Path | None = None) -> Contents:
    """Return the classes and the domains, one per style, with balanced classes.

    Examples:
        >>> classes, domains = read()
        >>> [domain.name for domain in domains]
        ['paint', 'cartoon', 'photo', 'sketch']
        >>> domains[0].images[0].shape
        (32, 32, 3)
    """
    return CLASSES, tuple(_draw(style) for style in STYLES)


@cache
def _draw(style: str) -> Domain:
    rng = RandomState(STYLES.index(style))
    labels = rng.permutation(np.arange(PER_STYLE, dtype=np.int64) % len(CLASSES))
    image = draw(style, labels, rng)
    return Domain(style, Arrays(np.rint(255 * np.clip(image, 0, 1)).astype(np.uint8)), labels)


def draw(style: str, labels: Indices, rng: RandomState) -> Floats:
    """Draw shapes with these labels: N x height x width x 3, mostly in [0, 1]."""
    return _STYLES[style](Drawings(labels, rng))


DOODLES = DatasetSpec(
    name="Doodles",
    domains=STYLES,
    labels=STYLES,
    n_classes=len(CLASSES),
    citation="drawn by steppe",
    read=read,
    counts=(PER_STYLE,) * len(STYLES),
    steps=301,
    checkpoint_every=50,
    validate_every=10,
    image_size=SIZE,
    augment=False,
    backbone="small-cnn",
    pretrained=False,
)
