"""`benchmarks/data.py`: rates are of what they are called, and the disk's are of the disk."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import data
import numpy as np
import pytest
import torch
from images import packed_images
from PIL import Image

from steppe.domains import load
from steppe.domains.batches import Batch, Sampling
from steppe.domains.dataset import Files, Pixels
from steppe.domains.pack import Packed
from steppe.domains.pool import cores
from steppe.domains.store import Host
from steppe.errors import UserError

CPU = torch.device("cpu")
SIZES = {"ink": 6, "oil": 9}
"""Images of each of two classes."""
SIDES = (30, 40)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A folder of small JPEG files: two domains, two classes."""
    rng = np.random.default_rng(0)
    for domain, n in SIZES.items():
        for name in ("cat", "dog"):
            folder = tmp_path / "pets" / domain / name
            folder.mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(256, size=(*SIDES, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.jpg")
    return tmp_path / "pets"


class Clock:
    """Time that passes when images are read, and a little whenever someone looks."""

    look = 1e-6

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.look
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(data, "time", SimpleNamespace(perf_counter=clock))

    def slow(images: Any, seconds: float) -> None:
        read: Callable[[Any, int], Pixels] = images.__getitem__

        def getitem(self: Any, index: int) -> Pixels:
            clock.now += seconds
            return read(self, index)

        monkeypatch.setattr(images, "__getitem__", getitem)

    slow(Files, 0.010)
    slow(Packed, 0.002)
    return clock


@pytest.mark.usefixtures("clock")
def test_rates_are_those_of_known_costs(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "CHUNK", 8192)  # the files of the pack are longer
    options = data.Options(device="cpu", images=pets, batch=5, workers=0, rounds=2, batches=3)
    result = data.measure(options)
    rates = {name: spread["median"] for name, spread in result["images per second"].items()}
    ratios = {name: spread["max"] for name, spread in result["ratios"].items()}
    pixels = 3 * SIDES[0] * SIDES[1]
    assert result["batch"] == "2 x 2"
    assert result["images read singly"] == 2 * 6
    assert result["files"] == ".jpg"
    assert result["bytes of an image"]["packed"] == pixels
    close = partial(pytest.approx, rel=1e-3)
    assert rates[data.DECODER] == close(100)
    assert rates[data.TRAINING_FILES] == close(100)
    assert rates[data.EVALUATION_FILES] == close(100)
    assert rates[data.PACKED] == close(500)
    assert rates[data.TRAINING_PACK] == close(500)
    assert rates[data.EVALUATION_PACK] == close(500)
    assert rates[f"{data.DECODER}, all cores"] == close(100 * cores())
    assert ratios["packed over decoding"] == close(5)
    assert ratios["training, pack over files"] == close(5)
    assert ratios["evaluation, pack over files"] == close(5)
    assert data.STREAM not in rates  # a CPU leaves it to Pillow
    assert ratios["training from files over decoding on all cores"] == close(1 / cores())
    # Every look at the clock, every byte of the pack is read.
    whole = 2 * sum(SIZES.values()) / Clock.look
    assert rates[data.CACHE] == close(whole)
    assert result["MB per second"][data.CACHE]["median"] == close(whole * pixels / 1e6)


def test_the_clock_starts_when_all_workers_are_at_work(pets: Path, clock: Clock) -> None:
    """Three workers: three batches to warm up, and six where four are asked for."""

    class Slow(Host):
        arrived = 0

        def training(self, sampling: Sampling, start: int, stop: int) -> Iterator[list[Batch]]:
            for step in range(start, stop):
                self.arrived += 1
                clock.now += 100.0 if step < self.workers else 1.0
                yield [Batch(torch.zeros(0), torch.zeros(sampling.batch_size))] * 2

    store = Slow(CPU, workers=3)
    with packed_images(pets) as root:
        sample = data.draw(root, batch=8, batches=4)
        rate = data.train_rate(store, sample.packed, sample, CPU, 4)
    assert store.arrived == 3 + 6
    assert rate == pytest.approx(8, rel=1e-3)


@pytest.mark.usefixtures("clock")
def test_every_place_of_a_runs_images_is_measured(pets: Path) -> None:
    """Streamed pixels are read whenever they are wanted, those on the device once for all."""
    with packed_images(pets) as root:
        sample = data.draw(root, batch=4, batches=2)
        sample = replace(
            sample, packed=replace(sample.packed, spec=replace(sample.packed.spec, image_size=8))
        )
        found = data.contenders(sample, CPU, 0, 2, ("stream", "device"))
        assert found[data.STREAM]() == pytest.approx(500, rel=1e-3)
        assert found[data.RESIDENT]() == pytest.approx(8 / Clock.look, rel=1e-3)


def test_the_first_reading_is_not_timed(clock: Clock) -> None:
    """It may be from the disk."""
    costs = iter([1000.0])

    def work() -> int:
        clock.now += next(costs, 0.1)
        return 7

    assert data.rate(work) == pytest.approx(70, rel=1e-3)


def test_a_sample_is_drawn_from_every_domain(pets: Path) -> None:
    with packed_images(pets) as root:
        few, many = (data.draw(root, batch=4, batches=n) for n in (5, 7))
    assert [len(chosen) for chosen in few.chosen] == [10, 10]
    assert [len(chosen) for chosen in many.chosen] == [12, 14]  # ink has no more
    for chosen, n in zip(many.chosen, SIZES.values(), strict=True):
        assert len(set(chosen.tolist())) == len(chosen)
        assert set(chosen.tolist()) <= set(range(2 * n))
    files = [f for d in few.files.domains for f in [d.images] if isinstance(f, Files)]
    sizes = [
        os.path.getsize(images.root / images.names[i])
        for images, chosen in zip(files, few.chosen, strict=True)
        for i in chosen
    ]
    assert few.mean(lambda rows: rows["source"]) == pytest.approx(np.mean(sizes))
    assert len(few) == 20


def test_a_pack_is_made_once_and_never_replaced(pets: Path) -> None:
    pack = pets.with_name("pets.pack")
    assert not pack.exists()
    for _ in range(2):
        with packed_images(pets) as root:
            assert root == pets
        index = (pack / "index.json").stat()
        assert isinstance(load(pets).domains[0].images, Packed)
    assert (pack / "index.json").stat() == index
    shard = next(pack.glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match="steppe data pack .*pets --force"):
        data.measure(data.Options(device="cpu", images=pets))
    with pytest.raises(UserError, match="cats is not a folder"):
        data.measure(data.Options(device="cpu", images=pets / "cats"))


def test_a_batch_has_an_image_of_every_domain(pets: Path) -> None:
    with pytest.raises(UserError, match="--batch 1 is fewer than the 2 domains"):
        data.measure(data.Options(device="cpu", images=pets, batch=1))


def in_memory(path: Path) -> float:
    """The share of a file's pages that the operating system has in memory, by its own account."""
    mapped = np.memmap(path, np.uint8, "r")
    pages = (ctypes.c_ubyte * -(-len(mapped) // os.sysconf("SC_PAGESIZE")))()
    address = ctypes.c_void_p(mapped.ctypes.data)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), pages) == 0
    return float(np.mean(np.frombuffer(bytes(pages), np.uint8) & 1))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what it has in memory")
def test_the_disk_is_read_past_the_systems_memory(pets: Path) -> None:
    """What was not in memory is not there afterwards either."""
    with packed_images(pets) as root:
        sample = data.draw(root, batch=4, batches=2)
    (shard, *_) = sample.shards
    with open(shard, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_memory(shard) > 0.1 or not data._opens(shard, data.DIRECT):
        pytest.skip("the file system does not forget")
    every = sum(path.stat().st_size for path in sample.shards)
    assert data._read(sample.shards, data.DIRECT) == every
    assert in_memory(shard) < 0.1
    assert data._read(sample.shards, 0) == every
    assert in_memory(shard) == 1
