"""RotatedMNIST and ColoredMNIST, made from MNIST's four files as in DomainBed.

The 70,000 digits are shuffled, and domain i of n takes every n-th digit from the i-th on, so no
digit is in two domains. DomainBed shuffles with the run's seed, which gives every run a different
dataset. Here `RandomState(0)` draws everything, in this order: the permutation; then, for each
domain of ColoredMNIST, the flips of its labels and the flips of its colors.
"""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from steppe.domains.dataset import Arrays, Contents, Domain, Indices, Pixels
from steppe.domains.spec import DatasetSpec, Source, same_file
from steppe.errors import UserError

ANGLES = ("0", "15", "30", "45", "60", "75")
COLORS = ("+90%", "+80%", "-90%")
"""How often, and in which direction, the color agrees with the label."""
FILES = {
    "train-images-idx3-ubyte": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}
"""MNIST's files, with torchvision's checksums of ``FILE.gz``; either form is read."""

_LIMIT = 2**28
"""Maximum bytes to read; MNIST's largest file has 47 million."""

DIGITS = tuple(str(digit) for digit in range(10))
_LABEL_FLIPS = 0.25
_COLOR_FLIPS = (0.1, 0.2, 0.9)


def rotated(root: Path) -> Contents:
    """Read RotatedMNIST: ten digits, one domain per angle.

    Interpolation is bilinear, as in current DomainBed; its first published tables used bicubic.
    """
    images, labels, _ = _shuffled(root)
    return DIGITS, at_angles(images, labels)


def colored(root: Path) -> Contents:
    """Read ColoredMNIST: whether the digit is below five, with a color that misleads in "-90%".

    Labels are flipped first, and the color follows the flipped label. The shape of the digit gives
    at most 75% accuracy, and its color at most 90% in the domains where it is reliable. The color
    is the channel, of two, that is not black.
    """
    images, digits, rng = _shuffled(root)
    n = len(COLORS)
    domains = []
    for i, (name, flips) in enumerate(zip(COLORS, _COLOR_FLIPS, strict=True)):
        labels = (digits[i::n] < 5) ^ (rng.random_sample(len(digits[i::n])) < _LABEL_FLIPS)
        color = (labels ^ (rng.random_sample(len(labels)) < flips)).astype(np.int64)
        pixels = np.zeros((*images[i::n].shape, 2), dtype=np.uint8)
        pixels[np.arange(len(color)), :, :, color] = images[i::n]
        domains.append(Domain(name, Arrays(pixels), labels.astype(np.int64)))
    return ("5 to 9", "0 to 4"), tuple(domains)


def at_angles(images: Pixels, labels: Indices) -> tuple[Domain, ...]:
    """Divide gray images, N x height x width, among one domain per angle, and rotate them."""
    n = len(ANGLES)
    return tuple(
        Domain(angle, Arrays(rotate(images[i::n], float(angle))[..., None]), labels[i::n])
        for i, angle in enumerate(ANGLES)
    )


def rotate(images: Pixels, degrees: float) -> Pixels:
    """Rotate gray images, N x height x width, counterclockwise; bilinear, with a black border.

    The pixels equal those of torchvision's `rotate` for Pillow images, which DomainBed calls.
    """
    from PIL import Image  # slow to import, and naming datasets does not need it

    turned = [
        np.asarray(Image.fromarray(image).rotate(degrees, Image.Resampling.BILINEAR))
        for image in images
    ]
    return np.stack(turned)


def _shuffled(root: Path) -> tuple[Pixels, Indices, RandomState]:
    """Return all of MNIST in a fixed random order, and the generator for further draws."""
    paths = [_find(root, name) for name in FILES]
    if missing := [name for name, path in zip(FILES, paths, strict=True) if path is None]:
        raise UserError(
            f"MNIST not found in {root} or {root / 'raw'}: {', '.join(missing)} missing (or the "
            "same with .gz). Try 'steppe data get RotatedMNIST'."
        )
    parts = [read_idx(path) for path in paths if path is not None]
    for path, part, dimensions in zip(paths, parts, (3, 1, 3, 1), strict=True):
        if part.ndim != dimensions:
            raise UserError(f"{path} has {part.ndim} dimensions, but MNIST has {dimensions}")
    for i in (0, 2):
        if len(parts[i]) != len(parts[i + 1]):
            raise UserError(
                f"{paths[i]} has {len(parts[i])} images, but {paths[i + 1]} has "
                f"{len(parts[i + 1])} labels"
            )
    images = np.concatenate((parts[0], parts[2]))
    labels = np.concatenate((parts[1], parts[3])).astype(np.int64)
    rng = RandomState(0)
    order = rng.permutation(len(labels))
    return images[order], labels[order], rng


def _find(root: Path, name: str) -> Path | None:
    for folder in (root, root / "raw"):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    return None


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an array of bytes from a file in MNIST's IDX format, compressed or not.

    The file starts with two zeros, the type (8 for bytes), the number of dimensions, and the size
    of each dimension as four big-endian bytes; the values follow.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(_LIMIT)  # a longer file fails the length check below
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}. Delete it and download it again.") from None
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise UserError(
            f"{path} is not an IDX file of bytes: it starts with {data[:4].hex(' ') or 'nothing'}, "
            "expected 00 00 08. Delete it and download it again."
        )
    start = 4 + 4 * data[3]
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    expected = start + math.prod(shape)
    if len(data) != expected:
        raise UserError(
            f"{path} is truncated or too long: it has {len(data)} bytes, but its header says "
            f"{expected}. Delete it and download it again."
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


_BASES = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
_SOURCE = Source(
    downloads=tuple(
        replace(same_file(f"{file}.gz", checksum, *_BASES), into="raw", limit=10**9)
        for file, checksum in FILES.items()
    ),
    elsewhere=("torchvision.datasets.MNIST(DIR, download=True) creates the same DIR/MNIST/raw",),
    holds=tuple(f"raw/{file}" for file in FILES),
)

ROTATED_MNIST = DatasetSpec(
    name="RotatedMNIST",
    domains=ANGLES,
    labels=ANGLES,
    n_classes=10,
    citation="Ghifary et al., Domain Generalization for Object Recognition with Multi-task "
    "Autoencoders, ICCV 2015",
    read=rotated,
    folder="MNIST",
    counts=(11667, 11667, 11667, 11667, 11666, 11666),
    checkpoint_every=100,
    batch_size=64,
    batch_exponents=(3, 9),
    image_size=28,
    channels=1,
    augment=False,
    backbone="mnist-cnn",
    pretrained=False,
    source=_SOURCE,
)
COLORED_MNIST = replace(
    ROTATED_MNIST,
    name="ColoredMNIST",
    domains=COLORS,
    labels=COLORS,
    n_classes=2,
    citation="Arjovsky et al., Invariant Risk Minimization, 2019",
    read=colored,
    counts=(23334, 23333, 23333),
    channels=2,
)
