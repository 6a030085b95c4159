"""The transforms against torchvision's own: bit for bit where the randomness is given, and in
distribution where it is drawn."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from scipy import stats
from torch import nn
from torchvision import transforms as T

from steppe.algorithms import Network
from steppe.domains import augment

UNLIKELY = 1e-3
"""A p-value below it fails a test. Seeds are fixed: a test that passes once always does."""

SHAPES = {
    "square": (224, 224),
    "wide": (200, 300),
    "tall": (227, 170),
    "barely": (100, 180),  # few crops fit: ten tries are often not enough
    "extreme": (20, 400),  # none does
    "tiny": (3, 4),
}


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth colours with noise: resampling and jitter both leave their mark."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 7), np.cos(y / 5), np.sin((x + y) / 11)], axis=2)
    noise = np.random.default_rng(seed).normal(scale=0.2, size=waves.shape)
    return (127.5 + 100 * (waves + noise)).clip(0, 255).astype(np.uint8)


def rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((n, augment.DRAWS))


def domainbed(pixels: np.ndarray, draws: np.ndarray, size: int) -> np.ndarray:
    """DomainBed's composition of torchvision transforms, told what to draw."""
    order = augment._ORDERS[int(draws[augment._ORDER] * 24)]
    crop = T.RandomResizedCrop(size, scale=(0.7, 1.0))
    jitter = T.ColorJitter(0.3, 0.3, 0.3, 0.3)
    box = augment.crop_box(*pixels.shape[:2], draws)
    crop.get_params = lambda *_: box
    jitter.get_params = lambda *_: (torch.tensor(order), *augment.jitter_factors(draws))
    compose = T.Compose(
        [
            crop,
            T.RandomHorizontalFlip(float(draws[augment._FLIP] < 0.5)),
            jitter,
            T.RandomGrayscale(float(draws[augment._GREY] < 0.1)),
        ]
    )
    return np.asarray(compose(Image.fromarray(pixels)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("flip", "grey"), [(0.2, 0.9), (0.7, 0.05)])
def test_augment_is_torchvision_bit_for_bit(shape, flip, grey):
    pixels = picture(*shape)
    before = pixels.copy()
    for draws in rows(6):
        draws[[augment._FLIP, augment._GREY]] = flip, grey
        expected = domainbed(pixels, draws, 64)
        found = augment.augment(pixels, draws, 64)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, expected)
        assert (np.ptp(found, axis=2) == 0).all() == (grey < 0.1)
    np.testing.assert_array_equal(pixels, before)


@pytest.mark.parametrize("shape", [(224, 224), (40, 90), (300, 17), (1, 1), (64, 63)])
def test_resize_is_torchvision_bit_for_bit(shape):
    pixels = picture(*shape)
    for size in (64, 224):
        resize = T.Resize((size, size))
        expected = np.asarray(resize(Image.fromarray(pixels)))
        np.testing.assert_array_equal(augment.resize(pixels, size), expected)
        mirrored = np.asarray(resize(Image.fromarray(pixels[:, ::-1].copy())))
        np.testing.assert_array_equal(augment.resize(pixels[:, ::-1], size), mirrored)
        for channels in (1, 2):  # digits, and digits in two colours
            found = augment.resize(pixels[..., :channels], size)
            assert found.shape == (size, size, channels)
            for c in range(channels):
                one = np.asarray(resize(Image.fromarray(pixels[..., c].copy())))
                np.testing.assert_array_equal(found[..., c], one)


def test_normalization_is_torchvision_bit_for_bit():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    network = Network(nn.Flatten(), 3, 2, mean, std)
    pixels = np.random.default_rng(0).permuted(
        np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None, None], (256, 4, 3)).copy(), axis=0
    )
    theirs = T.Compose([T.ToTensor(), T.Normalize(mean, std)])(Image.fromarray(pixels))
    ours = network.normalize(torch.from_numpy(pixels)[None].permute(0, 3, 1, 2))
    assert ours.dtype == torch.float32
    assert torch.equal(ours[0], theirs)
    assert network.normalize(ours) is ours, "what is normalized already is left alone"


def crops(shape: tuple[int, int], n: int) -> dict[str, np.ndarray]:
    """Statistics of our crops and of torchvision's, each as 2 x n."""
    image = Image.new("RGB", shape[::-1])
    torch.manual_seed(1)
    theirs = [T.RandomResizedCrop.get_params(image, [0.7, 1.0], [3 / 4, 4 / 3]) for _ in range(n)]
    ours = augment.crop_boxes(*(np.full(n, side) for side in shape), rows(n))
    top, left, height, width = np.array([ours, theirs], dtype=float).transpose(2, 0, 1)
    return {
        "area": height * width / (shape[0] * shape[1]),
        "aspect": width / height,
        "top": top,
        "left": left,
        "height": height,
    }


@pytest.mark.parametrize("name", SHAPES)
def test_crops_are_distributed_as_torchvisions(name):
    for what, (ours, theirs) in crops(SHAPES[name], 2000).items():
        assert stats.ks_2samp(ours, theirs, method="asymp").pvalue > UNLIKELY, what


def test_the_fallback_is_torchvisions():
    for shape in ((20, 400), (400, 20), (1, 400), (400, 1), (31, 97), (97, 31)):
        found = crops(shape, 5)
        assert all(np.ptp(values) == 0 for values in found.values()), shape


UNIT = st.sampled_from([0.0, float(np.nextafter(1, 0))]) | st.floats(0, 1, exclude_max=True)


@given(
    height=st.integers(1, 400),
    width=st.integers(1, 400),
    draws=arrays(np.float64, augment.DRAWS, elements=UNIT),
)
def test_crop_is_inside_the_image(height, width, draws):
    ((top, left, h, w),) = augment.crop_boxes(np.array([height]), np.array([width]), draws[None])
    assert 0 <= top < top + h <= height
    assert 0 <= left < left + w <= width
    assert (top, left, h, w) == augment.crop_box(height, width, draws.tolist())
    small = augment.augment(np.zeros((height % 9 + 1, width % 9 + 1, 3), np.uint8), draws, 5)
    assert small.shape == (5, 5, 3)


def test_crops_of_many_images_are_those_of_each():
    heights, widths = np.random.default_rng(2).integers(1, 300, size=(2, 2000))
    drawn = rows(2000)
    each = [augment.crop_box(*image) for image in zip(heights, widths, drawn, strict=True)]
    np.testing.assert_array_equal(augment.crop_boxes(heights, widths, drawn), each)


def test_jitter_is_distributed_as_torchvisions():
    torch.manual_seed(1)
    ranges = ([0.7, 1.3],) * 3 + ([-0.3, 0.3],)
    theirs = np.array([T.ColorJitter.get_params(*ranges)[1:] for _ in range(2000)])
    ours = np.array([augment.jitter_factors(draws) for draws in rows(2000)])
    for i, (low, high) in enumerate(ranges):
        assert low <= ours[:, i].min() < ours[:, i].max() <= high
        assert stats.ks_2samp(ours[:, i], theirs[:, i], method="asymp").pvalue > UNLIKELY
    # Both ends, hue's included: torchvision refuses a shift beyond one half.
    for end in (0.0, np.nextafter(1, 0)):
        sign = 1 if end else -1
        expected = (1 + 0.3 * sign,) * 3 + (0.3 * sign,)
        assert augment.jitter_factors(np.full(augment.DRAWS, end)) == pytest.approx(expected)


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """What `augment` chose for 6000 images: order of the jitter, whether flipped, whether grey."""
    calls: list[int] = []

    def spy(which: int) -> Any:
        return lambda image, factor: calls.append(which) or image

    monkeypatch.setattr(augment, "_ADJUST", tuple(spy(which) for which in range(4)))
    half = np.zeros((4, 4, 3), np.uint8)
    half[:, 2:] = 0, 0, 200  # blue, on the right

    def run() -> Iterator[tuple[int, bool, bool]]:
        for draws in rows(6000):
            calls.clear()
            image = augment.augment(half, draws, 2)
            order = augment._ORDERS.index(tuple(calls))
            yield order, image[0, 0].sum() > image[0, 1].sum(), np.ptp(image, axis=2).max() == 0

    return np.array(list(run()), dtype=int)


def test_order_flip_and_grey_come_as_often_as_they_should(choices):
    orders = Counter(choices[:, 0].tolist())
    assert len(orders) == 24
    assert stats.chisquare(list(orders.values())).pvalue > UNLIKELY
    for column, chance in ((1, 0.5), (2, 0.1)):
        happened = int(choices[:, column].sum())
        assert stats.binomtest(happened, len(choices), chance).pvalue > UNLIKELY


def test_choices_do_not_depend_on_each_other(choices):
    """No number of an image's row serves two of them."""
    drawn = rows(len(choices))
    boxes = augment.crop_boxes(*np.full((2, len(drawn)), 224), drawn)
    # The middle of each position's share, as a position is drawn from few where the crop is large.
    crop = np.array(
        [(h * w, w / h, (t + 0.5) / (225 - h), (x + 0.5) / (225 - w)) for t, x, h, w in boxes]
    )
    factors = np.array([augment.jitter_factors(draws) for draws in drawn])
    columns = np.hstack([crop, factors, choices])
    found = stats.spearmanr(columns).statistic
    # Area and aspect decide together whether a crop fits, so that they do depend on each other.
    found[0, 1] = found[1, 0] = 0
    np.fill_diagonal(found, 0)
    assert np.abs(found).max() < 5 / np.sqrt(len(choices))  # five standard deviations
