"""Batched transforms against those of single images by Pillow: bit for bit, and in distribution
where the randomness is drawn."""

import colorsys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from scipy import stats
from torch import Tensor
from torchvision import transforms as T

from steppe.domains import Arrays, augment, device
from steppe.domains.batches import View, read
from steppe.domains.dataset import Domain
from steppe.errors import UserError
from tests.devices import DEVICES, GPU
from tests.domains.test_augment import UNIT, UNLIKELY, picture, rows

SIZE = 64
SHAPES = (
    (227, 227),
    (200, 300),
    (227, 170),
    (100, 180),  # few crops fit: ten tries are often not enough
    (20, 400),  # none does
    (400, 20),
    (3, 4),
    (1, 1),
    (1, 9),
    (SIZE, SIZE),
    (SIZE + 1, SIZE - 1),
    (5 * SIZE, 5 * SIZE + 3),
)
EDGE = float(np.nextafter(1, 0))


class Pictures(list):
    """Images of any sizes, as a domain has them."""

    def name(self, index: int) -> str:
        return f"picture {index}"


def pictures(shapes: Sequence[tuple[int, int]], channels: int = 3) -> Pictures:
    return Pictures(picture(*shape, seed=i)[..., :channels] for i, shape in enumerate(shapes))


def moved(stack: device.Stack, where: str) -> device.Stack:
    return device.Stack(*(tensor.to(where) for tensor in stack[:4]), stack.channels)


def augmented(
    images: Any,
    chosen: np.ndarray,
    draws: np.ndarray,
    size: int,
    transform: Callable[..., Tensor] = device.augment,
    where: str = "cpu",
) -> Tensor:
    stack = device.stacked(images)
    heights, widths = stack.heights.numpy(), stack.widths.numpy()
    boxes = augment.crop_boxes(heights[chosen], widths[chosen], draws)
    reach = device.crop_reach(heights, widths, size)
    inputs = (torch.from_numpy(x).to(where) for x in (chosen, draws, boxes))
    return transform(moved(stack, where), *inputs, size, reach).cpu()


def tap_by_tap(
    stack: device.Stack, chosen: Tensor, draws: Tensor, boxes: Tensor, *window: Any
) -> Tensor:
    """Augment in the way that compiled code and CPUs take."""
    filters = device.filters(boxes, draws, *window)
    return device.augment(stack, chosen, draws, boxes, *window, filters)


WAYS = [device.augment, tap_by_tap]


def expected(images: Any, chosen: np.ndarray, draws: np.ndarray, size: int) -> np.ndarray:
    found = [augment.augment(images[i], row, size) for i, row in zip(chosen, draws, strict=True)]
    return np.stack(found).transpose(0, 3, 1, 2)


def every_order(n: int, seed: int = 0) -> np.ndarray:
    """Draws in which each order of the jitter comes n times."""
    draws = rows(24 * n, seed)
    draws[:, augment._ORDER] = np.tile((np.arange(24) + 0.5) / 24, n)
    return draws


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", DEVICES)
def test_augment_is_pillows_bit_for_bit_in_every_order_and_shape(where: str, way: Any):
    images = pictures(SHAPES)
    draws = every_order(len(SHAPES))
    chosen = np.repeat(np.arange(len(SHAPES)), 24)
    draws[::7, augment._GREY] = 0.01
    found = augmented(images, chosen, draws, SIZE, way, where)
    assert found.dtype == torch.uint8
    assert found.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_array_equal(found.numpy(), expected(images, chosen, draws, SIZE))


@pytest.mark.parametrize("way", WAYS)
def test_augment_at_the_size_of_networks(way: Any):
    """Of PACS's images, which are barely larger: either pass of the resampling may come first."""
    images = pictures([(227, 227)] * 2)
    draws = every_order(1)
    draws[:, :20] = 0.8
    draws[:12, 1] = 0.49  # nearly square: 219 x 219
    draws[12:, :20:2] = np.linspace(0.85, EDGE, 12)[:, None]
    draws[12:, 1:20:2] = np.linspace(0.45, 0.5, 12)[:, None]
    chosen = np.arange(24) % 2
    boxes = augment.crop_boxes(np.full(24, 227), np.full(24, 227), draws)
    down = device._goes_down_first(boxes[:, 2], boxes[:, 3], 224)
    assert 0 < down.sum() < 24
    found = augmented(images, chosen, draws, 224, way)
    np.testing.assert_array_equal(found.numpy(), expected(images, chosen, draws, 224))


@pytest.mark.parametrize("end", [0.0, 0.5, EDGE])
def test_factors_at_their_ends(end):
    images = Pictures([np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)])
    draws = every_order(2)
    draws[:24, augment._FACTORS : augment._FACTORS + 4] = end  # 0.5: Pillow copies
    draws[24:, augment._FACTORS : augment._FACTORS + 4 : 2] = end
    chosen = np.zeros(48, dtype=int)
    found = augmented(images, chosen, draws, 16)
    np.testing.assert_array_equal(found.numpy(), expected(images, chosen, draws, 16))


def test_factors_are_rounded_as_pillow_rounds_them():
    """To single precision and once: they lie where the last bit decides about some value."""
    rng = np.random.default_rng(0)
    value = rng.integers(100, 256, 4000)
    factor = np.round(value * rng.uniform(0.71, 1.29, 4000)) / value
    factor += rng.integers(-8, 9, 4000) * 2.0**-25
    draws = np.full((4000, augment.DRAWS), 0.5)
    draws[:, augment._FACTORS] = ((factor - 1) / augment.JITTER + 1) / 2
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    images, chosen = Pictures([np.dstack([values] * 3)]), np.zeros(4000, dtype=int)
    draws[:, :20] = 0.999  # no crop
    found = augmented(images, chosen, draws, 16)
    np.testing.assert_array_equal(found.numpy(), expected(images, chosen, draws, 16))


SIDE = st.integers(1, 12)


@settings(deadline=None)
@given(data=st.data(), shapes=st.lists(st.tuples(SIDE, SIDE), min_size=1, max_size=4))
def test_augment_is_pillows_whatever_the_pixels_and_draws(data, shapes):
    pixel = st.sampled_from([0, 1, 127, 128, 254, 255]) | st.integers(0, 255)
    images = Pictures(data.draw(arrays(np.uint8, (*s, 3), elements=pixel)) for s in shapes)
    draws = data.draw(arrays(np.float64, (len(images), augment.DRAWS), elements=UNIT))
    chosen = np.arange(len(images))
    found = augmented(images, chosen, draws, 5)
    np.testing.assert_array_equal(found.numpy(), expected(images, chosen, draws, 5))


# Around the bound where Pillow changes the order of its passes, too.
RESIZED = (*SHAPES, (78, 70), (76, 70), (77, 70), (65, 50), (66, 64), (800, 90))


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_resize_is_pillows_bit_for_bit(channels: int, where: str):
    images = pictures(RESIZED, channels)
    stack = device.stacked(images)
    reach = device.whole_reach(stack.heights.numpy(), stack.widths.numpy(), SIZE)
    down = device._goes_down_first(stack.heights, stack.widths, SIZE)
    assert not down.all()
    assert bool(down.any()) == device._DOWN_FIRST  # as the Pillow at hand does it
    for chosen in (np.array([2]), np.arange(len(images))[::-1].copy()):
        there, which = moved(stack, where), torch.from_numpy(chosen).to(where)
        filters = device.filters(device.whole_boxes(there, which), None, SIZE, reach)
        found = device.resize(there, which, SIZE, reach)
        assert torch.equal(device.resize(there, which, SIZE, reach, filters), found)
        domain = Domain("all", images, np.zeros(len(images), dtype=np.int64))
        batch = read(domain, chosen, View(SIZE, augment=False)).images
        assert torch.equal(found.cpu(), batch)
        assert found.stride() == batch.stride()


def test_resize_follows_an_older_pillow(monkeypatch: pytest.MonkeyPatch):
    """Which goes across first in any case, and hence as Pillow does in two calls."""
    assert (int(PIL.__version__.split(".")[0]) >= 13) == device._DOWN_FIRST
    monkeypatch.setattr(device, "_DOWN_FIRST", False)
    tall = picture(300, 90)
    stack = device.stacked([tall])
    reach = device.whole_reach(np.array([300]), np.array([90]), SIZE)
    assert reach.rows == 300
    across = Image.fromarray(tall).resize((SIZE, 300), Image.Resampling.BILINEAR)
    twice = np.asarray(across.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    found = device.resize(stack, torch.tensor([0]), SIZE, reach)
    np.testing.assert_array_equal(found[0].permute(1, 2, 0), twice)


def colours() -> np.ndarray:
    """All triples of bytes, 2^24 x 3."""
    axis = np.arange(256, dtype=np.uint8)
    return np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), axis=3).reshape(-1, 3)


@pytest.mark.parametrize("where", DEVICES)
def test_all_colours_are_pillows(where: str):
    """Both ways between RGB and HSV, for triples that are taken as either."""
    for triples in np.array_split(colours(), 64):
        planes = [torch.from_numpy(c.copy()).to(where) for c in triples.T]
        size = (len(triples), 1)
        theirs = np.asarray(Image.frombytes("RGB", size, triples.tobytes()).convert("HSV"))[0]
        np.testing.assert_array_equal(torch.stack(device._hsv(planes), 1).cpu(), theirs)
        hue, saturation, value = (plane.int() for plane in planes)
        ours = [device._primary(2 * hue - 170 * i, saturation, value) for i in range(3)]
        theirs = np.asarray(Image.frombytes("HSV", size, triples.tobytes()).convert("RGB"))[0]
        np.testing.assert_array_equal(torch.stack(ours, 1).cpu(), theirs)


@pytest.mark.parametrize("where", DEVICES)
def test_products_do_not_depend_on_how_they_are_computed(
    where: str, monkeypatch: pytest.MonkeyPatch
):
    """In parts, under autocast, in TF32 or bfloat16, and without images."""
    images, draws, chosen = pictures([(40, 28), (12, 90)]), rows(6), np.arange(6) % 2
    wanted = expected(images, chosen, draws, SIZE)
    monkeypatch.setattr(device, "_AT_ONCE", 1)
    with torch.autocast(torch.device(where).type, dtype=torch.bfloat16):
        found = augmented(images, chosen, draws, SIZE, where=where)
    np.testing.assert_array_equal(found.numpy(), wanted)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        found = augmented(images, chosen, draws, SIZE, where=where)
    finally:
        torch.set_float32_matmul_precision(before)
    np.testing.assert_array_equal(found.numpy(), wanted)
    none = augmented(images, chosen[:0], draws[:0], SIZE, where=where)
    assert none.shape == (0, 3, SIZE, SIZE)


@pytest.mark.parametrize("where", DEVICES)
def test_sums_of_more_than_256_products_are_exact(where: str):
    """Just above and below where rounding changes, a sum that is off by one gives another byte."""
    for total in range((9 << 21) - 3, (9 << 21) + 4):  # 4.5 after the division by 2^22
        weights, values = torch.zeros(300, dtype=torch.int32), torch.zeros(300, dtype=torch.uint8)
        many, rest = divmod(total, 255 * 255)
        weights[:many], values[:many] = 255, 255
        weights[many], values[many] = 255, rest // 255
        weights[many + 1], values[many + 1] = rest % 255, 1
        found = device._summed(weights[None, None].to(where), values[None, :, None].to(where), 300)
        assert int(found) == (4 if total < 9 << 21 else 5)


@pytest.mark.parametrize("name", ["_DOWN_FIRST", "_LOST"])
def test_what_is_asked_of_pillow_matters(name: str, monkeypatch: pytest.MonkeyPatch):
    """Without the answer, images differ: the tests above would fail."""
    images = pictures([(227, 170)])
    draws, chosen = every_order(2), np.zeros(48, dtype=int)
    monkeypatch.setattr(device, name, (0, 0, 0, 0) if name == "_LOST" else False)
    found = augmented(images, chosen, draws, SIZE * 3)
    assert (found.numpy() != expected(images, chosen, draws, SIZE * 3)).any()


@given(height=st.integers(1, 900), width=st.integers(1, 900), size=st.integers(1, 300))
def test_reach_covers_the_work_and_little_more(height, width, size):
    shape = (np.array([height]), np.array([width]))

    def needed(length: int) -> int:
        """The most pixels that lie inside of Pillow's triangle, in exact arithmetic."""
        places, pixels = np.arange(size)[:, None], np.arange(length)
        distance = np.abs((2 * pixels + 1) * size - (2 * places + 1) * length)
        return int((distance < 2 * max(length, size)).sum(axis=1).max())

    whole = device.whole_reach(*shape, size)
    assert max(needed(height), needed(width)) <= whole.taps
    assert whole.taps <= 2 * max(height, width, size) / size + 1
    lines = (width, height) if device._goes_down_first(*shape, size) else (height, width)
    assert (whole.rows, whole.columns) == lines
    # The tallest and the widest crop there can be, and that of the fallback.
    draws = np.tile(np.array([[EDGE] * 2, [EDGE, 0.0]]).repeat(10, axis=0).reshape(2, 20), (1, 2))
    boxes = augment.crop_boxes(*(np.repeat(side, 2) for side in shape), draws[:, : augment.DRAWS])
    crop = device.crop_reach(*shape, size)
    assert boxes[:, 2].max() <= crop.rows <= height
    assert all(needed(length) <= crop.taps for length in boxes[:, 2:].ravel().tolist())
    assert boxes[:, 2:].max() <= crop.columns <= max(height, width)
    assert crop.taps <= whole.taps
    assert crop.rows <= width * 4 / 3 + 2


def test_reach_is_over_all_images():
    heights, widths = np.array([300, 30, 40]), np.array([310, 20, 650])
    assert device.whole_reach(heights, widths, 100) == device.Reach(300, 650, taps=13)
    assert device.crop_reach(heights, widths, 100) == device.Reach(300, 310, taps=7)
    # Of an image that is far from a square, crops are not: 134 x 100 at most, and a pixel.
    for shape in ((100, 900), (900, 100)):
        rows = min(135, shape[0])
        found = device.crop_reach(*(np.array([side]) for side in shape), 50)
        assert found == device.Reach(rows, 135, taps=6)


def test_stack_holds_images_as_chosen():
    images, chosen = pictures([(3, 5), (7, 2), (4, 4)]), np.array([2, 0, 0])
    stack = device.stacked([images[i] for i in chosen])
    assert stack.channels == 3
    assert stack.pixels.dtype == torch.uint8
    for i, which in enumerate(chosen):
        height, width, start = (int(x[i]) for x in (stack.heights, stack.widths, stack.offsets))
        found = stack.pixels[start : start + height * width * 3].reshape(height, width, 3)
        np.testing.assert_array_equal(found, images[which])
    assert len(stack.pixels) == 3 * (16 + 15 + 15)
    mirrored = device.stacked([images[0][:, ::-1]])  # not contiguous
    np.testing.assert_array_equal(mirrored.pixels.reshape(3, 5, 3), images[0][:, ::-1])


def test_a_stack_does_not_mix_channels():
    mixed = [np.zeros((2, 2, 3), np.uint8), np.zeros((2, 2, 1), np.uint8)]
    with pytest.raises(ValueError, match="too many values to unpack"):
        device.stacked(mixed)


def test_augment_says_what_it_cannot_take():
    draws = rows(1)
    with pytest.raises(UserError, match="1 channels"):
        augmented(pictures([(3, 5)], channels=1), np.array([0]), draws, 4)
    with pytest.raises(UserError, match="torch.float32"):
        augmented(pictures([(3, 5)]), np.array([0]), draws.astype(np.float32), 4)


def same_compiled(backend: str, where: str = "cpu") -> None:
    """One compilation of each part serves all batch sizes, and changes no bit."""
    graphs: list[int] = []
    inner = torch._dynamo.lookup_backend(backend)

    def counted(module: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(1)
        return inner(module, inputs, **options)

    def dynamic(
        stack: device.Stack, chosen: Tensor, draws: Tensor, boxes: Tensor, *window: Any
    ) -> Tensor:
        for x in (chosen, draws, boxes):
            torch._dynamo.mark_dynamic(x, 0)
        filters = weigh(boxes, draws, *window)
        for x in filters:
            torch._dynamo.mark_dynamic(x, 0)
        return compiled(stack, chosen, draws, boxes, *window, filters)

    torch._dynamo.reset()
    weigh = torch.compile(device.filters, backend=counted, fullgraph=True)
    compiled = torch.compile(device.augment, backend=counted, fullgraph=True)
    images = pictures([(20, 30), (40, 28), (12, 9), (33, 34)])
    for n in (24, 4, 7):
        draws, chosen = every_order(1)[:n], np.arange(n) % len(images)
        found = augmented(images, chosen, draws, 16, dynamic, where)
        np.testing.assert_array_equal(found.numpy(), expected(images, chosen, draws, 16))
        assert found.is_contiguous(memory_format=torch.channels_last)
    assert len(graphs) == 2


def test_compiling_takes_two_graphs():
    same_compiled("eager")


@pytest.mark.parametrize("where", [pytest.param("cpu", marks=pytest.mark.slow), GPU])
def test_compiled_is_eager_bit_for_bit(where: str):
    same_compiled("inductor", where)
    stack = moved(device.stacked(pictures(SHAPES)), where)
    reach = device.whole_reach(stack.heights.cpu().numpy(), stack.widths.cpu().numpy(), SIZE)
    every = torch.arange(len(SHAPES), device=where)
    eager = device.resize(stack, every, SIZE, reach)
    filters = torch.compile(device.filters)(device.whole_boxes(stack, every), None, SIZE, reach)
    compiled = torch.compile(device.resize)(stack, every, SIZE, reach, filters)
    assert torch.equal(compiled, eager)
    assert compiled.stride() == eager.stride()


def close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether two samples can be of one distribution."""
    return bool(stats.ks_2samp(ours, theirs, method="asymp").pvalue > UNLIKELY)


@pytest.mark.parametrize("shape", [(227, 227), (200, 300), (100, 180), (3, 4)])
def test_crops_are_distributed_as_torchvisions(shape):
    torch.manual_seed(1)
    image = Image.new("RGB", shape[::-1])
    theirs = [
        T.RandomResizedCrop.get_params(image, [0.7, 1.0], [3 / 4, 4 / 3]) for _ in range(2000)
    ]
    ours = augment.crop_boxes(*(np.full(2000, side) for side in shape), rows(2000))
    for a, b in zip(ours.T, np.array(theirs).T, strict=True):
        assert close(a, b)
    (top, left, h, w), (top2, left2, h2, w2) = ours.T, np.array(theirs).T
    assert close(h * w, h2 * w2)
    assert close(w / h, w2 / h2)
    assert close(top + left, top2 + left2)


DOMAINBED = [
    T.RandomHorizontalFlip(),
    T.ColorJitter(0.3, 0.3, 0.3, 0.3),
    T.RandomGrayscale(),
]


def drawn(image: np.ndarray, n: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The image as we transform it and as torchvision does, n times: n x size x size x 3."""
    ours = augmented(Arrays(image[None]), np.zeros(n, dtype=int), rows(n), size)
    torch.manual_seed(1)
    theirs = T.Compose([T.RandomResizedCrop(size, scale=(0.7, 1.0)), *DOMAINBED])
    seen = [np.asarray(theirs(Image.fromarray(image))) for _ in range(n)]
    return ours.permute(0, 2, 3, 1).numpy().astype(float), np.array(seen, dtype=float)


@pytest.mark.parametrize("colour", [(200, 120, 60), (40, 90, 150)])
def test_colours_are_distributed_as_torchvisions(colour):
    """Of a plain image, whose colour after the jitter shows the factors, the hue and the grey."""
    ours, theirs = (x[:, 0, 0] for x in drawn(np.full((2, 2, 3), colour, np.uint8), 4000, 1))
    grey = [(np.ptp(x, axis=1) == 0).sum() for x in (ours, theirs)]
    assert stats.fisher_exact([grey, [4000 - g for g in grey]]).pvalue > UNLIKELY
    assert stats.binomtest(int(grey[0]), 4000, augment.GREY).pvalue > UNLIKELY
    for c in range(3):
        assert close(ours[:, c], theirs[:, c])
    hsv = [np.array([colorsys.rgb_to_hsv(*v) for v in x if np.ptp(v)]) for x in (ours, theirs)]
    for c in range(3):
        # Half a turn on: this colour's hue is far from where the circle is cut open.
        assert close((hsv[0][:, c] + 0.5) % 1, (hsv[1][:, c] + 0.5) % 1), "hsv"[c]


def test_images_are_distributed_as_torchvisions():
    ours, theirs = drawn(picture(30, 40), 1200, 12)
    for c in range(3):
        for moment in (np.mean, np.std):
            assert close(moment(ours[..., c], axis=(1, 2)), moment(theirs[..., c], axis=(1, 2)))
    for half in (np.s_[:, :, :6], np.s_[:, :6]):  # where things are: flips and crops
        sides = [x[half].mean(axis=(1, 2, 3)) - x.mean(axis=(1, 2, 3)) for x in (ours, theirs)]
        assert close(*sides)
