"""RotatedMNIST and ColoredMNIST from files in MNIST's format, small ones made here."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from steppe.domains import load
from steppe.domains.datasets import mnist
from steppe.errors import UserError


def write_idx(path: Path, array: np.ndarray) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    data = bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_mnist(folder: Path, n: int = 40, ending: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Writes n training digits and n // 4 others; returns all of them."""
    rng = np.random.default_rng(3)
    images = rng.integers(1, 256, size=(n + n // 4, 28, 28), dtype=np.uint8)
    labels = rng.integers(10, size=n + n // 4, dtype=np.uint8)
    arrays = (images[:n], labels[:n], images[n:], labels[n:])
    for name, array in zip(mnist.FILES, arrays, strict=True):
        write_idx(folder / f"{name}{ending}", array)
    return images, labels


@pytest.mark.parametrize(("folder", "ending"), [("MNIST", ""), ("MNIST/raw", ".gz")])
def test_rotated(tmp_path: Path, folder: str, ending: str):
    images, labels = write_mnist(tmp_path / folder, ending=ending)
    order = np.random.RandomState(0).permutation(50)
    dataset = load("RotatedMNIST", tmp_path)
    assert dataset.classes == tuple("0123456789")
    for i, domain in enumerate(dataset.domains):
        chosen = order[i::6]
        assert domain.labels.tolist() == labels[chosen].tolist()
        for k, original in enumerate(chosen):
            flat = Image.fromarray(images[original])
            turned = rotate(flat, int(domain.name), InterpolationMode.BILINEAR, fill=[0])
            assert np.array_equal(domain.images[k][..., 0], turned)


def test_rotation_is_counter_clockwise():
    image = np.zeros((1, 28, 28), dtype=np.uint8)
    image[0, :, -1] = 255  # the right edge
    assert (mnist.rotate(image, 90)[0, 0] == 255).all()  # is on top


def test_colored_one_digit_at_a_time(tmp_path: Path):
    images, digits = write_mnist(tmp_path / "MNIST")
    dataset = load("ColoredMNIST", tmp_path)
    rng = np.random.RandomState(0)
    order = rng.permutation(50)
    for i, (domain, flips) in enumerate(zip(dataset.domains, (0.1, 0.2, 0.9), strict=True)):
        chosen = order[i::3]
        label_draws, color_draws = rng.rand(len(chosen)), rng.rand(len(chosen))
        for k, original in enumerate(chosen):
            label = digits[original] < 5
            if label_draws[k] < 0.25:
                label = not label
            color = label if color_draws[k] >= flips else not label
            image = domain.images[k]
            assert domain.labels[k] == label
            assert image.shape == (28, 28, 2)
            assert np.array_equal(image[..., int(color)], images[original])
            assert not image[..., int(not color)].any()
    assert dataset.classes[int(True)] == "0 to 4"


def test_colors_agree_with_labels_as_often_as_the_names_say(tmp_path: Path):
    write_mnist(tmp_path, n=6000)
    _, domains = mnist.colored(tmp_path)
    assert [domain.name for domain in domains] == ["+90%", "+80%", "-90%"]
    for domain, agreement in zip(domains, (0.9, 0.8, 0.1), strict=True):
        colors = domain.images.pixels[..., 1].any(axis=(1, 2))
        # 2,500 draws: a standard error of at most 0.8 %.
        assert abs((colors == domain.labels).mean() - agreement) < 0.03


def test_missing_files_are_named(tmp_path: Path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(
        UserError, match=r"t10k-labels-idx1-ubyte missing.*steppe data get"
    ) as error:
        mnist.rotated(tmp_path)
    assert str(tmp_path / "raw") in str(error.value)
    assert "train-images" not in str(error.value)


def damage(path: Path, change: str) -> Path:
    data = path.read_bytes()
    if change == "magic":
        path.write_bytes(b"\x89PNG" + data[4:])
    elif change == "cut off":
        path.write_bytes(data[:-1])
    elif change == "cut off in the header":
        path.write_bytes(data[:9])
    elif change == "empty":
        path.write_bytes(b"")
    elif change == "labels":
        path.write_bytes(path.with_name("train-labels-idx1-ubyte").read_bytes())
    elif change == "cut off and compressed":
        path.unlink()
        path = path.with_name(f"{path.name}.gz")
        path.write_bytes(gzip.compress(data)[:-20])
    elif change == "not compressed":
        path.unlink()
        path = path.with_name(f"{path.name}.gz")
        path.write_bytes(data)
    elif change == "fewer":
        write_idx(path, np.zeros((39, 28, 28), dtype=np.uint8))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("magic", "starts with 89 50 4e 47, expected 00 00 08"),
        ("cut off", "has 31375 bytes, but its header says 31376"),
        ("cut off in the header", "is truncated"),
        ("empty", "starts with nothing"),
        ("labels", "has 1 dimensions, but MNIST has 3"),
        ("cut off and compressed", "is damaged"),
        ("not compressed", "is damaged"),
        ("fewer", "has 39 images, but .* has 40 labels"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, change: str, message: str):
    write_mnist(tmp_path)
    path = damage(tmp_path / "train-images-idx3-ubyte", change)
    with pytest.raises(UserError, match=message) as error:
        mnist.rotated(tmp_path)
    assert str(path) in str(error.value)
