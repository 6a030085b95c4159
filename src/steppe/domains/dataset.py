"""What a dataset is: named domains in a fixed order, each with images and labels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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

FORMATS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".png": "PNG",
    ".bmp": "BMP",
    ".ppm": "PPM",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
    ".pgm": "PPM",
}
"""The endings of image files, and the formats that Pillow may find in them, whatever the ending.

Pillow knows forty more. Some start other programs (PostScript), and some were never meant for files
from strangers.
"""
_FORMATS = (*dict.fromkeys(FORMATS.values()), "GIF")  # which datasets from the web call .jpg


class UnreadableImage(UserError):
    """An image file that cannot be decoded; the message has its path."""


class Images(Protocol):
    """The images of a domain, wherever they are kept."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Pixels: ...

    def name(self, index: int, /) -> str:
        """What the image is called inside its domain, such as ``dog/pic_001.jpg``."""
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
    """Image files below a folder, decoded to RGB when asked for."""

    root: Path
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int, /) -> Pixels:
        return decode(self.root / self.names[index])

    def name(self, index: int, /) -> str:
        return self.names[index]


def decode(path: Path) -> Pixels:
    """Reads an image file of 8 bits a channel as RGB; a truncated file is an error.

    So is one of 16 bits or of floating point: Pillow would cut its values off at 255, to white.
    A file that is not a plain one is an error too, and is not waited for.
    """
    from PIL import Image, UnidentifiedImageError  # slow to import, and records do not need it

    try:
        with plain(path) as file, Image.open(file, formats=_FORMATS) as image:
            return rgb(image)
    except UnidentifiedImageError:
        raise UnreadableImage(
            f"image {path} cannot be read: it is not a {', '.join(_FORMATS[:-1])} or "
            f"{_FORMATS[-1]} file"
        ) from None
    except Exception as error:  # Pillow's decoders raise anything when the bytes are wrong
        raise UnreadableImage(f"image {path} cannot be read: {reason(error)}") from None


def rgb(image: Image.Image) -> Pixels:
    """The pixels of a Pillow image of 8 bits a channel, as RGB."""
    if image.mode.startswith(("I", "F")):
        raise UserError(f"its mode is {image.mode!r}; convert it to 8 bits a channel")
    # By way of RGBA where there is transparency: Pillow asks for it, with a warning.
    seen = image.convert("RGBA") if "transparency" in image.info else image
    return np.asarray(seen if seen.mode == "RGB" else seen.convert("RGB"))


def with_channels(pixels: Pixels, channels: int) -> Pixels:
    """An image in color as gray (1 channel), a gray one as RGB (3), any other as it is."""
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).convert("L"))[..., None]


@dataclass(frozen=True)
class Domain:
    """One domain of a dataset: its images, and the class of each as an index."""

    name: str
    """What configs and records call it; the folder's name where there is one."""
    images: Images
    labels: Indices
    subsets: Mapping[str, Indices] = field(default_factory=dict)
    """Official ``train``, ``val`` and ``test``, as indices: they replace the random split."""

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(
                f"domain {self.name!r} has {len(self.images)} images, {len(self.labels)} labels"
            )

    def __len__(self) -> int:
        return len(self.labels)


Contents = tuple[Sequence[str], Sequence[Domain]]
"""What reading a dataset gives: the class names and the domains, in order."""


@dataclass(frozen=True)
class Dataset:
    """A dataset that is ready to be read; classes are in the order of their indices."""

    spec: DatasetSpec
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]
    origin: str
    """Where the images come from, for people: ``"files in data/PACS"``."""
    shrunk_to: int | None = None
    """The shorter side that a pack shrank larger images to; None: the pixels are the files'."""

    def fingerprint(self) -> str:
        """A checksum of the names and labels of all images, in order.

        A run that is resumed must find the images it started with, or its splits would be others.
        The same for files and for a pack made from them.
        """
        digest = hashlib.sha256(repr(self.classes).encode())
        for domain in self.domains:
            # A name need not be text: archives from other systems have such.
            names = [domain.name, *(domain.images.name(i) for i in range(len(domain)))]
            digest.update("\n".join(names).encode(errors="surrogateescape"))
            digest.update(np.ascontiguousarray(domain.labels, dtype="<i8").tobytes())
        return digest.hexdigest()
