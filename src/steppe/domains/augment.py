"""DomainBed's image transforms as pure functions of the image and of given random numbers.

Training: a crop of 70% to 100% of the area, resized to the network's input; a horizontal flip;
jitter of brightness, contrast, saturation, and hue by 0.3 in random order; grayscale with
probability 0.1. Testing: resize the whole image without keeping its aspect ratio. Both return
uint8; the network normalizes.

The random numbers of an image are a row of `DRAWS` samples from U[0, 1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from .dataset import Indices, Pixels

SCALE = (0.7, 1.0)
"""The crop's fraction of the area."""
RATIO = (3 / 4, 4 / 3)
"""The crop's width over height, log-uniform."""
JITTER = 0.3
GREY = 0.1
FLIP = 0.5

_TRIES = 10  # after which torchvision stops looking for a crop that fits
_ORDERS = tuple(itertools.permutations(range(4)))
_POSITION = 2 * _TRIES
_FACTORS = _POSITION + 2
_ORDER = _FACTORS + 4
_FLIP = _ORDER + 1
_GREY = _FLIP + 1
DRAWS = _GREY + 1

Draws = NDArray[np.float64]


def _turned(image: Image.Image, turn: float) -> Image.Image:
    hue, *others = image.convert("HSV").split()
    # As torchvision does it (whose import takes seconds): toward zero, then around the circle.
    shift = int(turn * 255)
    hue = hue.point(lambda value: (value + shift) % 256)
    return Image.merge("HSV", (hue, *others)).convert("RGB")


_ADJUST: tuple[Callable[[Image.Image, float], Image.Image], ...] = (
    lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    _turned,
)


def augment(pixels: Pixels, draws: Draws, size: int) -> Pixels:
    """Apply the training transform to an RGB image; the result is `size` x `size`.

    Examples:
        >>> image = np.zeros((40, 30, 3), dtype=np.uint8)
        >>> augment(image, np.random.default_rng(0).random(DRAWS), 24).shape
        (24, 24, 3)
    """
    top, left, height, width = crop_box(pixels.shape[0], pixels.shape[1], draws.tolist())
    image = Image.fromarray(np.ascontiguousarray(pixels[top : top + height, left : left + width]))
    image = image.resize((size, size), Image.Resampling.BILINEAR)
    if draws[_FLIP] < FLIP:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    factors = jitter_factors(draws)
    for which in _ORDERS[int(draws[_ORDER] * len(_ORDERS))]:
        image = _ADJUST[which](image, factors[which])
    if draws[_GREY] < GREY:
        image = image.convert("L").convert("RGB")
    return np.asarray(image)


def crop_box(height: int, width: int, draws: Sequence[float]) -> tuple[int, int, int, int]:
    """Return top, left, height and width of the crop, as in torchvision's RandomResizedCrop."""
    low, high = (math.log(r) for r in RATIO)
    for i in range(_TRIES):
        area = height * width * (SCALE[0] + (SCALE[1] - SCALE[0]) * draws[2 * i])
        ratio = math.exp(low + (high - low) * draws[2 * i + 1])
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(draws[_POSITION] * (height - h + 1))
            left = int(draws[_POSITION + 1] * (width - w + 1))
            return top, left, h, w
    # None fits: take the largest centered crop with an allowed aspect ratio.
    w, h = width, height
    if width / height < RATIO[0]:
        h = round(width / RATIO[0])
    elif width / height > RATIO[1]:
        w = round(height * RATIO[1])
    return (height - h) // 2, (width - w) // 2, h, w


def crop_boxes(heights: Indices, widths: Indices, draws: Draws) -> Indices:
    """Return the `crop_box` of each of N images as a row, all images at once.

    Runs on the host, with the C library's `exp`: those of devices and of NumPy round differently.

    Examples:
        >>> crop_boxes(np.array([40]), np.array([40]), np.full((1, DRAWS), 0.5))
        array([[ 2,  2, 37, 37]])
    """
    # Where no try fits: the largest centered crop with an allowed aspect ratio.
    h = np.where(widths / heights < RATIO[0], np.rint(widths / RATIO[0]), heights).astype(np.int64)
    w = np.where(widths / heights > RATIO[1], np.rint(heights * RATIO[1]), widths).astype(np.int64)
    boxes = np.stack([(heights - h) // 2, (widths - w) // 2, h, w], axis=1)
    low, high = (math.log(r) for r in RATIO)
    rest = np.arange(len(draws))
    for i in range(_TRIES):
        height, width, drawn = heights[rest], widths[rest], draws[rest]
        area = height * width * (SCALE[0] + (SCALE[1] - SCALE[0]) * drawn[:, 2 * i])
        exponents = low + (high - low) * drawn[:, 2 * i + 1]
        ratio = np.array([math.exp(x) for x in exponents.tolist()])
        w, h = (np.rint(np.sqrt(a)).astype(np.int64) for a in (area * ratio, area / ratio))
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        top = (drawn[:, _POSITION] * (height - h + 1)).astype(np.int64)
        left = (drawn[:, _POSITION + 1] * (width - w + 1)).astype(np.int64)
        boxes[rest[fits]] = np.stack([top, left, h, w], axis=1)[fits]
        rest = rest[~fits]
    return boxes


def jitter_factors(draws: Draws) -> tuple[float, float, float, float]:
    """Return the factors of brightness, contrast and saturation, and the shift of hue."""
    b, c, s, h = ((2 * draws[_FACTORS + i] - 1) * JITTER for i in range(4))
    return 1 + b, 1 + c, 1 + s, h


def resize(pixels: Pixels, size: int) -> Pixels:
    """Apply the test transform: resize the whole image to the network's input size.

    Examples:
        >>> resize(np.zeros((40, 30, 3), dtype=np.uint8), 24).shape
        (24, 24, 3)
    """
    if pixels.shape[:2] == (size, size):
        return pixels
    to = (size, size)
    if pixels.shape[2] == 3:
        return np.asarray(Image.fromarray(pixels).resize(to, Image.Resampling.BILINEAR))
    channels = (Image.fromarray(np.ascontiguousarray(c)) for c in np.moveaxis(pixels, 2, 0))
    return np.stack([np.asarray(c.resize(to, Image.Resampling.BILINEAR)) for c in channels], axis=2)
