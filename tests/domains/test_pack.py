"""Packs: the same pixels as the files, or the files themselves with a word of why."""

import io
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from torch.utils.data import DataLoader

from steppe.domains import Dataset, Domain, Files, dataset_spec, load, pack, packing, pool
from steppe.errors import UserError
from tests.limits import seconds

SHAPES = {"dog/a.png": (30, 40), "dog/b.png": (40, 30), "cat/ä b.png": (7, 9)}
MODES = ("L", "RGB", "RGBA")


def paint(path: Path, shape: tuple[int, int], seed: int, mode: str = "RGB") -> None:
    pixels = np.random.default_rng(seed).integers(256, size=(*shape, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two domains of three small images, in more than one mode."""
    for number, domain in enumerate(("ink", "oil paint")):
        for seed, (name, shape) in enumerate(SHAPES.items()):
            paint(tmp_path / "own" / domain / name, shape, 10 * number + seed, MODES[seed])
    return tmp_path / "own"


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="steppe")
    return caplog


def make(root: Path, size: int = 256, **options: Any) -> Path:
    return packing.make(load(root, packed=False), root.parent, size, **options)


def all_pixels(dataset: Dataset) -> list[np.ndarray]:
    return [domain.images[i] for domain in dataset.domains for i in range(len(domain))]


def assert_same(found: Dataset, expected: Dataset) -> None:
    assert found.fingerprint() == expected.fingerprint()
    for one, other in zip(all_pixels(found), all_pixels(expected), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def test_small_images_are_packed_to_the_bit(
    root: Path, monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packing, "SHARD_BYTES", 4000)  # an image of 30 x 40 has 3,600
    shown = io.StringIO()
    path = make(root, console=Console(file=shown))
    assert path == root.parent / "own.pack"
    assert "packing" in shown.getvalue()
    assert "6 of 6" in shown.getvalue()
    # Sorted: "cat/ä b.png" (189 bytes) and "dog/a.png" fit together, "dog/b.png" does not.
    assert (path / "oil paint-000.bin").stat().st_size == 3789
    assert (path / "oil paint-001.bin").stat().st_size == 3600
    packed = load(root)
    assert packed.origin == f"pack in {path} (shorter side at most 256)"
    assert_same(packed, load(root, packed=False))
    assert [domain.images.name(0) for domain in packed.domains] == ["cat/ä b.png"] * 2
    packed.domains[0].images[0][:] = 0  # a copy: the pack stays as it is
    assert packed.domains[0].images[0].any()
    assert pack.verify(path) == []
    assert os.listdir(root.parent) in (["own", "own.pack"], ["own.pack", "own"])
    assert not messages.records


def test_large_images_keep_their_aspect(root: Path) -> None:
    paint(root / "ink/dog/a.png", (60, 101), 0)
    make(root, size=20)
    ink = load(root).domains[0].images
    assert [ink[i].shape for i in range(3)] == [(7, 9, 3), (20, 33, 3), (26, 20, 3)]
    with Image.open(root / "ink/dog/a.png") as image:
        expected = np.asarray(image.resize((33, 20), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(ink[1], expected)


def test_a_pack_serves_alone_with_its_subsets(tmp_path: Path, root: Path) -> None:
    def read(folder: Path) -> tuple[list[str], list[Domain]]:
        if not folder.is_dir():
            raise UserError("no such folder")
        subsets = {"train": np.array([2, 0]), "val": np.array([1])}
        files = Files(folder / "ink", list(SHAPES))
        return ["dog", "cat"], [Domain("ink", files, np.array([0, 0, 1]), subsets)]

    spec = replace(dataset_spec(root), name="Mine", domains=("ink",), folder="own", read=read)
    dataset = Dataset(spec, ("dog", "cat"), tuple(read(root)[1]), "files")
    expected = all_pixels(dataset)
    path = packing.make(dataset, tmp_path, 256)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(path, elsewhere / path.name)
    packed = pack.find(spec, elsewhere)
    assert packed is not None
    assert packed.fingerprint() == dataset.fingerprint()
    assert {k: v.tolist() for k, v in packed.domains[0].subsets.items()} == {
        "train": [2, 0],
        "val": [1],
    }
    for one, other in zip(all_pixels(packed), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_changed_byte_is_an_error_when_it_is_read(root: Path) -> None:
    path = make(root)
    shard = path / "ink-000.bin"
    content = bytearray(shard.read_bytes())
    content[189 + 5] ^= 1  # in the second image
    shard.write_bytes(content)
    images = load(root).domains[0].images
    images[0]
    with pytest.raises(UserError, match=r"ink-000.bin is damaged.*dog/a.png.*data pack .*--force"):
        images[1]
    problems = pack.verify(path)
    assert len(problems) == 1
    assert "ink-000.bin is damaged" in problems[0]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def newer(path: Path) -> None:
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"format": 2, "something": "new"}))


def other_class(path: Path) -> None:
    path.write_text(path.read_text().replace('"dog"', '"doe"'))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("ink-000.bin", truncate, "ink-000.bin has 7,388 bytes instead of 7,389"),
        ("ink-000.bin", Path.unlink, "ink-000.bin is missing"),
        ("ink.npy", truncate, "ink.npy is damaged"),
        ("ink.json", Path.unlink, "ink.json is missing"),
        ("index.json", truncate, "index.json is damaged"),
        ("index.json", other_class, "index.json is damaged"),
        ("index.json", newer, "format 2, and this steppe reads 1"),
        ("index.json", Path.unlink, "index.json cannot be read"),
    ],
)
def test_a_damaged_pack_gives_way_to_the_files(
    root: Path,
    messages: pytest.LogCaptureFixture,
    file: str,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    path = make(root)
    damage(path / file)
    assert load(root).origin == f"files in {root}"
    assert f"pack {path} is not used" in messages.text
    assert message in messages.text
    assert "data pack" in messages.text
    assert message in pack.verify(path)[0]


def grow(root: Path) -> None:
    with open(root / "ink/dog/a.png", "ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (grow, "ink/dog/a.png has changed"),
        (lambda root: paint(root / "ink/dog/c.png", (5, 5), 0), "1 were added and 0 removed"),
        (lambda root: (root / "ink/dog/a.png").unlink(), "0 were added and 1 removed"),
        (lambda root: (root / "ink/dog").rename(root / "ink/ape"), "it has 2 classes"),
    ],
)
def test_a_stale_pack_gives_way_to_the_files(
    root: Path, messages: pytest.LogCaptureFixture, change: Callable[[Path], object], message: str
) -> None:
    make(root)
    change(root)
    assert load(root).origin == f"files in {root}"
    assert message in messages.text


def test_a_pack_outlives_its_images(root: Path, messages: pytest.LogCaptureFixture) -> None:
    spec = replace(dataset_spec(root), folder="own")
    path = make(root)
    shutil.rmtree(root / "ink")
    found = pack.find(spec, root.parent)
    assert found is not None
    assert str(path) in found.origin
    assert "used as it is" in messages.text


def test_unreadable_images_are_all_named_and_nothing_is_left(root: Path) -> None:
    truncated = root / "ink/dog/a.png"
    truncated.write_bytes(truncated.read_bytes()[:100])
    empty = root / "oil paint/cat/ä b.png"
    empty.write_bytes(b"")
    with pytest.raises(UserError) as error:
        make(root)
    assert str(truncated) in str(error.value)
    assert str(empty) in str(error.value)
    assert os.listdir(root.parent) == ["own"]


def test_a_pack_is_replaced_only_by_force(root: Path) -> None:
    path = make(root)
    before = (path / "index.json").stat().st_ino
    with pytest.raises(UserError, match="--force"):
        make(root)
    assert (path / "index.json").stat().st_ino == before
    make(root, size=5, force=True)
    assert load(root).domains[0].images[0].shape == (5, 6, 3)
    assert sorted(os.listdir(root.parent)) == ["own", "own.pack"]


def test_a_full_disk_leaves_no_half_pack(root: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))  # a shard here has 7,389 bytes
    try:
        with pytest.raises(UserError, match="own.pack could not be written: File too large.*room"):
            make(root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(root.parent) == ["own"]


def test_only_image_files_can_be_packed(tmp_path: Path, root: Path) -> None:
    with pytest.raises(UserError, match="in memory"):
        packing.make(load("RotatedDigits"), tmp_path)
    make(root)
    with pytest.raises(UserError, match="only those can be packed"):
        packing.make(load(root), tmp_path, force=True)


def test_a_working_packer_is_left_alone(root: Path) -> None:
    with packing._workshop(root.parent / "own.pack") as folder:
        make(root)
        assert folder.is_dir()


PACKER = """
import sys
from pathlib import Path
from steppe.domains import load, packing, pool

if __name__ == "__main__":
    pool._WORTHWHILE = 1
    root = Path(sys.argv[1])
    packing.make(load(root, packed=False), root.parent, 20, jobs=2)
"""


def test_a_killed_packer_leaves_nothing_that_is_used(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paint(root / "ink/dog/large.png", (1500, 1500), 0)
    for number in range(40):
        os.link(root / "ink/dog/large.png", root / f"ink/dog/large{number}.png")
    packer = subprocess.Popen(
        [sys.executable, "-c", PACKER, str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + seconds(600)
    while not any(file.stat().st_size for file in root.parent.glob(".own.pack.*/new/*.bin")):
        assert time.monotonic() < deadline
        assert packer.poll() is None, packer.communicate()
        time.sleep(0.01)
    packer.send_signal(signal.SIGKILL)
    # Its processes hold the other ends of these pipes: they have ended too.
    packer.communicate(timeout=seconds(300))
    assert list(root.parent.glob(".own.pack.*"))
    assert load(root).origin == f"files in {root}"

    monkeypatch.setattr(pool, "_WORTHWHILE", 1)
    path = make(root, jobs=2)
    assert sorted(os.listdir(root.parent)) == ["own", "own.pack"]
    assert pack.verify(path) == []
    packed, files = load(root).domains[1].images, load(root, packed=False).domains[1].images
    for index in range(3):
        np.testing.assert_array_equal(packed[index], files[index])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_loader_read_the_pack(root: Path, method: str) -> None:
    make(root)
    images = load(root).domains[0].images
    expected = [images[i].copy() for i in range(3)]  # the map is open when the workers start
    assert len(pickle.dumps(images)) < 10_000
    loader = DataLoader(images, batch_size=None, num_workers=2, multiprocessing_context=method)
    for found, pixels in zip(loader, expected, strict=True):
        np.testing.assert_array_equal(found, pixels)
