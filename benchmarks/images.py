"""Images to measure on: the user's folder or enlarged doodles, optionally packed."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image

from steppe.console import Console, say, stderr
from steppe.domains import load, packing
from steppe.domains.pack import Packed, location, remedy
from steppe.errors import UserError

PIXELS = 227  # image height and width, as in PACS
MIXED = (64, 256)  # the range of each, where images differ


@contextmanager
def image_folder(
    images: Path | None = None, per_class: int = 24, mixed: bool = False
) -> Iterator[Path]:
    """Yield the user's folder, or a temporary one of enlarged doodles in seven classes.

    Their heights and widths are `PIXELS`, or `MIXED`.
    """
    if images is not None:
        check_folder(images)
        yield images
        return
    doodles, rng = load("Doodles"), np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
        root = Path(home) / "enlarged doodles"
        for domain, (label, name) in product(doodles.domains, enumerate(doodles.classes[:7])):
            folder = root / domain.name / name
            folder.mkdir(parents=True)
            for i in np.flatnonzero(domain.labels == label)[:per_class]:
                image = Image.fromarray(domain.images[int(i)])
                low, high = MIXED if mixed else (PIXELS, PIXELS)
                image = image.resize(rng.integers(low, high, size=2, endpoint=True))
                image.save(folder / f"{i}.jpg", quality=90)
        yield root


@contextmanager
def packed_images(
    images: Path | None = None, per_class: int = 24, mixed: bool = False
) -> Iterator[Path]:
    """Like `image_folder`, with a pack next to the folder."""
    with image_folder(images, per_class, mixed) as root:
        _pack(root, None if images is None else stderr())
        yield root


def check_folder(images: Path) -> None:
    if not images.is_dir():
        raise UserError(f"{images} is not a folder; expected {images}/<domain>/<class>/<image>")


def name_of(images: Path | None) -> str:
    return "doodles, enlarged" if images is None else images.resolve().name


def _pack(root: Path, console: Console | None) -> None:
    dataset = load(root)
    if all(isinstance(domain.images, Packed) for domain in dataset.domains):
        return
    path = location(dataset.spec, root.parent)
    if path.exists():  # load has already warned why
        raise UserError(f"pack {path} cannot be used. {remedy(dataset.spec.name)}")
    packing.make(dataset, root.parent, console=console)
    if console is not None:
        say(console, f"{path}: future runs on these images will use this pack")
