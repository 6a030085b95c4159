"""`benchmarks/step.py`: it times the real loop, from a pack; its parts are what they are called."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import numpy as np
import pytest
import step
import torch
from harness import Still
from images import MIXED, image_folder, packed_images
from PIL import Image

from steppe.domains.batches import Batch, Sampling
from steppe.domains.dataset import decode
from steppe.domains.store import Host
from steppe.errors import UserError
from steppe.training import make_config
from steppe.training.execution import Engine
from steppe.training.trainer import Trainer


def options(images: Path, **values: Any) -> step.Options:
    """Of a CPU, unless other ones are given."""
    chosen = {"device": "cpu", "images": images, "backbone": "resnet18", "rounds": 1, "steps": 1}
    return step.Options(**{**chosen, **values})


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three domains of small images, which a run leaves small."""
    rng = np.random.default_rng(0)
    for domain in ("ink", "oil", "pen"):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / domain / name
            folder.mkdir(parents=True)
            for i in range(6):
                pixels = rng.integers(256, size=(36, 36, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.jpg")
    small = {"image_size": 32}
    monkeypatch.setattr(step, "make_config", lambda values: make_config({**values, **small}))
    return tmp_path / "images"


def median(figures: dict[str, Any], name: str) -> float:
    return float(figures[name]["median"])


def test_figures_follow_from_each_other(images: Path) -> None:
    result = step.measure(options(images, batch=4, optimizer="sam", steps=2))
    assert result["batch"] == "2 x 2"
    assert list(result["runs"]) == ["sam", "adam"]
    assert result["peak GiB of the process"] > 0.1
    for name, passes in (("sam", 2), ("adam", 1)):
        run = result["runs"][name]
        assert (run["optimizer"], run["passes"], run["engine"]) == (name, passes, "eager")
        assert (run["precision"], run["reasons"]) == ("fp32", [])
        whole, one = median(run, "ms per step"), median(run, "ms per forward and backward")
        data, update = (
            median(run, key) for key in ("ms of data alone", "ms in forward, backward, optimizer")
        )
        assert 0 < data < whole
        assert 0 < update < whole
        assert median(run, "images per second") == pytest.approx(4e3 / whole, rel=1e-3)
        assert median(run, "step over its passes") == pytest.approx(whole / passes / one, rel=1e-2)
        assert median(run, "data alone over step") == pytest.approx(data / whole, abs=1e-3)
        assert median(run, "overhead") == pytest.approx(1 - update / whole, abs=1e-3)
    times = [median(run, "ms per step") for run in result["runs"].values()]
    assert median(result["ratios"], "sam over adam") == pytest.approx(times[0] / times[1], rel=1e-2)


def test_beside_another_precision_there_is_a_plain_run(images: Path) -> None:
    result = step.measure(options(images, batch=2, rounds=2, precision="bf16"))
    runs = result["runs"]
    assert {name: run["precision"] for name, run in runs.items()} == {
        "adam": "bf16",
        "adam, plain": "fp32",
    }
    theirs = f"adam over {step.DOMAINBED}, batch at hand"
    assert result["ratios"].keys() == {"adam over adam, plain", theirs}


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_parts_are_what_they_are_called(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch takes 1 s, and nothing while it waits to be asked for; an update 4, a pass 0.5."""
    clock, seen = Clock(), []
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=clock))
    make, train, optimize = Host.training, Trainer.step, Engine.optimize

    def slow(self: Host, sampling: Sampling, start: int, stop: int) -> Iterator[list[Batch]]:
        for batches in make(self, sampling, start, stop):
            clock.now += 1.0
            yield batches

    def long(self: Trainer, batches: list[Batch]) -> None:
        clock.now += 4.0
        train(self, batches)

    def counted(self: Engine, optimizer: Any, objective: str, prepared: Any) -> Any:
        if isinstance(optimizer, Still):
            clock.now += 0.5
            before = [p.detach().clone() for p in self._passes.module.parameters()]
            losses = optimize(self, optimizer, objective, prepared)
            found = [p.grad for p in self._passes.module.parameters() if p.requires_grad]
            assert all(g is not None and g.abs().sum() > 0 for g in found)
            assert all(map(torch.equal, before, self._passes.module.parameters()))
            seen.append(prepared[0].images.shape)
            return losses
        return optimize(self, optimizer, objective, prepared)

    monkeypatch.setattr(Host, "training", slow)
    monkeypatch.setattr(Trainer, "step", long)
    monkeypatch.setattr(Engine, "optimize", counted)
    with packed_images(images) as folder:
        runner = step.Runner(options(folder, batch=4).config(folder, "adam"), tmp_path)
        found = runner.measure(3)
    assert found | {"update": 0.0} == {
        "whole": 5.0,
        "update": 0.0,
        "ready": 4.0,
        "pass": 0.5,
        "data": 1.0,
    }
    assert set(seen) == {torch.Size([4, 3, 32, 32])}
    assert runner.trainer.done == 2 + 1 + 3 + 3  # eager: two updates warm it up
    assert all(p.grad is None for p in runner.trainer.algorithm.parameters())


def test_a_batch_is_shared_by_the_domains(images: Path) -> None:
    with pytest.raises(UserError, match="--batch 3 is not a multiple of 2 domains"):
        step.measure(options(images, batch=3, optimizer="sgd"))


def test_algorithms_are_compared_with_erm(images: Path) -> None:
    chosen = ["CORAL", "MLDG"]
    result = step.measure(options(images, batch=4, optimizer="sgd", algorithm=chosen))
    runs = result["runs"]
    assert list(runs) == ["ERM", "CORAL", "MLDG"]
    assert result["ratios"].keys() == {"CORAL over ERM", "MLDG over ERM"}
    times = {name: median(run, step.AT_HAND) for name, run in runs.items()}
    assert median(result["ratios"], "MLDG over ERM") == pytest.approx(
        times["MLDG"] / times["ERM"], rel=1e-3
    )


@pytest.mark.gpu
def test_memory_and_gears_on_a_gpu(images: Path) -> None:
    chosen = {"device": "cuda:0", "batch": 8, "optimizer": "fad", "rounds": 2, "steps": 3}
    result = step.measure(options(images, **chosen))
    names = [f"{name}{way}" for way in ("", ", plain", ", strict") for name in ("fad", "adam")]
    assert list(result["runs"]) == names
    fad, adam, plain, *_ = result["runs"].values()
    assert "captured" in fad["engine"]
    assert "captured" in adam["engine"]
    assert (plain["engine"], plain["precision"]) == ("eager", "fp32")
    assert "Pillow" in plain["images"]
    assert "on the device" in fad["images"]
    assert all(run["peak GiB"] > 0 for run in (fad, adam, plain))
    assert -0.5 < result["memory over adam, in parameter-sized buffers"] < 4


def test_rivals_can_be_chosen(images: Path) -> None:
    precise = options(images, batch=4, optimizer="sam", precision="bf16")
    found = [list(step.contenders(replace(precise, rival=r), images)) for r in (None, ["none"])]
    assert found == [["sam", "adam", "sam, plain", "adam, plain"], ["sam", "adam"]]
    with pytest.raises(UserError, match="rival 'fast'"):
        step.contenders(replace(precise, rival=["fast"]), images)


def test_a_built_in_dataset_needs_no_folder(tmp_path: Path) -> None:
    chosen = {"backbone": "small-cnn", "dataset": "RotatedDigits", "image_size": 8, "batch": 10}
    result = step.measure(options(tmp_path / "none", optimizer="sgd", baseline="sgd", **chosen))
    assert (result["data"], result["batch"], result["image size"]) == ("RotatedDigits", "5 x 2", 8)


def test_generated_images_may_be_of_many_sizes() -> None:
    with image_folder(per_class=2, mixed=True) as root:
        sizes = [decode(path).shape[:2] for path in root.rglob("*.jpg")]
    sides = [side for size in sizes for side in size]
    assert len(set(sizes)) > len(sizes) // 2
    assert MIXED[0] <= min(sides) < max(sides) <= MIXED[1]
