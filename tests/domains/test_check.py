"""Checks of a dataset on disk: each kind of fault is found and named."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from steppe.domains import DatasetSpec, check, dataset_spec, load, packing, pool
from steppe.errors import UserError


def paint(path: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(256, size=(8, 8, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def spec(tmp_path: Path) -> DatasetSpec:
    """A dataset with published counts: two domains, two classes, two images of each."""
    seed = 0
    for domain in ("ink", "oil"):
        for name in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"):
            paint(tmp_path / "pets" / domain / name, seed := seed + 1)
    own = dataset_spec(tmp_path / "pets")
    return replace(own, name="Pets", folder="pets", counts=(4, 4))


def text_of(report: check.CheckResult) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as shown:
        console.print(*check.tables(report), sep="\n")
    return shown.get()


def test_a_whole_dataset_passes(tmp_path: Path, spec: DatasetSpec) -> None:
    report = check.check(spec, tmp_path)
    assert report.ok
    assert (report.problems, report.notes, report.copies) == ((), (), ())
    assert report.where == f"files in {tmp_path / 'pets'}"
    assert report.domains[1] == check.DomainCount("oil", 4, 4, {"cat": 2, "dog": 2})
    told = json.loads(json.dumps(report.to_json()))
    assert told["ok"] is True
    assert told["domains"][0]["classes"] == {"cat": 2, "dog": 2}
    assert "Pets: no problems" in text_of(report)


def test_each_unreadable_image_is_named(tmp_path: Path, spec: DatasetSpec) -> None:
    truncated, text = tmp_path / "pets/ink/dog/2.png", tmp_path / "pets/oil/cat/1.png"
    truncated.write_bytes(truncated.read_bytes()[:120])
    text.write_text("no image")
    report = check.check(spec, tmp_path)
    assert report.unreadable == (str(truncated), str(text))
    assert len(report.problems) == 2
    assert str(truncated) in report.problems[0]
    assert str(text) in report.problems[1]
    assert str(text) in text_of(report).replace("\n", "")


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (
            lambda root: shutil.rmtree(root / "oil"),
            ["{root} has no folders for the domains oil"],
        ),
        (
            lambda root: (root / "ink/dog/2.png").unlink(),
            ["domain 'ink' has 3 images instead of 4"],
        ),
        (
            lambda root: shutil.rmtree(root / "ink/dog"),
            ["domain 'ink' has 2 images instead of 4", "domain 'ink' has no images of dog"],
        ),
        (
            lambda root: paint(root / "oil/cow/1.png", 99),
            [
                "domain 'oil' has 5 images instead of 4",
                "there are 3 classes instead of 2: cat, cow, dog",
                "domain 'ink' has no images of cow",
            ],
        ),
        (
            lambda root: paint(root / "clay/cat/1.png", 99),
            ["the folder {root}/clay is an unexpected domain"],
        ),
        (
            lambda root: paint(root / "ink/loose.png", 99),
            [
                "images outside the class folders, which are not read: 1 in {root}/ink: loose.png",
            ],
        ),
    ],
)
def test_faults_of_layout_and_counts(
    tmp_path: Path, spec: DatasetSpec, change: Callable[[Path], None], problems: list[str]
) -> None:
    root = tmp_path / "pets"
    change(root)
    report = check.check(spec, tmp_path)
    assert list(report.problems) == [problem.format(root=root) for problem in problems]
    assert not report.ok


def test_what_is_passed_over_is_noted(tmp_path: Path, spec: DatasetSpec) -> None:
    root = tmp_path / "pets"
    (root / "ink/cat/.DS_Store").write_bytes(b"")
    (root / "lists").mkdir()
    report = check.check(spec, tmp_path)
    assert report.ok
    assert report.notes == (
        f"ignored the folder {root / 'lists'}: it is not a domain",
        f"ignored files that are not images: 1 in {root / 'ink'}: cat/.DS_Store",
    )


@pytest.mark.parametrize(
    ("source", "copy", "kind"),
    [
        ("ink/cat/1.png", "oil/cat/1.png", "across domains"),
        ("ink/cat/1.png", "ink/dog/1.png", "under different classes"),
        ("ink/cat/1.png", "ink/cat/2.png", "within a class"),
    ],
)
def test_copies_are_notes_only_in_a_benchmark_as_published(
    tmp_path: Path, spec: DatasetSpec, source: str, copy: str, kind: str
) -> None:
    shutil.copy(tmp_path / "pets" / source, tmp_path / "pets" / copy)
    expected = f"identical images {kind}, once: {source} = {copy}"
    published = check.check(spec, tmp_path)
    assert published.ok
    assert published.notes == (expected,)
    assert published.copies == (check.Copies(kind, (source, copy)),)
    assert kind in text_of(published)
    own = check.check(replace(spec, counts=None), tmp_path)
    assert own.problems == (expected,)


def test_a_pack_is_verified_whole_and_compared(tmp_path: Path, spec: DatasetSpec) -> None:
    path = packing.make(load(tmp_path / "pets", packed=False), tmp_path)
    assert check.check(spec, tmp_path).notes == (f"pack {path} is valid",)

    shard = path / "oil-000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(b"\1" + whole[1:] if whole[0] != 1 else b"\2" + whole[1:])
    (problem,) = check.check(spec, tmp_path).problems
    assert "oil-000.bin is damaged" in problem
    assert "steppe data pack Pets --force" in problem

    shard.write_bytes(whole)
    with open(tmp_path / "pets/oil/cat/1.png", "ab") as file:
        file.write(b"\0")
    (problem,) = check.check(spec, tmp_path).problems
    assert "out of date" in problem
    assert "oil/cat/1.png" in problem


def test_a_pack_can_be_checked_without_its_images(tmp_path: Path, spec: DatasetSpec) -> None:
    path = packing.make(load(tmp_path / "pets", packed=False), tmp_path)
    shutil.rmtree(tmp_path / "pets")
    report = check.check(spec, tmp_path)
    assert report.ok
    assert str(path) in report.where
    assert [domain.images for domain in report.domains] == [4, 4]


def test_a_dataset_that_is_not_there(tmp_path: Path) -> None:
    report = check.check(dataset_spec("PACS"), tmp_path)
    (problem,) = report.problems
    assert "expected folders art_painting, cartoon, photo, sketch; found none" in problem
    assert "steppe data get PACS" in problem
    assert "PACS: 1 problem" in text_of(report)


def test_domainnet_says_whether_its_list_was_there(tmp_path: Path) -> None:
    spec = dataset_spec("DomainNet")
    for seed, domain in enumerate(spec.domains):
        paint(tmp_path / "domain_net" / domain / "axe" / "1.png", 2 * seed)
        paint(tmp_path / "domain_net" / domain / "axe" / "2.png", 2 * seed + 1)
    assert "is missing" in check.check(spec, tmp_path).problems[0]
    (tmp_path / "domain_net" / "domain_net_duplicates.txt").write_text("clipart/axe/2.png\n")
    report = check.check(spec, tmp_path)
    assert report.problems[0].startswith("domain 'clipart' has 1 images instead of 48,129")
    assert "exists" in report.problems[0]
    assert "images that the dataset's lists exclude: 1 in" in report.notes[0]


def test_data_in_memory_is_counted(tmp_path: Path) -> None:
    report = check.check(dataset_spec("RotatedDigits"), tmp_path)
    assert report.ok
    assert [domain.images for domain in report.domains] == [300, 300, 300, 299, 299, 299]


def kill_itself(path: str) -> str:
    if path == "7":
        os.kill(os.getpid(), signal.SIGKILL)
    return path


@pytest.mark.parametrize("module", [check, packing])
def test_an_image_that_is_deleted_meanwhile_is_named(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "1.png"
    paint(image, seed=1)
    decode = module.decode

    def last_look(path: Path) -> Any:
        pixels = decode(path)
        image.unlink()
        return pixels

    monkeypatch.setattr(module, "decode", last_look)
    said = check._look(str(image))[1] if module is check else packing._load(str(image), 256)
    assert said == f"image {image} cannot be read: No such file or directory"


def test_a_killed_decoder_ends_the_work_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_WORTHWHILE", 1)
    paths = [str(number) for number in range(100)]
    with pytest.raises(UserError, match="decodes images was killed, .*fewer --jobs$"):
        list(pool.map_files(kill_itself, paths, title="x", jobs=2))


def test_names_reach_the_terminal_without_control_codes(tmp_path: Path, spec: DatasetSpec) -> None:
    (tmp_path / "pets/ink/cat/\x1b[31mred.txt").write_text("stray")
    shown = text_of(check.check(spec, tmp_path))
    assert "\x1b" not in shown
    assert "\\x1b[31mred.txt" in shown
