"""Packs: the same pixels as the files, or the files themselves with a word of why."""

import errno
import io
import itertools
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

from steppe.domains import Dataset, Domain, Files, dataset_spec, load, pack, packing, pool, workshop
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


def test_images_whose_names_are_not_text_are_packed(root: Path) -> None:
    os.rename(root / "ink/dog/a.png", os.fsdecode(os.fsencode(root) + b"/ink/dog/\xff.png"))
    make(root)
    packed = load(root)
    assert "pack in" in packed.origin
    assert_same(packed, load(root, packed=False))
    assert packed.domains[0].images.name(2) == "dog/\udcff.png"


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
        ("index.json", newer, "format 2, but this version of steppe reads format 1"),
        ("index.json", Path.unlink, "index.json is missing"),
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
    assert "without comparing it to the folder" in messages.text


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


def test_a_folder_that_no_packer_made_is_left_alone(root: Path) -> None:
    kept = [root.parent / ".own.pack.backup", root.parent / ".own.pack.x1y2z3w4"]
    for folder in kept:
        (folder / "mine").mkdir(parents=True)
    make(root)
    make(root, force=True)
    assert all((folder / "mine").is_dir() for folder in kept)


def test_a_working_packer_is_left_alone(root: Path) -> None:
    with workshop.workshop(root.parent / "own.pack") as folder:
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


def in_a_fork(work: Callable[[], object]) -> int:
    """Runs in a process of its own; returns its exit code, or the signal that ended it as -N."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fail_late(monkeypatch: pytest.MonkeyPatch, number: int, fail: Callable[[], None]) -> None:
    """Calls `fail` in place of one of the changes to the folders from the first rename on."""
    changes = 0

    def counted(change: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            nonlocal changes
            if changes or change is rename:
                changes += 1
            if changes == number:
                fail()
            change(*args, **options)

        return call

    rename = os.rename
    for name in ("rename", "unlink", "rmdir", "fsync"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_packer_killed_while_it_replaces_a_pack_loses_neither(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(root, size=5)

    def replace_it(number: int) -> None:
        fail_late(monkeypatch, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        make(root, size=20, force=True)

    sizes = []
    for number in itertools.count(1):
        code = in_a_fork(lambda number=number: replace_it(number))
        found = load(root)
        assert "pack in" in found.origin
        assert pack.verify(root.parent / "own.pack") == []
        sizes.append(found.shrunk_to)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        make(root, size=5, force=True)
        assert sorted(os.listdir(root.parent)) == ["own", "own.pack"]
    assert sizes[:3] == [5, 5, 20]  # killed before the first rename, the second, and after both
    assert len(sizes) > 8


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_write_that_fails_while_a_pack_is_replaced_keeps_one(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make(root, size=5)
    with monkeypatch.context() as patched:
        fail_late(patched, number, full)
        with pytest.raises(UserError, match="could not be written: No space left"):
            make(root, size=20, force=True)
    assert load(root).shrunk_to == (5 if number < 3 else 20)
    assert sorted(os.listdir(root.parent)) == ["own", "own.pack"]


def test_a_full_disk_keeps_the_old_pack(root: Path) -> None:
    resource = pytest.importorskip("resource")
    make(root, size=5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(UserError, match="could not be written: File too large"):
            make(root, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load(root).shrunk_to == 5


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the index of a pack as its maker could: all checksums are right."""
    index = json.loads((path / "index.json").read_text())
    change(index)
    for domain in index["domains"]:
        for key, ending in (("names_sha256", "json"), ("rows_sha256", "npy")):
            if (file := path / f"{domain['stem']}.{ending}").is_file():
                domain[key] = pack.checksum(file)
    (path / "index.json").write_text(json.dumps(index))
    (path / "index.sha256").write_text(pack.checksum(path / "index.json"))


def set_shard(key: str, value: object) -> Callable[[Path], None]:
    return lambda path: forge(path, lambda i: i["domains"][0]["shards"][0].update({key: value}))


def set_domain(key: str, value: object) -> Callable[[Path], None]:
    return lambda path: forge(path, lambda index: index["domains"][0].update({key: value}))


def set_lists(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        listed = json.loads((path / "ink.json").read_text())
        change(listed)
        (path / "ink.json").write_text(json.dumps(listed))
        forge(path, lambda index: None)

    return damage


def set_rows(column: str | list[str], value: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        rows = np.load(path / "ink.npy")
        for name in [column] if isinstance(column, str) else column:
            rows[name][1] = value
        np.save(path / "ink.npy", rows)
        forge(path, lambda index: None)

    return damage


def other_array(path: Path) -> None:
    np.save(path / "ink.npy", np.zeros(3))
    forge(path, lambda index: None)


def giant_array(path: Path) -> None:
    with open(path / "ink.npy", "wb") as file:
        shape = {"descr": pack.ROW.descr, "fortran_order": False, "shape": (10**15,)}
        np.lib.format.write_array_header_1_0(file, shape)
    forge(path, lambda index: None)


def not_an_array(path: Path) -> None:
    (path / "ink.npy").write_bytes(b"PK" + bytes(100))
    forge(path, lambda index: None)


def deep(path: Path) -> None:
    (path / "index.json").write_text("[" * 100_000)


def pipe(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return damage


ESCAPE = "is not the name of a file in the pack's folder"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (set_shard("file", "../secret.bin"), ESCAPE),
        (set_shard("file", "/etc/passwd"), ESCAPE),
        (set_shard("images", 2), "names and 3 rows"),
        (set_shard("images", -1), "images: Input should be greater"),
        (set_shard("bytes", -7), "bytes: Input should be greater"),
        (set_shard("bytes", 7388), "do not fill ink-000.bin"),
        (set_shard("bytes", "7389"), "bytes: Input should be a valid integer"),
        (set_domain("stem", "../ink"), ESCAPE),
        (set_domain("stem", "x\0y"), ESCAPE),
        (set_domain("shards", []), "names and 3 rows"),
        (set_domain("shards", "none"), "shards: Input should be"),
        (set_domain("more", 1), "more: Extra inputs"),
        (lambda path: forge(path, lambda i: i.update(format=10**40)), "format 1000000000"),
        (lambda path: forge(path, lambda i: i.update(classes=["cat"])), "not among its 1 classes"),
        (lambda path: forge(path, lambda i: i.update(domains={})), "domains: Input should be"),
        (set_lists(lambda listed: listed["names"].pop()), "2 names and 3 rows"),
        (set_lists(lambda listed: listed.update(names=[1, 2, 3])), "ink.json is not valid"),
        (set_lists(lambda listed: listed.update(names="abc")), "ink.json is not valid"),
        (set_lists(lambda i: i.update(names=["\ud800"] * 3)), "names are not file names"),
        (set_lists(lambda listed: listed.update(subsets={"train": [3]})), "official subsets"),
        (set_lists(lambda listed: listed.update(subsets={"train": ["x"]})), "is not valid"),
        (set_lists(lambda listed: listed.update(subsets={"train": 5})), "ink.json is not valid"),
        (set_lists(lambda listed: listed.update(subsets=[1])), "ink.json is not valid"),
        (set_lists(lambda listed: listed.clear()), "ink.json is not valid"),
        (set_rows("label", 2), "not among its 2 classes"),
        (set_rows("label", -1), "not among its 2 classes"),
        (set_rows("height", 0), "impossible shape"),
        (set_rows("width", -40), "impossible shape"),
        (set_rows("width", 2**31 - 1), "do not fill"),
        (set_rows(["height", "width"], 2**31 - 1), "impossible shape"),
        (other_array, "ink.npy is not valid"),
        (giant_array, "does not contain a pack's rows"),
        (not_an_array, "ink.npy is not valid"),
        (deep, "index.json is damaged"),
        (pipe("index.json"), "not a plain file"),
        (pipe("index.sha256"), "not a plain file"),
        (pipe("ink.json"), "not a plain file"),
        (pipe("ink-000.bin"), "ink-000.bin is missing"),
    ],
)
def test_a_pack_that_contradicts_itself_gives_way_to_the_files(
    root: Path,
    messages: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    path = make(root)
    damage(path)
    assert load(root).origin == f"files in {root}"
    (record,) = messages.records
    assert message in record.getMessage()
    assert "\n" not in record.getMessage()
    assert message in pack.verify(path)[0]


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
