"""Damaged images and archives: each is read or refused by an error of ours, nothing else."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from steppe.domains.archives import unpack
from steppe.domains.dataset import UnreadableImage, decode
from steppe.errors import UserError

from .mutations import archives, images, mutated


def refusal(error: type[UserError], work: Callable[[], object]) -> str:
    """What an error of ours says, or nothing."""
    try:
        work()
    except error as said:
        return str(said)
    return ""


def look(path: Path) -> None:
    pixels = decode(path)
    assert pixels.dtype == np.uint8
    assert pixels.shape[2:] == (3,)


@pytest.mark.filterwarnings("ignore")  # as for a user, whose Pillow goes on after its warnings
@pytest.mark.parametrize("number", [200, pytest.param(6000, marks=pytest.mark.slow)])
def test_mutated_images(tmp_path: Path, number: int) -> None:
    refused = 0
    for name, data in mutated(images(), number, seed=21):
        path = tmp_path / name
        path.write_bytes(data)
        said = refusal(UnreadableImage, lambda path=path: look(path))
        assert not said or said.startswith(f"image {path} cannot be read: ")
        assert "\n" not in said
        refused += bool(said)
    print(f"{number:,} mutated images: {refused:,} refused, the others read")
    assert 0.5 * number < refused < 0.95 * number  # damage of more than one kind


@pytest.mark.parametrize("number", [100, pytest.param(2500, marks=pytest.mark.slow)])
def test_mutated_archives(tmp_path: Path, number: int) -> None:
    refused = 0
    (tmp_path / "here").mkdir()
    for index, (name, data) in enumerate(mutated(archives(), number, seed=21)):
        archive, folder = tmp_path / name, tmp_path / "here" / str(index)
        archive.write_bytes(data)
        said = refusal(UserError, lambda a=archive, f=folder: unpack(a, f))
        assert "\n" not in said
        refused += bool(said)
    print(f"{number:,} mutated archives: {refused:,} refused, the others unpacked")
    assert 0.5 * number < refused < 0.95 * number
    assert {path.name for path in tmp_path.iterdir()} == {"here", *dict(archives())}
    assert {path.name for path in (tmp_path / "here").iterdir()} <= set(map(str, range(number)))
