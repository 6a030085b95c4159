"""The transforms of `augment` for batches on any device, bit-identical to Pillow.

A training run must not depend on where its images are transformed, so every value here equals
Pillow's. Compilers and GPUs round floating point differently (fused multiply-add, division by the
reciprocal), so Pillow's arithmetic is restated in integers where possible: its resampling weights
are ratios of small integers, and so are saturation, hue, and the colors they encode. The remaining
floating-point operations are single products and sums that nothing may fuse.

Shapes depend only on the number of images, on `Reach`, and on the size, and Python never reads a
value, so the functions compile and can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from steppe.errors import UserError

from .augment import _FACTORS, _FLIP, _GREY, _ORDER, _ORDERS, DRAWS, FLIP, GREY, JITTER, RATIO
from .dataset import Indices, Pixels

_BITS = 22
"""Pillow's weights are integers that sum to about $2^{22}$, so that sums fit into 32 bits."""
_AT_ONCE = 100_000_000
"""The maximum number of values that matrix products read and write at once."""
_SEXTANT = 85
"""A sixth of the hue circle (red to yellow, and so on), in units of half a hue (0 to 510)."""
_CONTRAST, _SATURATION, _HUE = 1, 2, 3  # their numbers in `_ORDERS`; 0 is brightness
_Lengths = TypeVar("_Lengths", Tensor, NDArray[Any])

# The operation in each place of every order, two bits each: a lookup table without a tensor.
_PLACES = tuple(sum(order[place] << 2 * i for i, order in enumerate(_ORDERS)) for place in range(4))


class Stack(NamedTuple):
    """Images of any size, concatenated in one flat tensor.

    Attributes:
        pixels: uint8, flat; each image is height x width x channels.
        offsets: where each image begins in `pixels`, int64.
        heights: the height of each image, int64.
        widths: the width of each image, int64.
        channels: the number of channels of every image.
    """

    pixels: Tensor
    offsets: Tensor
    heights: Tensor
    widths: Tensor
    channels: int


@dataclass(frozen=True)
class Reach:
    """Static bounds on the work of a transform, which give compiled code fixed shapes.

    A reach must cover every image, or results are wrong: compute it over the whole dataset.

    Attributes:
        rows: the maximum number of lines in the first pass of a resampling: the height of the
            tallest crop or image.
        columns: the maximum number of pixels in one of these lines.
        taps: the maximum number of source pixels per output pixel, in either direction.
    """

    rows: int
    columns: int
    taps: int


def stacked(images: Sequence[Pixels]) -> Stack:
    """Concatenate images with the same number of channels, in host memory.

    Examples:
        >>> stack = stacked(list(np.zeros((2, 4, 6, 3), np.uint8)))
        >>> stack.pixels.shape, stack.offsets
        (torch.Size([144]), tensor([ 0, 72]))
    """
    shapes = np.array([image.shape for image in images], dtype=np.int64)
    (channels,) = {*shapes[:, 2].tolist()}  # fails if images differ
    sizes = shapes.prod(axis=1)
    return Stack(
        torch.from_numpy(np.concatenate([image.reshape(-1) for image in images])),
        torch.from_numpy(np.cumsum(sizes) - sizes),
        torch.from_numpy(shapes[:, 0].copy()),
        torch.from_numpy(shapes[:, 1].copy()),
        channels,
    )


class Filters(NamedTuple):
    """What every output pixel reads in the two passes of a resampling, N x size x taps.

    Attributes:
        pixel: source pixels of a line.
        weight: their weights.
        line: lines, in the second pass.
        line_weight: their weights.
    """

    pixel: Tensor
    weight: Tensor
    line: Tensor
    line_weight: Tensor


def crop_reach(heights: Indices, widths: Indices, size: int) -> Reach:
    """Return the reach of `augment` over images of these heights and widths.

    Examples:
        >>> crop_reach(np.array([227]), np.array([227]), 224)
        Reach(rows=227, columns=227, taps=3)
    """
    # A crop is no larger than the image, and its aspect ratio is within `RATIO`. The extra pixel
    # is for the rounding of both sides.
    tall = np.minimum(heights, np.ceil(widths / RATIO[0]).astype(np.int64) + 1)
    wide = np.minimum(widths, np.ceil(heights * RATIO[1]).astype(np.int64) + 1)
    columns = int(max(tall.max(), wide.max()))  # lines are columns if those are resampled first
    return Reach(rows=int(tall.max()), columns=columns, taps=_most_taps(columns, size))


def whole_reach(heights: Indices, widths: Indices, size: int) -> Reach:
    """Return the reach of `resize` over images of these heights and widths.

    Examples:
        >>> whole_reach(np.array([100, 300]), np.array([672, 350]), 224)
        Reach(rows=300, columns=672, taps=6)
    """
    down_first = _goes_down_first(heights, widths, size)
    return Reach(
        rows=int(np.where(down_first, widths, heights).max()),
        columns=int(np.where(down_first, heights, widths).max()),
        taps=_most_taps(max(heights.max(), widths.max()), size),
    )


def _most_taps(length: int, size: int) -> int:
    # The triangle filter is two source pixels wide, or two output pixels if those are larger. It
    # is zero at its ends, which may fall on the centers of pixels.
    return -(-2 * max(int(length), size) // size)


def filters(boxes: Tensor, draws: Tensor | None, size: int, reach: Reach) -> Filters:
    """Return the filters of boxes, which may be mirrored; `augment` and `resize` take them.

    Compiled code that computed the weights inside these would repeat a division of 64-bit integers
    for every value that it reads.
    """
    mirrored = _mirrored(boxes, draws)
    length, lines, first, second, _ = _passes(boxes, mirrored, size)
    taps = reach.taps
    return Filters(*_weighed(length, first, size, taps), *_weighed(lines, second, size, taps))


def whole_boxes(stack: Stack, chosen: Tensor) -> Tensor:
    """Return boxes around whole images, N x 4: top, left, height and width."""
    heights, widths = stack.heights[chosen], stack.widths[chosen]
    return torch.stack([torch.zeros_like(heights), torch.zeros_like(widths), heights, widths], 1)


def _mirrored(boxes: Tensor, draws: Tensor | None) -> Tensor:
    none = torch.zeros(len(boxes), dtype=torch.bool, device=boxes.device)
    return none if draws is None else draws[:, _FLIP] < FLIP


def augment(
    stack: Stack,
    chosen: Tensor,
    draws: Tensor,
    boxes: Tensor,
    size: int,
    reach: Reach,
    filters: Filters | None = None,
) -> Tensor:
    """Apply `augment.augment` to each RGB image, bit for bit.

    Args:
        stack: the images.
        chosen: the indices of N images, int64.
        draws: their random numbers from U[0, 1), N x `DRAWS`, float64.
        boxes: the `augment.crop_boxes` of the same draws, N x 4, int64.
        size: height and width of the results.
        reach: the `crop_reach` of the images.
        filters: the `filters` of the boxes and draws, which make compiled code and CPUs faster, or
            None, which makes uncompiled code on a GPU faster.

    Returns:
        N x 3 x size x size, uint8, channels-last in memory.

    Examples:
        >>> from steppe.domains.augment import crop_boxes
        >>> heights, widths = np.full(5, 40), np.full(5, 30)
        >>> stack = stacked(list(np.zeros((5, 40, 30, 3), np.uint8)))
        >>> draws = np.random.default_rng(0).random((5, DRAWS))
        >>> boxes = torch.from_numpy(crop_boxes(heights, widths, draws))
        >>> reach = crop_reach(heights, widths, 24)
        >>> augment(stack, torch.arange(5), torch.from_numpy(draws), boxes, 24, reach).shape
        torch.Size([5, 3, 24, 24])
    """
    if stack.channels != 3:
        raise UserError(f"augmentation needs RGB images, got images with {stack.channels} channels")
    if draws.dtype != torch.float64 or draws.shape[1] != DRAWS:
        raise UserError(
            f"draws must be torch.float64 with {DRAWS} columns, got {draws.dtype} with "
            f"{draws.shape[1]}"
        )
    mirrored = _mirrored(boxes, draws)
    images = _resampled(stack, chosen, boxes, mirrored, size, reach, filters)
    planes = list(images.unbind(3))
    # The clamp changes no value. It keeps compilers from fusing this product with the sum below:
    # Pillow's factors are rounded twice.
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


def resize(
    stack: Stack, chosen: Tensor, size: int, reach: Reach, filters: Filters | None = None
) -> Tensor:
    """Apply `augment.resize` to each image, bit for bit.

    Args:
        stack: the images, with any number of channels.
        chosen: the indices of N images, int64.
        size: height and width of the results.
        reach: the `whole_reach` of the images.
        filters: the `filters` of their `whole_boxes`, as in `augment`.

    Returns:
        N x channels x size x size, uint8; channels-last in memory unless there is one channel.

    Examples:
        >>> stack = stacked(list(np.zeros((5, 40, 30, 1), np.uint8)))
        >>> reach = whole_reach(np.array([40]), np.array([30]), 24)
        >>> resize(stack, torch.tensor([4, 2]), 24, reach).shape
        torch.Size([2, 1, 24, 24])
    """
    boxes = whole_boxes(stack, chosen)
    images = _resampled(stack, chosen, boxes, _mirrored(boxes, None), size, reach, filters)
    if stack.channels == 1:
        return images.view(-1, 1, size, size)
    return images.permute(0, 3, 1, 2)


class _Passes(NamedTuple):
    """The two passes of a resampling: along lines, then across them.

    Lines are rows, or columns (`swapped`) if Pillow resamples columns first.
    """

    length: Tensor
    """Pixels of a line, N."""
    lines: Tensor
    """How many there are, N."""
    first: Tensor
    """Where every output pixel of the first pass lies before mirroring, N x size."""
    second: Tensor
    """The same for the second pass."""
    swapped: Tensor


def _passes(boxes: Tensor, mirrored: Tensor, size: int) -> _Passes:
    _, _, height, width = boxes.unbind(1)
    swapped = _goes_down_first(height, width, size)
    plain = torch.arange(size, device=boxes.device)
    mirror = size - 1 - plain
    return _Passes(
        length=torch.where(swapped, height, width),
        lines=torch.where(swapped, width, height),
        first=torch.where((mirrored & ~swapped)[:, None], mirror, plain),
        second=torch.where((mirrored & swapped)[:, None], mirror, plain),
        swapped=swapped,
    )


def _resampled(
    stack: Stack,
    chosen: Tensor,
    boxes: Tensor,
    mirrored: Tensor,
    size: int,
    reach: Reach,
    filters: Filters | None,
) -> Tensor:
    """Resample boxes of the images to N x size x size x channels, in two rounded passes."""
    top, left, _, _ = boxes.unbind(1)
    passes, channels = _passes(boxes, mirrored, size), stack.channels
    across, down = torch.full_like(left, channels), stack.widths[chosen] * channels
    start = stack.offsets[chosen] + top * down + left * across
    step = torch.where(passes.swapped, down, across)
    line_step = torch.where(passes.swapped, across, down)
    # Lines beyond a box repeat its last line, and no output pixel uses them.
    line = torch.arange(reach.rows, device=boxes.device)
    line = torch.minimum(line, passes.lines[:, None] - 1)
    starts = start[:, None] + line * line_step[:, None]
    # The channels of a pixel are neighbors, so that one index finds them all.
    pixels = stack.pixels.unfold(0, channels, 1)
    if filters is not None:
        return _gathered(pixels, starts, step, passes.swapped, filters)
    source = reach.rows * reach.columns * channels
    weights, products = reach.rows + reach.columns, max(reach.rows, size) * channels
    at_once = max(1, _AT_ONCE // (source + 3 * size * (weights + products)))
    parts = zip(*(values.split(at_once) for values in (starts, step, *passes)), strict=True)
    return torch.cat(
        [_multiplied(pixels, starts, step, _Passes(*of), reach) for starts, step, *of in parts]
    )


def _gathered(
    pixels: Tensor, starts: Tensor, step: Tensor, swapped: Tensor, filters: Filters
) -> Tensor:
    """Resample tap by tap: the least arithmetic, and one kernel per pass in compiled code."""
    number, size, taps = filters.pixel.shape
    total = zero = torch.zeros((), dtype=torch.int32, device=pixels.device)
    inside = filters.pixel * step[:, None, None]
    for tap in range(taps):
        found = pixels[starts[:, :, None] + inside[:, None, :, tap]]
        total = torch.addcmul(total, found, filters.weight[:, None, :, None, tap])
    once, total = _rounded(total), zero

    # The second pass turns lines of either kind into rows.
    place = torch.arange(size, device=pixels.device)
    each, swap = torch.arange(number, device=pixels.device)[:, None, None], swapped[:, None, None]
    along = torch.where(swap, place[:, None], place)
    for tap in range(taps):
        one, share = filters.line[:, :, tap], filters.line_weight[:, :, tap]
        found = once[each, torch.where(swap, one[:, None], one[:, :, None]), along]
        share = torch.where(swap, share[:, None], share[:, :, None])[..., None]
        total = torch.addcmul(total, found, share)
    return _rounded(total)


def _multiplied(
    pixels: Tensor, starts: Tensor, step: Tensor, passes: _Passes, reach: Reach
) -> Tensor:
    """Resample by two matrix products: the fewest kernels."""
    (number, size), rows, longest = passes.first.shape, reach.rows, reach.columns
    along = torch.arange(longest, device=pixels.device)
    inside = torch.minimum(along, passes.length[:, None] - 1) * step[:, None]
    values = pixels[starts[:, :, None] + inside[:, None]]  # N x rows x longest x channels
    channels = values.shape[3]
    weights = _weights(passes.length, along, passes.first, size)
    values = values.permute(0, 3, 1, 2).reshape(number, channels * rows, longest).mT
    once = _summed(weights, values, reach.taps).view(number, size, channels, rows)
    once = once.permute(0, 3, 1, 2).reshape(number, rows, size * channels)
    weights = _weights(passes.lines, torch.arange(rows, device=pixels.device), passes.second, size)
    twice = _summed(weights, once, reach.taps).view(number, size, size, channels)
    return torch.where(passes.swapped[:, None, None, None], twice.transpose(1, 2), twice)


def _summed(weights: Tensor, values: Tensor, taps: int) -> Tensor:
    """Multiply matrices of weights and of bytes, and round.

    Each weight is split into three bytes. Then all products and sums are integers below $2^{24}$,
    exact in single precision and TF32 in any order, if at most 256 values have a weight.

    Args:
        weights: N x size x source pixels; at most `taps` of a row are not zero.
        values: N x source pixels x columns, uint8.
        taps: as in `Reach`.
    """
    exact = torch.float32 if taps <= 256 else torch.float64
    split = torch.cat([(weights >> shift) & 255 for shift in (0, 8, 16)], 1).to(exact)
    with torch.autocast(values.device.type, enabled=False):  # half precision would lose bits
        products = torch.bmm(split, values.to(exact))
    low, middle, high = products.int().chunk(3, 1)
    return _rounded(low + (middle << 8) + (high << 16))


def _rounded(total: Tensor) -> Tensor:
    # Pillow also clips, which never has an effect: rounding moves the sum of the weights away from
    # one by far less than the half of 1/255 that would leave the range of a byte.
    return ((total + (1 << (_BITS - 1))) >> _BITS).to(torch.uint8)


def _goes_down_first(height: _Lengths, width: _Lengths, size: int) -> _Lengths:
    """Return whether Pillow resamples columns before rows, because that is far less work."""
    first: _Lengths = (height > size) & (height - size > 2 * (width - size)) & _DOWN_FIRST
    return first


def _weighed(length: Tensor, places: Tensor, size: int, taps: int) -> tuple[Tensor, Tensor]:
    """Return the source pixels that have a weight, and their weights, N x size x taps."""
    centre = (2 * places.int() + 1) * length.int()[:, None]  # cheaper than 64 bits
    widest = length.int()[:, None].clamp(min=size)
    start = _over((centre - 2 * widest + size).clamp(min=0), 2 * size)
    pixel = start[:, :, None] + torch.arange(taps, dtype=torch.int32, device=places.device)
    pixel_within = torch.minimum(pixel, length.int()[:, None, None] - 1)
    return pixel_within, _weights(length, pixel, places, size)


def _weights(length: Tensor, pixel: Tensor, places: Tensor, size: int) -> Tensor:
    r"""Return the weights of source pixels, for every place in the output.

    Place $p$ of $s$ sees the source, $n$ pixels long, through a triangle filter centered at
    $c = (p + 1/2)\, n / s$ that vanishes at distance $m / s$, with $m = \max(n, s)$. Pixel $j$ has
    the weight $a_j / \sum_i a_i$, where $a_j = \max(0, 2 m - |(2 j + 1) s - (2 p + 1) n|)$ is an
    integer. Pillow computes the weights in double precision and rounds them to multiples of
    $2^{-22}$. While $n s < 2^{27}$, every exact ratio is further from a rounding boundary than the
    error of double precision, so rounding the exact ratios gives the same weights.

    Args:
        length: pixels of each source, N.
        pixel: source pixels, which include all that have a weight: N x size x number, or number.
        places: N x size.
        size: the number of places in the output.
    """
    length, place = length.int()[:, None, None], places.int()[:, :, None]
    distance = ((2 * pixel.int() + 1) * size - (2 * place + 1) * length).abs()
    share = (2 * length.clamp(min=size) - distance).clamp(min=0)
    share = torch.where(pixel < length, share, 0)
    whole = share.sum(2, keepdim=True)  # int64
    return _over((share.long() << (_BITS + 1)) + whole, 2 * whole).int()


def _jittered(planes: list[Tensor], which: Tensor, factor: Tensor, turn: Tensor) -> list[Tensor]:
    """Apply one operation to each image, given as red, green and blue planes, N x size x size."""
    grey = _grey(planes)
    count = grey.shape[1] * grey.shape[2]
    mean = _over(2 * grey.sum((1, 2), keepdim=True) + count, 2 * count).int()
    # All operations except hue blend the image with a duller one.
    dull = torch.where(which == _CONTRAST, mean, torch.where(which == _SATURATION, grey, 0))
    return [
        torch.where(which == _HUE, turned, _blend(dull, plane, factor))
        for plane, turned in zip(planes, _turned(planes, turn), strict=True)
    ]


def _blend(dull: Tensor, plane: Tensor, factor: Tensor) -> Tensor:
    """Pillow's `Image.blend`: single precision, rounded toward zero."""
    # No value reaches the bounds; the clamp keeps product and sum from being fused.
    step = (factor * (plane - dull).float()).clamp(-512, 512)
    return (dull.float() + step).clamp(0, 255).to(torch.uint8)


def _grey(planes: list[Tensor]) -> Tensor:
    """Pillow's mode L, from 0 to 255, in int32."""
    red, green, blue = (plane.int() for plane in planes)
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def _turned(planes: list[Tensor], turn: Tensor) -> list[Tensor]:
    """Add `turn` to the hue in Pillow's mode HSV, where it wraps around at 256."""
    hue, saturation, value = _hsv(planes)
    twice = 2 * ((hue + turn) & 255)
    return [_primary(twice - 2 * _SEXTANT * i, saturation, value) for i in range(3)]


def _hsv(planes: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Pillow's mode HSV, each from 0 to 255, in int32."""
    red, green, blue = (plane.int() for plane in planes)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    saturation = _over(255 * chroma, value.clamp(min=1))
    # The position on the hue circle in sixths, times the chroma.
    past_green = torch.where(green == value, 2 * chroma + blue - red, 4 * chroma + red - green)
    sixths = torch.where(red == value, green - blue, past_green)
    sixths = 255 * torch.where(sixths < 0, sixths + 6 * chroma, sixths)
    circle = 6 * chroma.clamp(min=1)
    hue = _over(sixths, circle)
    return hue - torch.where(hue * circle == sixths, _bit(_LOST, hue), 0), saturation, value


def _primary(twice: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Return the amount of a primary color at half of `twice` from its hue."""
    away = twice.abs()
    away = torch.minimum(away, 6 * _SEXTANT - away)  # the shorter way around
    missing = saturation * (away - _SEXTANT).clamp(0, _SEXTANT)
    whole = 255 * _SEXTANT
    return _over(2 * value * (whole - missing) + whole, 2 * whole).to(torch.uint8)


def _over(a: Tensor, b: Tensor | int) -> Tensor:
    """Divide non-negative integers, rounding down."""
    return torch.div(a, b, rounding_mode="trunc")


def _bit(words: tuple[int, ...], index: Tensor) -> Tensor:
    """Return the bits at `index` in a table of 64-bit words, as int32."""
    word: Tensor | int = words[0]
    for i in range(1, len(words)):
        word = torch.where(index >= 64 * i, words[i], word)
    return ((word >> (index & 63).long()) & 1).int()


def _lost_hues() -> tuple[int, ...]:
    """Return a bit for each hue that Pillow's round trip through RGB changes.

    For a color whose hue is exactly an integer, Pillow's rounding in single precision may return
    the integer below. Whether it does depends only on the hue.
    """
    hues = np.arange(255, dtype=np.uint8)
    # These colors are exact: chroma and value are `_SEXTANT`.
    pure = np.stack([hues, np.full_like(hues, 255), np.full_like(hues, _SEXTANT)], axis=1)
    image = Image.frombytes("HSV", (len(hues), 1), pure.tobytes())
    found = np.asarray(image.convert("RGB").convert("HSV"))[0, :, 0]
    return tuple(np.packbits(found != hues, bitorder="little").view("<i8").tolist())


_LOST = _lost_hues()


def _pillow_goes_down_first() -> bool:
    """Return whether the installed Pillow chooses which pass comes first (versions >= 13 do)."""
    tall = Image.fromarray((np.arange(1200).reshape(60, 20) ** 2 % 251).astype(np.uint8))
    both = tall.resize((12, 12), Image.Resampling.BILINEAR)
    down = tall.resize((20, 12), Image.Resampling.BILINEAR)
    return both.tobytes() == down.resize((12, 12), Image.Resampling.BILINEAR).tobytes()


_DOWN_FIRST = _pillow_goes_down_first()
