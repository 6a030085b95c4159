"""A run that is killed and resumed ends as if nothing had happened."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from images import packed_images

from steppe.training import RunDirectory, make_config, train
from steppe.training.directory import VOLATILE
from tests import processes
from tests.devices import GPU
from tests.training import killing

DIGITS = {
    "dataset": "RotatedDigits",
    "targets": ["75"],
    "steps": 61,
    "checkpoint_every": 4,
    "batch_size": 8,
    "dropout": 0.2,
    "device": "cpu",
}
UPDATES = (3, 11, 12, 13, 25, 30, 41, 42, 55, 60)
"""After which a run on a GPU is killed: its start takes too long to be hit by chance."""


def records(folder: Path) -> list[dict[str, object]]:
    return [
        {key: value for key, value in record.items() if key not in VOLATILE}
        for record in RunDirectory(folder).records()
    ]


def checkpoint_files(folder: Path) -> dict[str, bytes]:
    """Every tensor file of every checkpoint that is kept; JSON aside, whose sizes hold timings."""
    files = sorted((folder / "checkpoint").rglob("*.safetensors"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def assert_same_run(a: Path, b: Path) -> None:
    assert records(a) == records(b)
    steps = [record["step"] for record in records(a)]
    assert steps == sorted(set(steps))
    left, right = checkpoint_files(a), checkpoint_files(b)
    assert left.keys() == right.keys()
    assert all(left[name] == right[name] for name in left)
    assert RunDirectory(a).state == RunDirectory(b).state == "done"
    assert not list((b / "checkpoint").glob(".writing-*"))


def kill_until_done(
    config: dict[str, object], folder: Path, kills: Sequence[int] = ()
) -> list[str]:
    """Trains in ``folder/whole`` undisturbed and in ``folder/broken`` killed; see `killing`."""
    processes.run(killing.train_and_kill, config, folder, kills)
    moments: list[str] = json.loads((folder / "moments.json").read_text())
    return moments


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "fad"])
def test_killed_at_random_moments_and_while_writing(
    tmp_path: Path, optimizer: str, device: torch.device
) -> None:
    """On a GPU after certain updates instead, and with the same bits under `deterministic` only."""
    gpu = device.type == "cuda"
    options = {"optimizer": optimizer, "device": device.type, "deterministic": gpu}
    moments = kill_until_done({**DIGITS, **options}, tmp_path, kills=UPDATES if gpu else ())
    assert len(moments) >= 10
    assert gpu or moments.count("write") >= 5
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), GPU])
def test_killed_with_a_real_backbone(tmp_path: Path, device: str) -> None:
    """ResNet-18, on a GPU in fp16, augmented images from a pack, read by other processes."""
    gpu = device == "cuda"
    size = {} if gpu else {"image_size": 32, "steps": 7, "checkpoint_every": 2, "batch_size": 2}
    with packed_images(per_class=6) as images:
        config = {
            "dataset": str(images),
            "targets": ["sketch"],
            "backbone": "resnet18",
            "weights": "none",
            "freeze_bn": True,
            "optimizer": "fad",
            "precision": "fp16" if gpu else "fp32",
            "dropout": 0.1,
            "steps": 61,
            "checkpoint_every": 10,
            "batch_size": 8,
            "workers": 2,
            "device": device,
            "deterministic": True,
            **size,
        }
        kill_until_done(config, tmp_path, kills=UPDATES if gpu else (3, 5))
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_evaluation_does_not_disturb_training(tmp_path: Path) -> None:
    """Other checkpoint intervals, and so other evaluations, leave the same weights."""
    for every in (4, 60):
        config = make_config({**DIGITS, "checkpoint_every": every, "optimizer": "fad"})
        train(config, tmp_path / str(every))
    last = [tmp_path / every / "checkpoint/step-000060/model.safetensors" for every in ("4", "60")]
    assert last[0].read_bytes() == last[1].read_bytes()


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    config = make_config({**DIGITS, "steps": 3})
    first = train(config, tmp_path)
    before = checkpoint_files(tmp_path)
    assert train(config, tmp_path, resume=True) == first
    assert checkpoint_files(tmp_path) == before


def test_the_state_survives_json_exactly(tmp_path: Path) -> None:
    """Two runs of one process agree bit for bit, the second with other global generators before."""
    config = make_config({**DIGITS, "steps": 9, "optimizer": "adam"})
    train(config, tmp_path / "a")
    torch.manual_seed(1234)
    train(config, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
