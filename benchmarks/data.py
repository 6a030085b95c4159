"""Throughput of the data path from files and packs, compared with the disk and the decoder."""

import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from harness import IMAGES, DeviceOptions, Result, command, option, ratio, spread
from images import name_of, packed_images

from steppe.domains import Dataset, Split, load
from steppe.domains.batches import Sampling, View
from steppe.domains.dataset import Indices
from steppe.domains.pack import Packed
from steppe.domains.pool import cores
from steppe.domains.store import SHARE, Host, Store, open_store, size as store_size
from steppe.errors import UserError
from steppe.training.execution import choose_gears

LEAST = 0.25  # minimum seconds per measurement
READ_AT_MOST = 2**30  # bytes of a pack to read sequentially
CHUNK = 2**22  # bytes per read
DIRECT = getattr(os, "O_DIRECT", None)  # bypasses the page cache, where supported

DISK, CACHE = "disk: the pack, in order", "memory: the pack, in order"
DECODER = "decoding a file, one process"
ALL_CORES = f"{DECODER}, all cores"
PACKED = "reading a packed image, one process"
TRAINING_FILES = "training batches from files, transformed by Pillow"
TRAINING_PACK = "training batches from the pack, transformed by Pillow"
STREAM = "training batches from the pack, transformed on the device"
RESIDENT = "training batches from the device, transformed there"
PLACES = {"stream": STREAM, "device": RESIDENT}
EVALUATION_FILES = "evaluation batches from files, one process"
EVALUATION_PACK = "evaluation batches from the pack, one process"
RATIOS = {
    "packed over decoding": (PACKED, DECODER),
    "training, pack over files": (TRAINING_PACK, TRAINING_FILES),
    "training, streamed over files": (STREAM, TRAINING_FILES),
    "training, on the device over files": (RESIDENT, TRAINING_FILES),
    "evaluation, pack over files": (EVALUATION_PACK, EVALUATION_FILES),
    "training, streamed over the disk": (STREAM, DISK),
    "training from files over decoding on all cores": (TRAINING_FILES, ALL_CORES),
}


@dataclass(frozen=True, kw_only=True)
class Options(DeviceOptions):
    images: Path | None = IMAGES
    batch: int = option(96, "Images per batch, over all domains.", min=1)
    workers: int | None = option(None, "Reader processes (default: one per core).", min=0)
    rounds: int = option(5, "Number of measurements.", min=1)
    batches: int = option(4, "Batches per measurement.", min=1)


@dataclass(frozen=True)
class Sample:
    files: Dataset
    packed: Dataset
    chosen: tuple[Indices, ...]  # per domain
    share: int  # images per domain in a batch

    def __len__(self) -> int:
        return sum(map(len, self.chosen))

    @property
    def packs(self) -> list[Packed]:
        return [d.images for d in self.packed.domains if isinstance(d.images, Packed)]

    @property
    def shards(self) -> list[Path]:
        return [images.pack / shard.file for images in self.packs for shard in images.shards]

    def mean(self, size: Callable[[Any], Any]) -> float:
        every = [size(p.rows)[i] for p, i in zip(self.packs, self.chosen, strict=True)]
        return float(np.concatenate(every).mean())

    @property
    def packed_bytes(self) -> float:
        return self.mean(lambda rows: 3 * rows["height"].astype(np.int64) * rows["width"])


def draw(root: Path, batch: int, batches: int) -> Sample:
    files, packed = load(root, packed=False), load(root)
    domains = packed.domains
    if batch < len(domains):
        raise UserError(f"--batch {batch} is fewer than the {len(domains)} domains in {root}")
    share = batch // len(domains)
    rng = np.random.default_rng(0)
    chosen = tuple(rng.permutation(len(domain))[: batches * share] for domain in domains)
    return Sample(files, packed, chosen, share)


def measure(options: Options) -> Result:
    device = options.where
    workers = cores() if options.workers is None else options.workers
    with packed_images(options.images) as root:
        sample = draw(root, options.batch, options.batches)
        places = _places(device, sample.packed)
        turns = contenders(sample, device, workers, options.batches, places)
        rates = harness.take_turns(turns, options.rounds, "reading")
        pairs = zip(sample.files.domains, sample.chosen, strict=True)
        kinds = {Path(d.images.name(int(i))).suffix.lower() for d, chosen in pairs for i in chosen}
    rates[ALL_CORES] = [cores() * rate for rate in rates[DECODER]]
    megabytes, total = sample.packed_bytes / 1e6, sum(map(len, sample.files.domains))
    in_order = {name: rates[name] for name in (DISK, CACHE) if name in rates}
    return {
        "images": f"{name_of(options.images)}: {total:,} in {len(sample.chosen)} domains",
        "files": ", ".join(sorted(kinds)),
        "bytes of an image": {
            "file": round(sample.mean(lambda rows: rows["source"])),
            "packed": round(sample.packed_bytes),
        },
        "image size": sample.packed.spec.image_size,
        "batch": f"{len(sample.chosen)} x {sample.share}",
        "workers": workers,
        "cores": cores(),
        "rounds": options.rounds,
        "images read singly": len(sample),
        "images per second": {name: spread(values) for name, values in rates.items()},
        "MB per second": {n: spread([megabytes * r for r in in_order[n]]) for n in in_order},
        "ratios": {
            name: ratio(rates[top], rates[below])
            for name, (top, below) in RATIOS.items()
            if top in rates and below in rates
        },
    }


def contenders(
    sample: Sample, device: torch.device, workers: int, batches: int, places: Sequence[str]
) -> dict[str, Callable[[], float]]:
    files, packed = sample.files, sample.packed
    gears = choose_gears("auto", device, packed.spec.image_size, needs_graph=False, world=1)

    def training(dataset: Dataset, place: str) -> Callable[[], float]:
        compiled = place != "host" and gears.compiled
        store = open_store(place, device, dataset.domains, workers, compiled=compiled)
        return lambda: train_rate(store, dataset, sample, device, batches)

    found: dict[str, Callable[[], float]] = {
        CACHE: partial(in_order, sample),
        DECODER: partial(rate, partial(_read_singly, files, sample)),
        PACKED: partial(rate, partial(_read_singly, packed, sample)),
        TRAINING_FILES: training(files, "host"),
        TRAINING_PACK: training(packed, "host"),
        **{PLACES[place]: training(packed, place) for place in places},
        EVALUATION_FILES: partial(rate, partial(_evaluate, files, sample)),
        EVALUATION_PACK: partial(rate, partial(_evaluate, packed, sample)),
    }
    if DIRECT is not None and _opens(sample.shards[0], DIRECT):
        found[DISK] = partial(in_order, sample, DIRECT)
    return found


def _places(device: torch.device, packed: Dataset) -> tuple[str, ...]:
    """List where to transform images on the device; on a CPU, Pillow is many times faster."""
    if device.type != "cuda":
        return ()
    fits = store_size(packed.domains) <= SHARE * torch.cuda.mem_get_info(device)[0]
    return ("stream", "device") if fits else ("stream",)


def rate(work: Callable[[], float]) -> float:
    """Return images per second of work repeated for at least `LEAST` seconds after a warm-up."""
    work()
    images, began = 0.0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < LEAST:
        images += work()
    return images / elapsed


def _read_singly(dataset: Dataset, sample: Sample) -> int:
    for domain, which in zip(dataset.domains, sample.chosen, strict=True):
        for i in which.tolist():
            domain.images[i]
    return len(sample)


def _evaluate(dataset: Dataset, sample: Sample) -> int:
    view = View(dataset.spec.image_size, augment=False)
    size = sample.share * len(sample.chosen)
    return sum(
        len(batch.labels)
        for domain, which in zip(dataset.domains, sample.chosen, strict=True)
        for batch in Host(torch.device("cpu")).evaluation(domain, which, view, size)
    )


def train_rate(
    store: Store, dataset: Dataset, sample: Sample, device: torch.device, batches: int
) -> float:
    """Return images per second in steady state, without batches read ahead.

    Workers finish at about the same time, so the number of batches is a multiple of theirs.
    """
    pairs = zip(dataset.domains, sample.chosen, strict=True)
    splits = tuple(Split(d, n, True, {"train": chosen}) for n, (d, chosen) in enumerate(pairs))
    view = View(dataset.spec.image_size, augment=True)
    sampling = Sampling(splits, sample.share, view, seed=0)
    first = max(1, getattr(store, "workers", 0))
    stop = first + first * math.ceil(batches / first)
    arriving = store.training(sampling, 0, stop)
    for _ in range(first):
        next(arriving)
    harness.wait(device)
    began = time.perf_counter()
    images = sum(len(batch.labels) for step in arriving for batch in step)
    harness.wait(device)
    return images / (time.perf_counter() - began)


def in_order(sample: Sample, flags: int = 0) -> float:
    if not flags:
        _read(sample.shards, flags)  # fills the page cache
    began = time.perf_counter()
    read = _read(sample.shards, flags)
    return read / (time.perf_counter() - began) / sample.packed_bytes


def _read(shards: Sequence[Path], flags: int) -> int:
    buffer = mmap.mmap(-1, CHUNK)  # page-aligned, as O_DIRECT requires
    read = 0
    for path in shards:
        end = min(path.stat().st_size, READ_AT_MOST - read) + read
        with open(path, "rb", 0, opener=lambda name, mode: os.open(name, mode | flags)) as file:
            while read < end:
                read += file.readinto(buffer)
    return read


def _opens(path: Path, flags: int) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | flags))
    except OSError:  # in-memory file systems may not support the flags
        return False
    return True


main = command(Options, measure)
