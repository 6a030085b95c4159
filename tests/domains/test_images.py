"""Image files: which formats are read, and what is never opened for good."""

import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from steppe.domains import check, dataset_spec, load, packing
from steppe.domains.dataset import FORMATS, UnreadableImage, decode
from steppe.errors import UserError

from .mutations import images

READ = frozenset(FORMATS)


@pytest.mark.parametrize(("name", "data"), images(), ids=[name for name, _ in images()])
def test_only_known_formats_are_read(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / "misnamed.jpg"  # as crawlers name them
    path.write_bytes(data)
    with Image.open(path) as image:
        known = image.format in READ
    if known:
        with Image.open(path) as image:
            expected = np.asarray(image.convert("RGBA").convert("RGB"))
        if image.mode != "CMYK":  # by way of RGBA it has other pixels
            np.testing.assert_array_equal(decode(path), expected)
        assert decode(path).ndim == 3
    else:
        with pytest.raises(
            UnreadableImage, match="not a JPEG, PNG, BMP, PPM, TIFF, WEBP or GIF file"
        ):
            decode(path)


def test_postscript_does_not_start_ghostscript(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gs = tmp_path / "gs"
    gs.write_text(f"#!/bin/sh\necho 10.0\ntouch '{tmp_path}/started'\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # not looked for so far
    path = tmp_path / "x.png"
    path.write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with pytest.raises(UnreadableImage):
        decode(path)
    assert not (tmp_path / "started").exists()


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    Image.new("L", (11, 10)).save(tmp_path / "x.png")
    with pytest.raises(UnreadableImage, match="decompression bomb"):
        decode(tmp_path / "x.png")


def test_a_large_image_is_read_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60)
    Image.new("L", (11, 10)).save(tmp_path / "x.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(tmp_path / "x.png").shape == (10, 11, 3)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)  # a socket's path is at most 107 bytes long
        made.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def nowhere(path: Path) -> None:
    path.symlink_to("missing")


@pytest.mark.parametrize("make", [fifo, device, unix_socket, nowhere])
def test_what_is_not_a_plain_file_is_named_and_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    root = tmp_path / "own"
    for domain in ("ink", "oil"):
        (root / domain / "dog").mkdir(parents=True)
        color = (len(domain), ord(domain[1]), 0)
        Image.new("RGB", (3, 4), color).save(root / domain / "dog" / "1.png")
    odd = root / "ink" / "dog" / "2.png"
    make(odd)
    with pytest.raises(UnreadableImage, match=f"image {odd} cannot be read: "):
        decode(odd)
    report = check.check(dataset_spec(root), tmp_path)
    assert report.unreadable == (str(odd),)
    with pytest.raises(UserError, match=f"1 of its images.*\n.*{odd}"):
        packing.make(load(root), tmp_path)


def test_a_folder_with_the_name_of_an_image_is_a_folder(tmp_path: Path) -> None:
    for domain in ("ink", "oil"):
        (tmp_path / domain / "dog" / "more.png").mkdir(parents=True)
        Image.new("RGB", (3, 4)).save(tmp_path / domain / "dog" / "more.png" / "1.png")
    ink = load(tmp_path).domains[0].images
    assert [ink.name(i) for i in range(len(ink))] == ["dog/more.png/1.png"]
    with pytest.raises(UnreadableImage, match="not a plain file"):
        decode(tmp_path / "ink" / "dog" / "more.png")
