"""RotatedMNIST and ColoredMNIST, made from MNIST's four files as DomainBed makes them.

The 70,000 digits are shuffled, and domain i of n takes every n-th from the i-th on, so that no
digit is in two domains. DomainBed shuffles with the run's seed, which makes another dataset of
every run; here one `RandomState(0)` draws everything, in this order: the permutation, then, for
ColoredMNIST and each domain in turn, the flips of its labels and the flips of its colours.
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
"""How often, and in which direction, the colour agrees with the label."""
FILES = {
    "train-images-idx3-ubyte": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}
"""MNIST's files; each may also be there with ``.gz``, of which torchvision has the checksums."""

_LIMIT = 2**28
"""More bytes than a file of MNIST has: 47 million."""

DIGITS = tuple(str(digit) for digit in range(10))
_LABEL_FLIPS = 0.25
_COLOR_FLIPS = (0.1, 0.2, 0.9)


def rotated(root: Path) -> Contents:
    """RotatedMNIST: ten digits, one domain for each angle.

    DomainBed's interpolation was bicubic for its first published tables and has been bilinear since
    torchvision named it so; it is bilinear here.
    """
    images, labels, _ = _shuffled(root)
    return DIGITS, at_angles(images, labels)


def colored(root: Path) -> Contents:
    """ColoredMNIST: is the digit below five, with a colour that misleads in the last domain.

    The label is flipped first, and the colour follows the flipped label: 75 % is the best that the
    shape of the digit can do, and 90 % the best that its colour can do where it can be trusted. The
    colour is the one of two channels that is not black.
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
    """Deals grey images, N x height x width, to one domain for each angle."""
    n = len(ANGLES)
    return tuple(
        Domain(angle, Arrays(rotate(images[i::n], float(angle))[..., None]), labels[i::n])
        for i, angle in enumerate(ANGLES)
    )


def rotate(images: Pixels, degrees: float) -> Pixels:
    """Turns grey images, N x height x width, counter-clockwise; bilinear, black around.

    The same pixels as torchvision's `rotate` of a Pillow image, which is what DomainBed calls.
    """
    from PIL import Image  # slow to import, and naming datasets does not need it

    turned = [
        np.asarray(Image.fromarray(image).rotate(degrees, Image.Resampling.BILINEAR))
        for image in images
    ]
    return np.stack(turned)


def _shuffled(root: Path) -> tuple[Pixels, Indices, RandomState]:
    """All of MNIST in a fixed random order, and the generator to go on with."""
    paths = [_find(root, name) for name in FILES]
    if missing := [name for name, path in zip(FILES, paths, strict=True) if path is None]:
        raise UserError(
            f"MNIST not found in {root} or {root / 'raw'}: {', '.join(missing)} missing (or the "
            "same with .gz). Try 'steppe data get RotatedMNIST'."
        )
    parts = [read_idx(path) for path in paths if path is not None]
    for path, part, dimensions in zip(paths, parts, (3, 1, 3, 1), strict=True):
        if part.ndim != dimensions:
            raise UserError(f"{path} has {part.ndim} dimensions where MNIST has {dimensions}")
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
    """Reads an array of bytes from a file in MNIST's IDX format, compressed or not.

    The file starts with two zeros, the type (8 for bytes) and the number of dimensions, then the
    size of each dimension as four bytes, the highest first; the values follow.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(_LIMIT)  # what is longer does not have the length that it says
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}. Delete it and download it again.") from None
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise UserError(
            f"{path} is not an IDX file of bytes: it starts with {data[:4].hex(' ') or 'nothing'}, "
            "expected 00 00 08"
        )
    start = 4 + 4 * data[3]
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    expected = start + math.prod(shape)
    if len(data) != expected:
        raise UserError(
            f"{path} is cut off or too long: it has {len(data)} bytes, its header asks for "
            f"{expected}. Delete it and download it again."
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


_BASES = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
_SOURCE = Source(
    downloads=tuple(
        replace(same_file(f"{file}.gz", checksum, *_BASES), into="raw", limit=10**9)
        for file, checksum in FILES.items()
    ),
    elsewhere=("torchvision.datasets.MNIST(DIR, download=True) makes the same MNIST/raw in DIR",),
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
