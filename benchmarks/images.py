"""Images to measure on: a folder of the user's, or enlarged doodles; and a pack of either."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from steppe.console import Console, say, stderr
from steppe.domains import load, packing
from steppe.domains.pack import Packed, location, remedy
from steppe.errors import UserError

PIXELS = 227  # the side of photograph-sized images, as in PACS


@contextmanager
def packed_images(images: Path | None = None, per_class: int = 24) -> Iterator[Path]:
    """A folder, or a temporary one of doodles, with a pack beside it, which is made if need be."""
    if images is not None:
        check_folder(images)
        _pack(images, stderr())
        yield images
        return
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
        root = Path(home) / "images"
        write_doodles(root, per_class)
        _pack(root, None)
        yield root


def check_folder(images: Path) -> None:
    if not images.is_dir():
        raise UserError(f"{images} is not a folder; expected {images}/<domain>/<class>/<image>")


def name_of(images: Path | None) -> str:
    return "doodles, enlarged" if images is None else images.resolve().name


def write_doodles(root: Path, per_class: int = 24) -> None:
    """Photograph-sized images in four domains and seven classes: only size matters to the time."""
    doodles = load("Doodles")
    for domain in doodles.domains:
        for label, name in enumerate(doodles.classes[:7]):
            folder = root / domain.name / name
            folder.mkdir(parents=True)
            for i in np.flatnonzero(domain.labels == label)[:per_class]:
                image = Image.fromarray(domain.images[int(i)])
                image.resize((PIXELS, PIXELS)).save(folder / f"{i}.jpg", quality=90)


def _pack(root: Path, console: Console | None) -> None:
    dataset = load(root)
    if all(isinstance(domain.images, Packed) for domain in dataset.domains):
        return
    path = location(dataset.spec, root.parent)
    if path.exists():  # and cannot be used, as a warning has said
        raise UserError(f"pack {path} is not used. {remedy(dataset.spec.name)}")
    packing.make(dataset, root.parent, console=console)
    if console is not None:
        say(console, f"{path}: runs on these images use it from now on")
