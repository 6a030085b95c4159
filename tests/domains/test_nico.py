"""NICO++ from the authors' lists, or from folders alone."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from steppe.domains import UnreadableImage
from steppe.domains.datasets import nico
from steppe.errors import UserError

LABELS = {"truck": 0, "bear": 1, "hot air balloon": 2}
"""Not in alphabetical order, and one name with blanks."""
SUBSETS = {"train": 3, "val": 1, "test": 2}
"""Images of each class."""


def image_name(domain: str, subset: str, class_name: str, k: int) -> str:
    return f"{domain}/{class_name}/{domain}_{subset}_{k}.jpg"


def write_images(folder: Path) -> None:
    color = 0
    for domain in nico.DOMAINS:
        for subset, n in SUBSETS.items():
            for class_name in LABELS:
                for k in range(n):
                    path = folder / image_name(domain, subset, class_name, k)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    Image.new("RGB", (8, 8), (color % 256, color // 256, 128)).save(path)
                    color += 1


def write_lists(folder: Path, prefix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for domain in nico.DOMAINS:
        for subset, n in SUBSETS.items():
            lines = [
                f"{prefix}{image_name(domain, subset, class_name, k)} {label}\n"
                for class_name, label in reversed(LABELS.items())
                for k in range(n)
            ]
            (folder / f"{domain}_{subset}.txt").write_text("".join(lines))


@pytest.mark.parametrize(
    ("images", "lists", "prefix"),
    [
        (".", ".", ""),
        ("NICO_DG", "NICO_DG_official", "NICO_DG/"),  # as the authors publish them
        ("track_1/public_dg_0416/train", ".", ""),
    ],
)
def test_lists_give_the_official_subsets(tmp_path: Path, images: str, lists: str, prefix: str):
    write_images(tmp_path / images)
    write_lists(tmp_path / lists, prefix)
    classes, domains = nico.read(tmp_path)
    assert classes == tuple(LABELS)
    assert [domain.name for domain in domains] == list(nico.DOMAINS)
    for domain in domains:
        names = [domain.images.name(i) for i in range(len(domain))]
        assert len(set(names)) == len(names) == 3 * 6
        covered = np.concatenate(list(domain.subsets.values()))
        assert sorted(covered) == list(range(len(names)))
        for subset, n in SUBSETS.items():
            chosen = domain.subsets[subset]
            assert np.bincount(domain.labels[chosen]).tolist() == [n] * 3
            for i in chosen:
                assert f"{domain.name}_{subset}" in names[i]
                assert classes[domain.labels[i]] == Path(names[i]).parent.name
                assert domain.images[i].shape == (8, 8, 3)


def test_a_listed_image_that_is_missing_matters_when_it_is_read(tmp_path: Path):
    write_images(tmp_path)
    write_lists(tmp_path)
    lost = image_name("dim", "test", "bear", 1)
    (tmp_path / lost).unlink()
    dim = nico.read(tmp_path)[1][1]
    with pytest.raises(UnreadableImage, match=lost):
        dim.images[[dim.images.name(i) for i in range(len(dim))].index(lost)]


def test_an_image_listed_twice_is_one_image_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    write_lists(tmp_path)
    again = image_name("rock", "train", "truck", 0)
    with (tmp_path / "rock_test.txt").open("a") as file:
        file.write(f"\n{again} 0\nrock/truck/.DS_Store 0\n")
    rock = nico.read(tmp_path)[1][4]
    assert len(rock) == 18
    assert rock.images.name(rock.subsets["test"][-1]) == again
    assert "rock repeat 1 images" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("grass/truck/x.jpg", "expected 'CLASS/IMAGE LABEL'"),
        ("grass/hot air balloon/x.jpg", "expected 'CLASS/IMAGE LABEL'"),
        ("grass/truck/x.jpg -1", "expected 'CLASS/IMAGE LABEL'"),
        ("x.jpg 0", "expected 'CLASS/IMAGE LABEL'"),
        (
            "grass/truck/x.jpg 2",
            "class 'truck' has label 2, but elsewhere 'hot air balloon' has label 2",
        ),
        ("grass/truck/x.jpg 3", "class 'truck' has label 3, but elsewhere 'truck' has label 0"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str):
    write_lists(tmp_path)
    with (tmp_path / "grass_val.txt").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=message) as error:
        nico.read(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'grass_val.txt'}:4: ")


def test_a_label_that_no_class_has(tmp_path: Path):
    write_lists(tmp_path)
    for path in tmp_path.glob("*.txt"):
        path.write_text(path.read_text().replace(" 2\n", " 7\n"))
    with pytest.raises(UserError, match="3 classes, but none has label 2"):
        nico.read(tmp_path)


def test_lists_that_are_incomplete_or_empty(tmp_path: Path):
    write_lists(tmp_path)
    (tmp_path / "water_val.txt").write_text("\n")
    with pytest.raises(UserError, match="water_val.txt lists no images"):
        nico.read(tmp_path)
    (tmp_path / "water_val.txt").unlink()
    with pytest.raises(UserError, match="17 of its 18 list files; missing: water_val.txt"):
        nico.read(tmp_path)


@pytest.mark.parametrize("place", [".", "track_1/public_dg_0416/train"])
def test_folders_without_lists_say_that_the_split_is_not_official(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
):
    write_images(tmp_path / place)
    with caplog.at_level(logging.WARNING, "steppe"):
        classes, domains = nico.read(tmp_path)
    assert "not the official ones" in caplog.text
    assert classes == tuple(sorted(LABELS))
    assert all(not domain.subsets and len(domain) == 18 for domain in domains)


@pytest.mark.parametrize("beside", [".", "track_1"])
def test_the_archive_numbers_its_classes(tmp_path: Path, beside: str):
    write_images(tmp_path / "track_1/public_dg_0416/train")
    (tmp_path / beside / nico.LABELS).write_text(json.dumps(LABELS))
    classes, domains = nico.read(tmp_path)
    assert classes == tuple(LABELS)
    for domain in domains:
        for i, label in enumerate(domain.labels):
            assert domain.images.name(i).startswith(f"{classes[label]}/")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('["truck", "bear"]', "should map class names to the labels"),
        ('{"truck": 0, "bear": 0}', "should map class names to the labels"),
        (
            '{"truck": 0, "hot air balloon": 1, "fox": 2}',
            "different classes: only one of them has bear, fox",
        ),
    ],
)
def test_a_wrong_class_file_is_named(tmp_path: Path, text: str, message: str):
    write_images(tmp_path)
    (tmp_path / nico.LABELS).write_text(text)
    with pytest.raises(UserError, match=message) as error:
        nico.read(tmp_path)
    assert str(tmp_path / nico.LABELS) in str(error.value)


def test_nothing_there(tmp_path: Path):
    with pytest.raises(UserError, match=r"autumn_train.txt.*folders autumn, dim.*steppe data get"):
        nico.read(tmp_path)
