"""Stores: wherever images live, the pixels that reach the network are the same."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from steppe.domains import Arrays, Dataset, Domain, Split, load, packing, store
from steppe.domains.batches import Batch, Sampling, View
from steppe.domains.store import Host, Resident, Store, Stream, ondevice, open_store
from steppe.domains.store.ondevice import BLOCK, BLOCK_VALUES
from steppe.errors import UserError
from tests.replays import PretendedReplay

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")

CPU = torch.device("cpu")
SIZE = 16
VIEWS = {"plain": View(SIZE, augment=False), "augmented": View(SIZE, augment=True)}
CASES = pytest.mark.parametrize(
    ("view", "compiled"),
    [
        (VIEWS["plain"], True),
        (VIEWS["augmented"], False),
        # Inductor takes half a minute for each on a CPU.
        pytest.param(VIEWS["augmented"], True, marks=pytest.mark.slow),
    ],
    ids=["plain", "augmented", "augmented-compiled"],
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Two domains of images of several shapes, in a pack."""
    root = tmp_path_factory.mktemp("data") / "own"
    rng = np.random.default_rng(0)
    for domain, count in (("ink", 14), ("oil", 9)):
        for i in range(count):
            pixels = rng.integers(256, size=(*rng.integers(10, 60, size=2), 3), dtype=np.uint8)
            path = root / domain / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    packing.make(load(root, packed=False), root.parent)
    return load(root)


@pytest.fixture(scope="module")
def arrays() -> tuple[Domain, ...]:
    rng = np.random.default_rng(1)
    return tuple(
        Domain(
            name,
            Arrays(rng.integers(256, size=(12, 20, 13, 1), dtype=np.uint8)),
            rng.integers(5, size=12),
        )
        for name in ("0", "15")
    )


def sampling(domains: Any, view: View, **options: Any) -> Sampling:
    parts = [
        Split(domain, 2 * i, True, {"train": np.arange(3, len(domain))})
        for i, domain in enumerate(domains)
    ]
    return Sampling(tuple(parts), batch_size=6, view=view, seed=3, **options)


def stores(domains: Any, compiled: bool, device: torch.device = CPU) -> Iterator[Store]:
    yield Stream(device, domains, workers=0)
    yield Stream(device, domains, workers=2)
    yield Resident(device, domains)
    if compiled:
        yield Resident(device, domains, compiled=True)
        yield Stream(device, domains, workers=0, compiled=True)


def assert_same(found: Batch, expected: Batch) -> None:
    assert torch.equal(found.images, expected.images)
    assert torch.equal(found.labels, expected.labels)
    assert found.images.stride() == expected.images.stride(), "as the network wants it in memory"


@CASES
@pytest.mark.parametrize("world", [1, 2])
def test_training_batches_are_those_of_the_host(
    packed: Dataset, view: View, compiled: bool, world: int
) -> None:
    chosen = sampling(packed.domains, view, rank=world - 1, world=world)
    expected = list(Host(CPU, 0).training(chosen, 4, 7))
    for place in stores(packed.domains, compiled):
        for one, other in zip(place.training(chosen, 4, 7), expected, strict=True):
            for found, wanted in zip(one, other, strict=True):
                assert_same(found, wanted)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("steps", [1, 3])
def test_blocks_of_steps_are_those_steps(
    packed: Dataset, view: View, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured or not, and with a last block that is shorter."""
    monkeypatch.setattr(ondevice, "Replay", PretendedReplay)
    monkeypatch.setattr(ondevice, "BLOCK", steps)
    chosen = sampling(packed.domains, view, rank=1, world=2)
    expected = list(Host(CPU, 0).training(chosen, 2, 13))
    for captured in (False, True):
        place = Resident(CPU, packed.domains, captured=captured)
        assert place._steps_at_once(6, view) == steps
        found = list(place.training(chosen, 2, 13))  # no batch overwrites an earlier one
        for one, other in zip(found, expected, strict=True):
            for mine, wanted in zip(one, other, strict=True):
                assert_same(mine, wanted)
        assert not list(place.training(chosen, 5, 5))


def test_blocks_are_as_long_as_memory_allows(packed: Dataset) -> None:
    place = Resident(CPU, packed.domains)
    tallest = int(max(place._heights))
    for images, size in ((8, 16), (96, 224), (10**5, 224)):
        steps = place._steps_at_once(images, View(size, augment=False))
        values = images * 3 * tallest * size
        assert steps == min(BLOCK, max(1, BLOCK_VALUES // values))


@pytest.mark.gpu
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_captured_batches_are_those_of_the_host(packed: Dataset, view: View) -> None:
    chosen = sampling(packed.domains, view)
    numbers = (3, 3 + 3 * BLOCK + 5)
    expected = list(Host(CPU, 0).training(chosen, *numbers))
    found = list(
        Resident(torch.device("cuda"), packed.domains, captured=True).training(chosen, *numbers)
    )
    for one, other in zip(found, expected, strict=True):
        for mine, wanted in zip(one, other, strict=True):
            assert_same(Batch(*(t.cpu() for t in mine)), wanted)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_evaluation_batches_are_those_of_the_host(
    packed: Dataset, view: View, compiled: bool
) -> None:
    domain, chosen = packed.domains[1], np.array([8, 0, 3, 3, 5])
    given = (domain, chosen, view, 2, (7, 1))
    expected = list(Host(CPU, 0).evaluation(*given))
    assert [len(batch.labels) for batch in expected] == [2, 2, 1]
    for place in stores(packed.domains, compiled):
        for found, wanted in zip(place.evaluation(*given), expected, strict=True):
            assert_same(found, wanted)


def test_images_in_memory_of_one_channel(arrays: tuple[Domain, ...]) -> None:
    chosen = sampling(arrays, VIEWS["plain"])
    expected = list(Host(CPU, 0).training(chosen, 0, 2))
    for place in stores(arrays, compiled=True):
        for one, other in zip(place.training(chosen, 0, 2), expected, strict=True):
            for found, wanted in zip(one, other, strict=True):
                assert_same(found, wanted)


@CASES
def test_beside_other_work_they_are_the_same(
    packed: Dataset, view: View, compiled: bool, device: torch.device
) -> None:
    n = 2**24 if device.type == "cuda" else 1
    chosen = sampling(packed.domains, view)
    expected = list(Host(CPU, 0).training(chosen, 0, 5))
    for place in stores(packed.domains, compiled, device):
        batches = []
        for batch in place.training(chosen, 0, 5):
            torch.zeros(n, device=device).sin_()  # while the next batch is made
            batches.append([Batch(*(t.cpu() for t in part)) for part in batch])
        for one, other in zip(batches, expected, strict=True):
            for found, wanted in zip(one, other, strict=True):
                assert torch.equal(found.images, wanted.images)
                assert torch.equal(found.labels, wanted.labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_shard_is_named(packed: Dataset, tmp_path: Path, workers: int) -> None:
    import shutil

    domain = packed.domains[0]
    folder = shutil.copytree(domain.images.pack, tmp_path / "own.pack")  # type: ignore[attr-defined]
    (shard,) = folder.glob("ink-*.bin")
    shard.write_bytes(bytes(shard.stat().st_size))
    broken = replace(domain, images=replace(domain.images, pack=folder, _maps={}))  # type: ignore[type-var]
    with pytest.raises(UserError, match=r"^pack .*: shard ink-000\.bin is damaged"):
        list(Stream(CPU, [broken], workers).evaluation(broken, np.arange(4), VIEWS["plain"], 2))
    with pytest.raises(UserError, match=r"shard ink-000\.bin is damaged"):
        Resident(CPU, [broken])


def test_one_compilation_for_all_batches_of_a_stream(packed: Dataset) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    place = Stream(CPU, packed.domains, workers=0, compiled=True)
    chosen = sampling(packed.domains, VIEWS["plain"])
    for size in (6, 4):
        list(place.training(replace(chosen, batch_size=size), 0, 3))
    assert counters["stats"]["unique_graphs"] == 2  # filters and transform


def test_channels_that_differ(packed: Dataset, arrays: tuple[Domain, ...]) -> None:
    with pytest.raises(UserError, match="ink have 3 channels, but images of 0 have 1"):
        Stream(CPU, [packed.domains[0], arrays[0]], workers=0)


def test_where_images_live(
    packed: Dataset, arrays: tuple[Domain, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = load(packed.domains[0].images.pack.with_suffix(""), packed=False).domains  # type: ignore[attr-defined]
    assert isinstance(open_store("auto", CPU, packed.domains, None), Host)
    assert isinstance(open_store("device", CPU, packed.domains, None), Resident)
    assert isinstance(open_store("stream", CPU, arrays, None), Stream)
    assert isinstance(open_store("host", CPU, files, 3), Host)
    for place in ("device", "stream"):
        with pytest.raises(UserError, match="steppe data pack"):
            open_store(place, CPU, files, None)
    cuda, built = torch.device("cuda"), []
    monkeypatch.setattr(store, "Resident", lambda *args: built.append("device"))
    monkeypatch.setattr(store, "Stream", lambda *args: built.append("stream"))
    needed = store.size(packed.domains)
    assert needed == sum(d.images[i].size for d in packed.domains for i in range(len(d)))
    for free in (4 * needed, 4 * needed - 4):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 10 * free))
        open_store("auto", cuda, packed.domains, None)
    assert built == ["device", "stream"]
    assert isinstance(open_store("auto", cuda, files, None), Host)
