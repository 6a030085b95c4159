"""DomainBed's image transforms, with the randomness given from outside.

Training: a crop of 70 to 100 % of the area resized to the network's input, a horizontal flip,
jitter of brightness, contrast, saturation and hue by 0.3 in random order, grey by chance 0.1.
Testing: the whole image resized, aspect ratio not kept. Both end in uint8; the network normalizes.

An image's randomness is a row of `DRAWS` numbers from U[0, 1), so that the augmented image is a
function of the file and of those numbers, whoever computes it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import functional as F

from .dataset import Indices, Pixels

SCALE = (0.7, 1.0)
"""The crop's share of the area."""
RATIO = (3 / 4, 4 / 3)
"""The crop's width over height, log-uniform."""
JITTER = 0.3
GREY = 0.1
FLIP = 0.5

_TRIES = 10  # torchvision gives up drawing a crop that fits after as many
_ORDERS = tuple(itertools.permutations(range(4)))
_POSITION = 2 * _TRIES
_FACTORS = _POSITION + 2
_ORDER = _FACTORS + 4
_FLIP = _ORDER + 1
_GREY = _FLIP + 1
DRAWS = _GREY + 1

Draws = NDArray[np.float64]
_ADJUST: tuple[Callable[..., Image.Image], ...] = (
    F.adjust_brightness,
    F.adjust_contrast,
    F.adjust_saturation,
    F.adjust_hue,
)


def augment(pixels: Pixels, draws: Draws, size: int) -> Pixels:
    """The training transform of an RGB image to `size` x `size`.

    Examples:
        >>> image = np.zeros((40, 30, 3), dtype=np.uint8)
        >>> augment(image, np.random.default_rng(0).random(DRAWS), 24).shape
        (24, 24, 3)
    """
    sides = np.array(pixels.shape[:2])
    top, left, height, width = crop_boxes(sides[:1], sides[1:], draws[None])[0].tolist()
    image = Image.fromarray(np.ascontiguousarray(pixels[top : top + height, left : left + width]))
    image = image.resize((size, size), Image.Resampling.BILINEAR)
    if draws[_FLIP] < FLIP:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    factors = jitter_factors(draws)
    for which in _ORDERS[int(draws[_ORDER] * len(_ORDERS))]:
        image = _ADJUST[which](image, factors[which])
    if draws[_GREY] < GREY:
        image = F.rgb_to_grayscale(image, num_output_channels=3)
    return np.asarray(image)


def crop_boxes(heights: Indices, widths: Indices, draws: Draws) -> Indices:
    """N rows of top, left, height and width, as torchvision's RandomResizedCrop draws them.

    On the host, because devices differ in the last bit of an exponential.

    Examples:
        >>> crop_boxes(np.array([40]), np.array([40]), np.full((1, DRAWS), 0.5))
        array([[ 2,  2, 37, 37]])
    """
    height, width = heights[:, None], widths[:, None]
    low, high = (math.log(r) for r in RATIO)
    area = height * width * (SCALE[0] + (SCALE[1] - SCALE[0]) * draws[:, 0 : 2 * _TRIES : 2])
    exponents = low + (high - low) * draws[:, 1 : 2 * _TRIES : 2]
    # Not numpy's exponential, for the same reason.
    ratio = np.array([math.exp(x) for x in exponents.ravel().tolist()]).reshape(exponents.shape)
    w, h = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    each, first = np.arange(len(draws)), fits.argmax(axis=1)
    w, h = w[each, first].astype(np.int64), h[each, first].astype(np.int64)
    top = (draws[:, _POSITION] * (heights - h + 1)).astype(np.int64)
    left = (draws[:, _POSITION + 1] * (widths - w + 1)).astype(np.int64)
    # None fits: the largest centred crop whose ratio is allowed.
    aspect = widths / heights
    tall = np.where(aspect < RATIO[0], np.rint(widths / RATIO[0]), heights).astype(np.int64)
    wide = np.where(aspect > RATIO[1], np.rint(heights * RATIO[1]), widths).astype(np.int64)
    centred = np.stack([(heights - tall) // 2, (widths - wide) // 2, tall, wide], axis=1)
    return np.where(fits.any(axis=1)[:, None], np.stack([top, left, h, w], axis=1), centred)


def jitter_factors(draws: Draws) -> tuple[float, float, float, float]:
    """Factors of brightness, contrast and saturation, and the shift of hue."""
    b, c, s, h = ((2 * draws[_FACTORS + i] - 1) * JITTER for i in range(4))
    return 1 + b, 1 + c, 1 + s, h


def resize(pixels: Pixels, size: int) -> Pixels:
    """The test transform: the whole image at the network's input size.

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
