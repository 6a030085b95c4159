"""A dataset: named domains in a fixed order, each with images and labels."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from steppe.errors import UserError, reason
from steppe.strangers import plain

if TYPE_CHECKING:
    from PIL import Image

    from .spec import DatasetSpec

Pixels = NDArray[np.uint8]
"""One image, height x width x channels."""
Indices = NDArray[np.int64]

FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP", "GIF")
"""The formats that Pillow may decode, whatever a file's suffix: the web has GIFs named .jpg.

The forty other formats that Pillow supports are off: some start other programs (PostScript), and
some are unsafe for untrusted files.
"""


class UnreadableImage(UserError):
    """An image file cannot be decoded; the message has its path."""


class Images(Protocol):
    """The images of a domain, wherever they are stored."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Pixels: ...

    def name(self, index: int, /) -> str:
        """Return the image's name inside its domain, such as ``dog/pic_001.jpg``."""
        ...


@dataclass(frozen=True)
class Arrays:
    """Images of one size in memory: N x height x width x channels, uint8."""

    pixels: Pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int, /) -> Pixels:
        return cast(Pixels, self.pixels[index])

    def name(self, index: int, /) -> str:
        return str(index)


@dataclass(frozen=True)
class Files:
    """Image files below a folder, decoded to RGB on access."""

    root: Path
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int, /) -> Pixels:
        return decode(self.root / self.names[index])

    def name(self, index: int, /) -> str:
        return self.names[index]


_FILTERS = Lock()


def decode(path: Path) -> Pixels:
    """Read an image file with 8 bits per channel as RGB.

    Raises:
        UnreadableImage: the file is truncated, is not a regular file (a FIFO would block), or has
            16-bit or floating-point values, which Pillow would clip to white.
    """
    from PIL import Image, UnidentifiedImageError  # slow to import, and records do not need it

    try:
        with plain(path) as file:
            # Filters of warnings belong to the process, and images are also read by threads.
            with _FILTERS, warnings.catch_warnings():
                # Pillow refuses what is twice as large; up to there it would only warn.
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = Image.open(file, formats=FORMATS)
            with image:
                return rgb(image)
    except UnidentifiedImageError:
        raise UnreadableImage(
            f"image {path} cannot be read: it is not a {', '.join(FORMATS[:-1])} or "
            f"{FORMATS[-1]} file"
        ) from None
    except Exception as error:  # Pillow's decoders may raise any exception
        raise UnreadableImage(f"image {path} cannot be read: {reason(error)}") from None


def rgb(image: Image.Image) -> Pixels:
    """Return the pixels of a Pillow image as RGB; it must have 8 bits per channel."""
    if image.mode.startswith(("I", "F")):
        raise UserError(f"its mode is {image.mode!r}; convert it to 8 bits per channel")
    # Pillow warns unless an image with transparency goes through RGBA.
    seen = image.convert("RGBA") if "transparency" in image.info else image
    return np.asarray(seen if seen.mode == "RGB" else seen.convert("RGB"))


def with_channels(pixels: Pixels, channels: int) -> Pixels:
    """Convert an image to gray (1 channel) or to RGB (3 channels)."""
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).convert("L"))[..., None]


@dataclass(frozen=True)
class Domain:
    """One domain of a dataset: its images and their class indices."""

    name: str
    """The name in configs and records: the folder's name if it has one."""
    images: Images
    labels: Indices
    subsets: Mapping[str, Indices] = field(default_factory=dict)
    """Indices of the official ``train``, ``val`` and ``test``; they replace the random split."""

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(
                f"domain {self.name!r} has {len(self.images)} images but {len(self.labels)} labels"
            )

    def __len__(self) -> int:
        return len(self.labels)


Contents = tuple[Sequence[str], Sequence[Domain]]
"""The class names and the domains of a dataset, in order."""


@dataclass(frozen=True)
class Dataset:
    """An opened dataset; its classes are in the order of their indices."""

    spec: DatasetSpec
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]
    origin: str
    """Where the images come from, in words: ``"files in data/PACS"``."""
    shrunk_to: int | None = None
    """The shorter side to which a pack shrank larger images; None if it shrank none."""

    def fingerprint(self) -> str:
        """Return a checksum of the names and labels of all images, in order.

        A resumed run compares it, because other images would give other splits. Files and a pack
        made from them have the same fingerprint.
        """
        digest = hashlib.sha256(repr(self.classes).encode())
        for domain in self.domains:
            # File names from archives made on other systems may not be valid UTF-8.
            names = [domain.name, *(domain.images.name(i) for i in range(len(domain)))]
            digest.update("\n".join(names).encode(errors="surrogateescape"))
            digest.update(np.ascontiguousarray(domain.labels, dtype="<i8").tobytes())
        return digest.hexdigest()
