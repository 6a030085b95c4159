"""Real images and archives, and damage done to them: the same for the same seed."""

import gzip
import io
import random
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image, features

Named = tuple[str, bytes]
"""A file's name and its bytes."""


def images() -> list[Named]:
    """Small images in the formats that are read, and in others that a file may hide."""
    noise = np.random.default_rng(0).integers(256, size=(24, 32, 4), dtype=np.uint8)
    picture = Image.fromarray(noise)
    kinds: list[tuple[str, str, str, dict[str, Any]]] = [
        ("a.png", "PNG", "RGB", {}),
        ("palette.png", "PNG", "P", {"transparency": 3}),
        ("alpha.png", "PNG", "RGBA", {}),
        ("bits.png", "PNG", "1", {}),
        ("a.jpg", "JPEG", "RGB", {}),
        ("progressive.jpg", "JPEG", "RGB", {"progressive": True}),
        ("gray.jpeg", "JPEG", "L", {}),
        ("cmyk.jpg", "JPEG", "CMYK", {}),
        ("a.bmp", "BMP", "RGB", {}),
        ("palette.bmp", "BMP", "P", {}),
        ("a.ppm", "PPM", "RGB", {}),
        ("a.pgm", "PPM", "L", {}),
        ("bits.ppm", "PPM", "1", {}),
        ("a.tif", "TIFF", "RGB", {}),
        ("lzw.tif", "TIFF", "RGB", {"compression": "tiff_lzw"}),
        ("zip.tiff", "TIFF", "RGBA", {"compression": "tiff_adobe_deflate"}),
        ("jpeg.tiff", "TIFF", "RGB", {"compression": "jpeg"}),
        ("fax.tiff", "TIFF", "1", {"compression": "group4"}),
        ("a.webp", "WEBP", "RGB", {}),
        ("lossless.webp", "WEBP", "RGBA", {"lossless": True}),
        ("gif.png", "GIF", "P", {}),
        ("postscript.png", "EPS", "RGB", {}),
        ("dds.png", "DDS", "RGBA", {}),
        ("blp.png", "BLP", "P", {}),
    ]
    if features.check("avif"):
        kinds.append(("avif.jpg", "AVIF", "RGB", {}))
    made = []
    for name, kind, mode, options in kinds:
        buffer = io.BytesIO()
        picture.convert(mode).save(buffer, kind, **options)
        made.append((name, buffer.getvalue()))
    made.append(("plain.ppm", b"P3\n4 2\n255\n" + b"7 200 13 " * 8))
    return made


def archives() -> list[Named]:
    """Small archives of every kind that is unpacked."""
    files = {f"kfold/photo/dog/{i}.jpg": bytes(range(256)) * (i + 1) for i in range(3)}
    files["kfold/a long name " + "x" * 120] = b"long"
    made = []
    for name, compression in (("a.zip", zipfile.ZIP_DEFLATED), ("stored.zip", zipfile.ZIP_STORED)):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", compression) as archive:
            archive.mkdir("kfold")
            for member, contents in files.items():
                archive.writestr(member, contents)
        made.append((name, buffer.getvalue()))
    for name, mode, style in (
        ("a.tar", "w", tarfile.PAX_FORMAT),
        ("gnu.tar", "w", tarfile.GNU_FORMAT),
        ("a.tar.gz", "w:gz", tarfile.PAX_FORMAT),
        ("gnu.tgz", "w:gz", tarfile.GNU_FORMAT),
    ):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode=mode, format=style) as tar:
            for member, contents in files.items():
                info = tarfile.TarInfo(member)
                info.size = len(contents)
                info.pax_headers = {"comment": "ü"} if style == tarfile.PAX_FORMAT else {}
                tar.addfile(info, io.BytesIO(contents))
            link = tarfile.TarInfo("kfold/copy.jpg")
            link.type, link.linkname = tarfile.LNKTYPE, "kfold/photo/dog/1.jpg"
            tar.addfile(link)
        made.append((name, buffer.getvalue()))
    made.append(("train-images-idx3-ubyte.gz", gzip.compress(bytes(range(256)) * 20)))
    return made


def mutated(originals: Sequence[Named], number: int, seed: int) -> Iterator[Named]:
    """That many damaged copies, of each original in turn, with one to three faults each."""
    rng = random.Random(seed)
    for index in range(number):
        name, contents = originals[index % len(originals)]
        data = bytearray(contents)
        for _ in range(rng.randint(1, 3)):
            rng.choice(_FAULTS)(rng, data, rng.choice(originals)[1])
        yield name, bytes(data)


def _truncate(rng: random.Random, data: bytearray, other: bytes) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _flip(rng: random.Random, data: bytearray, other: bytes) -> None:
    for _ in range(rng.randint(1, 8)):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _edit_header(rng: random.Random, data: bytearray, other: bytes) -> None:
    """Writes the numbers that readers stumble over, where sizes and offsets are."""
    value = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF))
    width = rng.choice((1, 2, 4))
    at = rng.randrange(min(len(data), 96) + 1)
    data[at : at + width] = (value % 256**width).to_bytes(width, rng.choice(("big", "little")))


def _splice(rng: random.Random, data: bytearray, other: bytes) -> None:
    """Puts a piece of another file over, or between, the bytes of this one."""
    start, length = rng.randrange(len(other)), rng.randint(1, 64)
    at = rng.randrange(len(data) + 1)
    data[at : at + rng.choice((0, length))] = other[start : start + length]


def _cut_out(rng: random.Random, data: bytearray, other: bytes) -> None:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.randint(1, 64)]


_FAULTS = (_truncate, _flip, _edit_header, _edit_header, _splice, _cut_out)
