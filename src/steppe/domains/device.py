"""The transforms of `augment` for many images at once, on any device, with Pillow's bits.

A training run does not depend on where its images are transformed, so every value here equals the
one that Pillow computes. Compilers and GPUs round floating point in their own ways (a product and
a sum fused, a division by way of the reciprocal), and hence Pillow's arithmetic is restated in
integers wherever it can be: the weights of its resampling are ratios of small integers, and so are
saturation, hue and the colours that they stand for. What is left of floating point is single
products and sums that nothing may fuse.

Shapes depend on the number of images, on `Reach` and on the size alone, and no value is looked at
from Python: the functions compile and can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from steppe.errors import UserError

from .augment import _FACTORS, _FLIP, _GREY, _ORDER, _ORDERS, DRAWS, FLIP, GREY, JITTER, RATIO
from .dataset import Images, Indices

_BITS = 22
"""Pillow's weights are integers that sum up to about $2^{22}$, so that sums fit 32 bits."""
_SEXTANT = 85
"""Twice the hue, from 0 to 510, passes so much from red to yellow, and so on round the circle."""
_CONTRAST, _SATURATION, _HUE = 1, 2, 3  # as orders number them; 0 is brightness
_Lengths = TypeVar("_Lengths", Tensor, NDArray[Any])

# The operation in each place of every order, two bits each: a table that needs no memory.
_PLACES = tuple(sum(order[place] << 2 * i for i, order in enumerate(_ORDERS)) for place in range(4))


class Stack(NamedTuple):
    """Images of any sizes, one after another in one flat tensor.

    Attributes:
        pixels: uint8, flat; each image height x width x channels.
        offsets: where each image begins in `pixels`, int64, like the next two.
        heights: of each image.
        widths: of each image.
        channels: of all images.
    """

    pixels: Tensor
    offsets: Tensor
    heights: Tensor
    widths: Tensor
    channels: int

    def to(self, device: torch.device | str) -> Stack:
        """The same images on another device."""
        pixels, offsets, heights, widths = (tensor.to(device) for tensor in self[:4])
        return Stack(pixels, offsets, heights, widths, self.channels)


@dataclass(frozen=True)
class Reach:
    """What bounds the work of a transform: static numbers, so that compiled code has fixed shapes.

    A reach must cover every image that comes, or the result is wrong: take the one over all images
    of a dataset.

    Attributes:
        rows: the most lines that the first pass of a resampling runs along: the height of the
            tallest crop or image.
        taps: the most source pixels that one output pixel is made of, in either direction.
    """

    rows: int
    taps: int


def stacked(images: Images, chosen: Indices) -> Stack:
    """Reads images into the memory of the CPU, in the order chosen.

    Examples:
        >>> from steppe.domains import Arrays
        >>> stack = stacked(Arrays(np.zeros((5, 4, 6, 3), np.uint8)), np.array([3, 1]))
        >>> stack.pixels.shape, stack.offsets
        (torch.Size([144]), tensor([ 0, 72]))
    """
    if not len(chosen):
        raise UserError("no images are chosen: a stack holds one at least")
    read = [images[int(i)] for i in chosen]
    shapes = np.array([image.shape for image in read], dtype=np.int64)
    differing = np.flatnonzero(shapes[:, 2] != shapes[0, 2])
    if len(differing):
        names = [images.name(int(chosen[i])) for i in (0, differing[0])]
        raise UserError(
            f"image {names[0]} has {shapes[0, 2]} channels, {names[1]} {shapes[differing[0], 2]}: "
            "the images of a stack have as many each"
        )
    ends = shapes.prod(axis=1).cumsum()
    pixels = np.empty(ends[-1], dtype=np.uint8)
    for end, size in zip(ends[::-1], shapes[::-1].prod(axis=1), strict=True):
        pixels[end - size : end] = read.pop().reshape(-1)  # popped: not all of them held twice
    return Stack(
        torch.from_numpy(pixels),
        torch.from_numpy(ends - shapes.prod(axis=1)),
        torch.from_numpy(shapes[:, 0].copy()),
        torch.from_numpy(shapes[:, 1].copy()),
        int(shapes[0, 2]),
    )


def crop_reach(heights: NDArray[np.int64], widths: NDArray[np.int64], size: int) -> Reach:
    """The reach of `augment` over images of these heights and widths.

    Examples:
        >>> crop_reach(np.array([227]), np.array([227]), 224)
        Reach(rows=227, taps=3)
    """
    # No crop is larger than the image, or further from a square than `RATIO` says; one pixel more,
    # because both of its sides are rounded.
    tall = np.minimum(heights, np.ceil(widths / RATIO[0]).astype(np.int64) + 1)
    wide = np.minimum(widths, np.ceil(heights * RATIO[1]).astype(np.int64) + 1)
    return Reach(rows=int(tall.max()), taps=_most_taps(max(tall.max(), wide.max()), size))


def whole_reach(heights: NDArray[np.int64], widths: NDArray[np.int64], size: int) -> Reach:
    """The reach of `resize` over images of these heights and widths.

    Examples:
        >>> whole_reach(np.array([100, 300]), np.array([672, 350]), 224)
        Reach(rows=300, taps=6)
    """
    lines = np.where(_goes_down_first(heights, widths, size), widths, heights)
    return Reach(rows=int(lines.max()), taps=_most_taps(max(heights.max(), widths.max()), size))


def _most_taps(length: int, size: int) -> int:
    # The triangle is two source pixels wide, or two output pixels where those are larger; it is
    # zero at its ends, which may fall on the centres of pixels.
    return -(-2 * max(int(length), size) // size)


def augment(
    stack: Stack, chosen: Tensor, draws: Tensor, boxes: Tensor, size: int, reach: Reach
) -> Tensor:
    """The training transform of RGB images: `augment.augment` of each, bit for bit.

    Args:
        stack: the images.
        chosen: which of them, N, int64.
        draws: a row of `DRAWS` numbers from U[0, 1) for each, N x `DRAWS`, float64.
        boxes: the `augment.crop_boxes` of the same draws, N x 4, int64.
        size: height and width of the results.
        reach: the `crop_reach` of the images.

    Returns:
        N x 3 x size x size, uint8, channels-last in memory.

    Examples:
        >>> from steppe.domains import Arrays
        >>> from steppe.domains.augment import crop_boxes
        >>> heights, widths = np.full(5, 40), np.full(5, 30)
        >>> stack = stacked(Arrays(np.zeros((5, 40, 30, 3), np.uint8)), np.arange(5))
        >>> draws = np.random.default_rng(0).random((5, DRAWS))
        >>> boxes = torch.from_numpy(crop_boxes(heights, widths, draws))
        >>> reach = crop_reach(heights, widths, 24)
        >>> augment(stack, torch.arange(5), torch.from_numpy(draws), boxes, 24, reach).shape
        torch.Size([5, 3, 24, 24])
    """
    if stack.channels != 3:
        raise UserError(f"images of {stack.channels} channels cannot be jittered: RGB has 3")
    if draws.dtype != torch.float64 or draws.shape[1] != DRAWS:
        raise UserError(
            f"draws of {draws.dtype} and {draws.shape[1]} columns: augmentation takes {DRAWS} "
            "numbers of torch.float64 for each image"
        )
    mirrored = draws[:, _FLIP] < FLIP
    planes = list(_resampled(stack, chosen, boxes, mirrored, size, reach).unbind(3))
    # Kept within its bounds, where it is already, so that no compiler fuses this product with the
    # sum below: Pillow's factors are rounded twice.
    spread = ((2 * draws[:, _FACTORS : _FACTORS + 4] - 1) * JITTER).clamp(-JITTER, JITTER)
    factors = (1 + spread).float()
    turn = (spread[:, _HUE] * 255).int()[:, None, None]
    order = (draws[:, _ORDER] * len(_ORDERS)).long()[:, None]
    for places in _PLACES:
        which = (places >> 2 * order) & 3
        factor = factors.gather(1, which)[:, :, None]
        planes = _jittered(planes, which[:, :, None], factor, turn)
    grey, one = (draws[:, _GREY] < GREY)[:, None, None], _grey(planes).to(torch.uint8)
    return torch.stack([torch.where(grey, one, plane) for plane in planes], 3).permute(0, 3, 1, 2)


def resize(stack: Stack, chosen: Tensor, size: int, reach: Reach) -> Tensor:
    """The test transform: `augment.resize` of each image, bit for bit.

    Args:
        stack: the images, of any number of channels.
        chosen: which of them, N, int64.
        size: height and width of the results.
        reach: the `whole_reach` of the images.

    Returns:
        N x channels x size x size, uint8; channels-last in memory where there are several.

    Examples:
        >>> from steppe.domains import Arrays
        >>> stack = stacked(Arrays(np.zeros((5, 40, 30, 1), np.uint8)), np.arange(5))
        >>> reach = whole_reach(np.array([40]), np.array([30]), 24)
        >>> resize(stack, torch.tensor([4, 2]), 24, reach).shape
        torch.Size([2, 1, 24, 24])
    """
    heights, widths = stack.heights[chosen], stack.widths[chosen]
    boxes = torch.stack([torch.zeros_like(heights), torch.zeros_like(widths), heights, widths], 1)
    images = _resampled(stack, chosen, boxes, torch.zeros_like(heights).bool(), size, reach)
    if stack.channels == 1:
        return images.view(-1, 1, size, size)
    return images.permute(0, 3, 1, 2)


def _resampled(
    stack: Stack, chosen: Tensor, boxes: Tensor, mirrored: Tensor, size: int, reach: Reach
) -> Tensor:
    """Boxes of the images at `size`, N x size x size x channels: two passes, each rounded."""
    top, left, height, width = boxes.unbind(1)
    device, channels = stack.pixels.device, stack.channels
    across, down = torch.full_like(width, channels), stack.widths[chosen] * channels
    start = stack.offsets[chosen] + top * down + left * across
    # The first pass runs along lines: rows, or columns where Pillow goes down first.
    swapped = _goes_down_first(height, width, size)
    step, line_step = torch.where(swapped, down, across), torch.where(swapped, across, down)
    length, lines = torch.where(swapped, height, width), torch.where(swapped, width, height)
    # Lines beyond those of a box repeat its last one, and no output pixel is made of them.
    line = torch.minimum(torch.arange(reach.rows, device=device), lines[:, None] - 1)
    place = torch.arange(size, device=device)
    mirror, plain = size - 1 - place, place
    first = torch.where((mirrored & ~swapped)[:, None], mirror, plain)
    second = torch.where((mirrored & swapped)[:, None], mirror, plain)

    channel = torch.arange(channels, device=device)
    starts = (start[:, None] + line * line_step[:, None])[:, :, None, None] + channel
    total = zero = torch.zeros((), dtype=torch.int32, device=device)
    pixel, weight = _weighed(length, first, size, reach.taps)
    inside = pixel * step[:, None, None]
    for tap in range(reach.taps):
        found = stack.pixels[starts + inside[:, None, :, None, tap]]
        total = total + found * weight[:, None, :, None, tap]
    once, total = _rounded(total), zero

    # Out of lines of either kind, rows again.
    pixel, weight = _weighed(lines, second, size, reach.taps)
    each, swap = torch.arange(len(chosen), device=device)[:, None, None], swapped[:, None, None]
    along = torch.where(swap, place[:, None], place)
    for tap in range(reach.taps):
        one, share = pixel[:, :, tap], weight[:, :, tap]
        found = once[each, torch.where(swap, one[:, None], one[:, :, None]), along]
        total = total + found * torch.where(swap, share[:, None], share[:, :, None])[..., None]
    return _rounded(total)


def _rounded(total: Tensor) -> Tensor:
    # Weights sum up to one but for their roundings, far less than the half of 1/255 that it would
    # take to leave the range of a byte: Pillow's clipping has nothing to do.
    return ((total + (1 << (_BITS - 1))) >> _BITS).to(torch.uint8)


def _goes_down_first(height: _Lengths, width: _Lengths, size: int) -> _Lengths:
    """Whether Pillow resamples columns before rows: where that leaves far fewer pixels to do."""
    first: _Lengths = (height > size) & (height - size > 2 * (width - size)) & _DOWN_FIRST
    return first


def _weighed(length: Tensor, places: Tensor, size: int, taps: int) -> tuple[Tensor, Tensor]:
    r"""Source pixels and their weights, N x size x taps, for every place in the output.

    Place $p$ of $s$ sees the source, $n$ pixels long, through a triangle around
    $c = (p + 1/2)\, n / s$ that is zero from the distance $m / s$ on, $m = \max(n, s)$. Pixel $j$
    has the share $a_j / \sum_i a_i$, where $a_j = \max(0, 2 m - |(2 j + 1) s - (2 p + 1) n|)$ is an
    integer. Pillow has the shares in double precision and rounds them to multiples of $2^{-22}$.
    Half a multiple is further from any of them than double precision errs while $n s < 2^{27}$,
    so that rounding the exact ratios gives the same.
    """
    length, place = length.int()[:, None, None], places.int()[:, :, None]  # cheaper than 64 bits
    widest = length.clamp(min=size)
    centre = (2 * place + 1) * length
    start = _over((centre - 2 * widest + size).clamp(min=0), 2 * size)
    pixel = start + torch.arange(taps, dtype=torch.int32, device=places.device)
    share = (2 * widest - ((2 * pixel + 1) * size - centre).abs()).clamp(min=0)
    share = torch.where(pixel < length, share, 0)
    whole = share.sum(2, keepdim=True)  # int64
    weight = _over((share.long() << (_BITS + 1)) + whole, 2 * whole).int()
    return torch.minimum(pixel, length - 1), weight


def _jittered(planes: list[Tensor], which: Tensor, factor: Tensor, turn: Tensor) -> list[Tensor]:
    """One operation on each image, and on each its own: red, green and blue, N x size x size."""
    grey = _grey(planes)
    count = grey.shape[1] * grey.shape[2]
    mean = _over(2 * grey.sum((1, 2), keepdim=True) + count, 2 * count).int()
    # All but hue move the image away from, or towards, a duller one.
    dull = torch.where(which == _CONTRAST, mean, torch.where(which == _SATURATION, grey, 0))
    return [
        torch.where(which == _HUE, turned, _blend(dull, plane, factor))
        for plane, turned in zip(planes, _turned(planes, turn), strict=True)
    ]


def _blend(dull: Tensor, plane: Tensor, factor: Tensor) -> Tensor:
    """Pillow's `Image.blend`, which has single precision and cuts the fraction off."""
    # The bounds are out of reach; they keep product and sum from being fused.
    step = (factor * (plane - dull).float()).clamp(-512, 512)
    return (dull.float() + step).clamp(0, 255).to(torch.uint8)


def _grey(planes: list[Tensor]) -> Tensor:
    """Pillow's mode L, from 0 to 255, in int32."""
    red, green, blue = (plane.int() for plane in planes)
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def _turned(planes: list[Tensor], turn: Tensor) -> list[Tensor]:
    """By way of Pillow's mode HSV, with `turn` added to a hue that wraps around at 256."""
    hue, saturation, value = _hsv(planes)
    twice = 2 * ((hue + turn) & 255)
    return [_primary(twice - 2 * _SEXTANT * i, saturation, value) for i in range(3)]


def _hsv(planes: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Pillow's mode HSV, each from 0 to 255, in int32."""
    red, green, blue = (plane.int() for plane in planes)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    saturation = _over(255 * chroma, value.clamp(min=1))
    # The place on the circle in sixths, times the chroma.
    past_green = torch.where(green == value, 2 * chroma + blue - red, 4 * chroma + red - green)
    sixths = torch.where(red == value, green - blue, past_green)
    sixths = 255 * torch.where(sixths < 0, sixths + 6 * chroma, sixths)
    circle = 6 * chroma.clamp(min=1)
    hue = _over(sixths, circle)
    return hue - torch.where(hue * circle == sixths, _bit(_LOST, hue), 0), saturation, value


def _primary(twice: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """How much of a primary colour there is, where its hue is away by half of `twice`."""
    away = twice.abs()
    away = torch.minimum(away, 6 * _SEXTANT - away)  # the shorter way round
    missing = saturation * (away - _SEXTANT).clamp(0, _SEXTANT)
    whole = 255 * _SEXTANT
    return _over(2 * value * (whole - missing) + whole, 2 * whole).to(torch.uint8)


def _over(a: Tensor, b: Tensor | int) -> Tensor:
    """The quotient rounded down; of what is not negative, where cutting it off is the same."""
    return torch.div(a, b, rounding_mode="trunc")


def _bit(words: tuple[int, ...], index: Tensor) -> Tensor:
    """The bit of that number in words of 64 bits, as int32."""
    word: Tensor | int = words[0]
    for i in range(1, len(words)):
        word = torch.where(index >= 64 * i, words[i], word)
    return ((word >> (index & 63).long()) & 1).int()


def _lost_hues() -> tuple[int, ...]:
    """The hues that Pillow turns into a colour and does not find again, a bit for each.

    From a colour whose hue is a whole number exactly, Pillow's rounding in single precision may
    lead to the number before it. Which numbers those are depends on nothing else.
    """
    hues = np.arange(255, dtype=np.uint8)
    # These colours are exact: chroma and value are `_SEXTANT`.
    pure = np.stack([hues, np.full_like(hues, 255), np.full_like(hues, _SEXTANT)], axis=1)
    image = Image.frombytes("HSV", (len(hues), 1), pure.tobytes())
    found = np.asarray(image.convert("RGB").convert("HSV"))[0, :, 0]
    return tuple(np.packbits(found != hues, bitorder="little").view("<i8").tolist())


_LOST = _lost_hues()


def _pillow_goes_down_first() -> bool:
    """Whether the Pillow at hand chooses which pass comes first; versions before 13 do not."""
    tall = Image.fromarray((np.arange(1200).reshape(60, 20) ** 2 % 251).astype(np.uint8))
    both = tall.resize((12, 12), Image.Resampling.BILINEAR)
    down = tall.resize((20, 12), Image.Resampling.BILINEAR)
    return both.tobytes() == down.resize((12, 12), Image.Resampling.BILINEAR).tobytes()


_DOWN_FIRST = _pillow_goes_down_first()
