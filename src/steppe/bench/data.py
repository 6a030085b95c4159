"""`steppe bench data`: how fast images can be had, and what limits it.

The limits are the disk, which a pack is read from, and the decoder, which files go through. Beside
them: single images read from files and from the pack, batches as training wants them (cropped,
jittered), from every place where a run may keep its images, and as evaluation does (resized).
Everything takes its turn in every round, on the same images. All but the disk read what the
operating system has in memory already: the disk's share is told apart, and not mixed into the
others by chance.
"""

from __future__ import annotations

import copy
import errno
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from steppe.domains import Dataset, Split, load, packing
from steppe.domains.batches import Sampling, View, evaluation_batches
from steppe.domains.dataset import Indices
from steppe.domains.pack import Packed, location, remedy
from steppe.domains.pool import cores
from steppe.domains.store import SHARE, Host, Resident, Store, Stream
from steppe.domains.store import size as store_size
from steppe.errors import UserError
from steppe.training.execution import choose_gears

from .record import environment
from .task import write_doodles

BAR = 3.0
"""What reading a packed image is to be over decoding it, on two cores."""
LEAST = 0.25
"""Seconds that a measurement takes at least: it is repeated until then."""
READ_AT_MOST = 2**30
"""Bytes of a pack that are read from the disk in a round."""
CHUNK = 2**22
"""Bytes that are asked of the disk at a time."""
PROBES = 64
"""Places in a file where it is seen whether the operating system has it in memory."""

DISK, CACHE = "disk: the pack, in order", "memory: the pack, in order"
DECODER = "decoding a file, one process"
PACKED = "reading a packed image, one process"
TRAINING_FILES = "training batches from files, transformed by Pillow"
TRAINING_PACK = "training batches from the pack, transformed by Pillow"
STREAM = "training batches from the pack, transformed on the device"
RESIDENT = "training batches from the device, transformed there"
EVALUATION_FILES = "evaluation batches from files, one process"
EVALUATION_PACK = "evaluation batches from the pack, one process"


@contextmanager
def packed_images(
    images: Path | None = None, per_class: int = 24, console: Console | None = None
) -> Iterator[Path]:
    """A folder ``domain/class/image`` with a pack beside it.

    Args:
        images: the folder, which is packed if it was not yet; a temporary one with
            photograph-sized images in four domains unless given.
        per_class: how many of these there are in each class of each domain.
        console: where to show how far the packing is.
    """
    if images is not None:
        if not images.is_dir():
            raise UserError(f"{images} is not a folder; expected {images}/<domain>/<class>/<image>")
        _pack(images, console)
        yield images
        return
    with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
        root = Path(home) / "images"
        write_doodles(root, per_class)
        _pack(root, None)
        yield root


def _pack(root: Path, console: Console | None) -> None:
    dataset = load(root)
    if all(isinstance(domain.images, Packed) for domain in dataset.domains):
        return
    path = location(dataset.spec, root.parent)
    if path.exists():  # and cannot be used, as a warning has said
        raise UserError(f"pack {path} is not used. {remedy(dataset.spec.name)}")
    packing.make(dataset, root.parent, console=console)
    if console is not None:
        console.print(f"{path}: runs on these images use it from now on", highlight=False)


@dataclass(frozen=True)
class Sample:
    """The images that are read, of a dataset opened in two ways.

    Attributes:
        files: the dataset, from its files.
        packed: the same, from its pack.
        chosen: for each domain, which images.
        share: images of each domain in a batch.
    """

    files: Dataset
    packed: Dataset
    chosen: tuple[Indices, ...]
    share: int

    @property
    def images(self) -> int:
        """How many there are."""
        return sum(len(chosen) for chosen in self.chosen)

    @property
    def shards(self) -> list[Path]:
        """The pack's files of pixels."""
        return [
            images.pack / shard.file for images in _packed(self.packed) for shard in images.shards
        ]

    @property
    def file_bytes(self) -> float:
        """The mean size of the chosen files."""
        return self._mean([images.rows["source"] for images in _packed(self.packed)])

    @property
    def packed_bytes(self) -> float:
        """The mean size of the chosen images in the pack."""
        rows = [images.rows for images in _packed(self.packed)]
        return self._mean([3 * r["height"].astype(np.int64) * r["width"] for r in rows])

    def _mean(self, sizes: Sequence[Any]) -> float:
        every = [size[chosen] for size, chosen in zip(sizes, self.chosen, strict=True)]
        return float(np.concatenate(every).mean())


def _packed(dataset: Dataset) -> list[Packed]:
    found = [d.images for d in dataset.domains if isinstance(d.images, Packed)]
    assert len(found) == len(dataset.domains)
    return found


def draw(root: Path, batch: int, batches: int) -> Sample:
    """Opens a packed folder and draws as many images of each domain as some batches hold."""
    files, packed = load(root, packed=False), load(root)
    domains = packed.domains
    if batch < len(domains):
        raise UserError(f"--batch {batch} is fewer than the {len(domains)} domains in {root}")
    share = batch // len(domains)
    rng = np.random.default_rng(0)
    chosen = tuple(rng.permutation(len(domain))[: batches * share] for domain in domains)
    return Sample(files, packed, chosen, share)


def measure(
    device: torch.device,
    images: Path | None = None,
    batch: int = 96,
    workers: int | None = None,
    rounds: int = 5,
    batches: int = 4,
) -> dict[str, Any]:
    """Everything `steppe bench data` reports, as plain values.

    Args:
        device: what the images are for.
        images: a folder ``domain/class/image``; photograph-sized images are made unless given.
        batch: images in a batch, of all domains alike.
        workers: processes that read training batches; one per core unless given.
        rounds: how often everything is measured.
        batches: training batches in a measurement; as many images are read singly.
    """
    workers = cores() if workers is None else workers
    console = Console(stderr=True)
    with packed_images(images, console=console) as root:
        sample = draw(root, batch, batches)
        # On a CPU a run leaves transforms to Pillow, which is many times faster there.
        places = device.type != "cpu"
        contenders = _contenders(sample, device, workers, batches, places)
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        kept: list[float | None] = []
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("reading", total=rounds * len(contenders))
            for _ in range(rounds):
                kept.append(drop(sample.shards))
                for name, run in contenders.items():
                    progress.update(bar, description=name)
                    rates[name].append(run())
                    progress.advance(bar)
        count = sum(map(len, sample.files.domains))
        name = "doodles, enlarged" if images is None else images.resolve().name
        suffixes = {
            Path(domain.images.name(int(i))).suffix.lower()
            for domain, chosen in zip(sample.files.domains, sample.chosen, strict=True)
            for i in chosen
        }
    if any(share is None for share in kept):
        del rates[DISK]  # nobody knows what was read
    shown: dict[str, list[float]] = {}
    for contender, values in rates.items():
        shown[contender] = values
        if contender == DECODER:
            shown[f"{DECODER}, times {cores()} cores"] = [cores() * value for value in values]
    megabytes = sample.packed_bytes / 1e6
    return {
        "environment": environment(device),
        "images": f"{name}: {count:,} in {len(sample.chosen)} domains",
        "files": ", ".join(sorted(suffixes)),
        "bytes of an image": {
            "file": round(sample.file_bytes),
            "packed": round(sample.packed_bytes),
        },
        "image size": sample.packed.spec.image_size,
        "batch": f"{len(sample.chosen)} x {sample.share}",
        "workers": workers,
        "cores": cores(),
        "rounds": rounds,
        "images read singly": sample.images,
        "share of the pack in memory when the disk is read, at most": _worst(kept),
        "images per second": {name: _spread(values) for name, values in shown.items()},
        "MB per second": {
            name: _spread([megabytes * v for v in rates[name]])
            for name in (DISK, CACHE)
            if name in rates
        },
        "ratios": _ratios(rates),
        "bar": {"packed over decoding": BAR},
    }


def _worst(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return round(max(known), 3) if len(known) == len(shares) else None


def _ratios(rates: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """What belongs together, round by round."""
    every = {
        "packed over decoding": (PACKED, DECODER, 1),
        "training, pack over files": (TRAINING_PACK, TRAINING_FILES, 1),
        "training, streamed over files": (STREAM, TRAINING_FILES, 1),
        "training, on the device over files": (RESIDENT, TRAINING_FILES, 1),
        "evaluation, pack over files": (EVALUATION_PACK, EVALUATION_FILES, 1),
        "training, streamed over the disk": (STREAM, DISK, 1),
        "training from files over decoding on all cores": (TRAINING_FILES, DECODER, cores()),
    }
    return {
        title: _spread([a / (by * b) for a, b in zip(rates[top], rates[below], strict=True)])
        for title, (top, below, by) in every.items()
        if top in rates and below in rates
    }


def _contenders(
    sample: Sample, device: torch.device, workers: int, batches: int, places: bool
) -> dict[str, Callable[[], float]]:
    """What is measured, in turn; each call is a measurement, in images per second.

    The disk comes first, when the operating system has just been told to forget the pack. `places`
    adds those where a run may transform images on its device.
    """

    def singly(which: Dataset) -> Callable[[], float]:
        return lambda: _rate(lambda opened: _read_singly(opened, sample.chosen), which)

    def training(which: Dataset, store: Store, count: int = workers) -> Callable[[], float]:
        return lambda: _training(_opened(which), store, sample, device, count, batches)

    def evaluation(which: Dataset) -> Callable[[], float]:
        return lambda: _rate(lambda opened: _evaluate(opened, sample), which)

    files, packed = sample.files, sample.packed
    host = Host(device, workers)
    found = {
        DISK: lambda: _sequential(sample),
        CACHE: lambda: _sequential(sample),
        DECODER: singly(files),
        PACKED: singly(packed),
        TRAINING_FILES: training(files, host),
        TRAINING_PACK: training(packed, host),
    }
    if places:
        size = packed.spec.image_size
        compiled = choose_gears("auto", device, size, needs_graph=False, world=1).compiled
        # Neither keeps the images that it is given, with their mapped shards.
        found[STREAM] = training(packed, Stream(device, _opened(packed).domains, workers, compiled))
        if store_size(packed.domains) <= _room(device):
            resident = Resident(device, _opened(packed).domains, compiled)
            found[RESIDENT] = training(packed, resident, 0)
    return {
        **found,
        EVALUATION_FILES: evaluation(files),
        EVALUATION_PACK: evaluation(packed),
    }


def _room(device: torch.device) -> float:
    """Bytes that all images may take on a device: as many as a run would give them."""
    if device.type == "cuda":
        return SHARE * torch.cuda.mem_get_info(device)[0]
    return READ_AT_MOST


def _opened(dataset: Dataset) -> Dataset:
    """The dataset with no shard mapped yet: a page that is mapped cannot be forgotten later."""
    domains = (replace(domain, images=copy.copy(domain.images)) for domain in dataset.domains)
    return replace(dataset, domains=tuple(domains))


def _rate(work: Callable[[Dataset], int], dataset: Dataset) -> float:
    """Images per second of some work, after it has been done once, for as long as it takes."""
    opened = _opened(dataset)
    work(opened)
    images, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < LEAST:
        images += work(opened)
    return images / elapsed


def _read_singly(dataset: Dataset, chosen: Sequence[Indices]) -> int:
    for domain, which in zip(dataset.domains, chosen, strict=True):
        for i in which.tolist():
            domain.images[i]
    return sum(map(len, chosen))


def _evaluate(dataset: Dataset, sample: Sample) -> int:
    view = View(dataset.spec.image_size, augment=False)
    size = sample.share * len(sample.chosen)
    return sum(
        len(batch.labels)
        for domain, which in zip(dataset.domains, sample.chosen, strict=True)
        for batch in evaluation_batches(domain, which, view, size)
    )


def _training(
    dataset: Dataset,
    store: Store,
    sample: Sample,
    device: torch.device,
    workers: int,
    batches: int,
) -> float:
    """Images per second once the workers are at work, and have nothing ready beforehand.

    Nothing is done with a batch, so that the workers never wait; a multiple of as many batches as
    there are workers, since these finish at about the same time.
    """
    splits = tuple(
        Split(domain, position, True, {"train": chosen})
        for position, (domain, chosen) in enumerate(
            zip(dataset.domains, sample.chosen, strict=True)
        )
    )
    view = View(dataset.spec.image_size, augment=True)
    sampling = Sampling(splits, sample.share, view, seed=0)
    first = max(1, workers)
    stop = first + first * math.ceil(batches / first)
    arriving = store.training(sampling, 0, stop)
    for _ in range(first):
        next(arriving)
    _wait(device)
    began = time.perf_counter()
    images = sum(len(batch.labels) for step in arriving for batch in step)
    _wait(device)
    return images / (time.perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sequential(sample: Sample) -> float:
    """Images per second of reading the pack's files from the beginning, and nothing more."""
    buffer = memoryview(bytearray(CHUNK))
    read, began = 0, time.perf_counter()
    for path, size in _extent(sample.shards):
        with open(path, "rb", buffering=0) as file:
            left = size
            while left and (got := file.readinto(buffer[: min(CHUNK, left)])):
                left -= got
            read += size - left
    return read / (time.perf_counter() - began) / sample.packed_bytes


def _extent(shards: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    """The files that a round reads, and how much of each: at most `READ_AT_MOST` in all."""
    left = READ_AT_MOST
    for path in shards:
        size = min(left, path.stat().st_size)
        if size:
            yield path, size
        left -= size


def drop(shards: Sequence[Path]) -> float | None:
    """Asks the operating system to forget what a round will read.

    It may decline, on a file system that lives in memory for instance; and below it there may be
    other caches, such as a virtual machine's host has.

    Returns:
        The share that it still has in memory, at most (a fast disk answers a look before it can be
        told from memory), or None where that cannot be found out.
    """
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return None
    found = []
    for path, size in _extent(shards):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not on the disk yet is not forgotten
            os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)
            # Even a look that does not wait makes the system read ahead, unless it is told that
            # looks are at random; and what is looked at is read, so that it forgets once more.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            places = np.linspace(0, size - 1, PROBES).astype(int).tolist()
            found += [_in_memory(descriptor, place) for place in places]
            os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    known = [yes for yes in found if yes is not None]
    return sum(known) / len(known) if known and len(known) == len(found) else None


def _in_memory(descriptor: int, place: int) -> bool | None:
    """Whether a byte of a file can be had without waiting for the disk."""
    try:
        os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return None
        raise
    return True


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": float(f"{statistics.median(values):.5g}"),
        "min": float(f"{min(values):.5g}"),
        "max": float(f"{max(values):.5g}"),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The result for the terminal."""
    columns = ("median", "min", "max")
    title = f"{result['images']}; batch {result['batch']}, {result['workers']} workers"
    kept = result["share of the pack in memory when the disk is read, at most"]
    note = "" if kept is None else f"when the disk was read, {kept:.0%} of the pack was in memory"
    rates = Table("images per second", *columns, title=title, caption=note)
    for name, spread in result["images per second"].items():
        rates.add_row(name, *(f"{spread[key]:,.0f}" for key in columns))
    for name, spread in result["MB per second"].items():
        rates.add_row(f"{name}, MB per second", *(f"{spread[key]:,.0f}" for key in columns))
    ratios = Table("ratio", *columns, "bar")
    for name, spread in result["ratios"].items():
        bar = result["bar"].get(name)
        ratios.add_row(
            name, *(f"{spread[key]:.2f}" for key in columns), "" if bar is None else f">= {bar:g}"
        )
    return [rates, ratios]
