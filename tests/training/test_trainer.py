"""The loop against the same run written out by hand, and what its records say."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from steppe.algorithms import Losses
from steppe.curvature.convolution import FastConvolutions
from steppe.domains import load, seed_hash, split_indices
from steppe.errors import UserError
from steppe.optim import build_optimizer
from steppe.training import RunDirectory, load_model, make_config, select, train, update
from steppe.training.backbones import build_network
from tests.limits import seconds

DIGITS = {
    "dataset": "RotatedDigits",
    "targets": ["75"],
    "steps": 12,
    "checkpoint_every": 5,
    "batch_size": 8,
    "device": "cpu",
}


def by_hand(optimizer_name: str, steps: int) -> dict[str, torch.Tensor]:
    """ERM on RotatedDigits without 75 degrees, from the definitions."""
    config = make_config({**DIGITS, "optimizer": optimizer_name})
    dataset = load("RotatedDigits")
    torch.manual_seed(0)
    network = build_network(
        "small-cnn", n_classes=10, image_size=8, channels=1, weights="none", freeze_bn=False
    )
    optimizer = build_optimizer(
        optimizer_name, network.parameters(), model=network, **config.optimizer.options
    )
    for step in range(steps):
        images, labels = [], []
        for position in range(5):
            domain = dataset.domains[position]
            train_part, _ = split_indices(len(domain), 0.2, seed_hash(0, position))
            rng = np.random.default_rng([1, 0, position, step])
            for i in train_part[rng.integers(len(train_part), size=8)]:
                images.append(domain.images[int(i)])
                labels.append(int(domain.labels[i]))
        x = torch.from_numpy(np.stack(images)).view(-1, 1, 8, 8).float() / 255
        y = torch.tensor(labels)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
    return network.state_dict()


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "sam", "gam", "fad"])
def test_trains_as_written_out_by_hand(tmp_path: Path, optimizer: str) -> None:
    train(make_config({**DIGITS, "optimizer": optimizer}), tmp_path)
    expected = by_hand(optimizer, steps=12)
    weights = load_file(tmp_path / "checkpoint/step-000011/model.safetensors")
    assert weights.keys() == {f"network.{name}" for name in expected}
    for name, value in expected.items():
        assert torch.equal(weights[f"network.{name}"], value), name


@pytest.mark.parametrize(
    "optimizer", ["adahessian", "gam-exact", "gam-release", "genie", "yogi", "adabelief"]
)
def test_every_other_optimizer_trains(tmp_path: Path, optimizer: str) -> None:
    records = train(make_config({**DIGITS, "steps": 30, "optimizer": optimizer}), tmp_path)
    assert records[-1]["loss"]["total"] < 0.9 * records[0]["loss"]["total"]


@pytest.mark.filterwarnings("ignore::steppe.optim.Bfloat16Warning")
@pytest.mark.parametrize(
    ("optimizer", "precision", "fast"),
    [
        ("adahessian", "fp32", True),
        ("gam-exact", "fp32", True),
        ("gam-exact", "bf16", False),
        ("fad", "fp32", False),
    ],
)
def test_convolutions_that_are_differentiated_twice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    precision: str,
    fast: bool,
) -> None:
    entered = []

    class Counted(FastConvolutions):
        def __enter__(self) -> object:
            entered.append(True)
            return super().__enter__()

    weights = []
    for convolutions in (Counted, nullcontext):
        monkeypatch.setattr(update, "FastConvolutions", convolutions)
        folder, options = tmp_path / convolutions.__name__, {"optimizer": optimizer, "steps": 2}
        train(make_config({**DIGITS, **options, "precision": precision}), folder)
        weights.append(load_file(folder / "checkpoint/step-000001/model.safetensors"))
    assert bool(entered) == fast
    for name, value in weights[0].items():  # AdaHessian divides by numbers that are all rounding
        other = weights[1][name]
        assert (value - other).double().norm() <= 1e-2 * other.double().norm(), name


class Attention(nn.Module):
    """Attention of an image's rows, with torch's fast kernels where they may be used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Net(nn.Module):
    """What the trainer takes a step with, of a network that may be compiled."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.Tanh(), Attention(), nn.Flatten(), nn.Linear(108, 2)
        )
        self.run = torch.compile(self.net, backend="eager") if compiled else self.net

    def forward(self, part: Any, objective: str = "main", first: Any = None) -> Losses:
        return Losses(F.cross_entropy(self.run(part[0]), part[1]))


def test_second_derivatives_of_a_network_that_is_compiled() -> None:
    part = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(5) % 2
    weights = []
    for compiled in (False, True):
        net = Net(compiled)
        opt = build_optimizer("gam-exact", net.net.parameters(), model=net, lr=0.1, rho=0.5)
        update.Passes(net).optimize(opt, "main", [part])
        weights.append(torch.cat([p.detach().flatten() for p in net.net.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-7)


def test_records(tmp_path: Path) -> None:
    config = make_config({**DIGITS, "optimizer": "fad", "steps": 13})
    records = train(config, tmp_path)
    assert [record["step"] for record in records] == [0, 5, 10, 12]
    last = records[-1]
    domains = last["domains"]
    assert list(domains) == ["0", "15", "30", "45", "60", "75"]
    assert all(set(domains[name]) == {"train", "val"} for name in list(domains)[:5])
    assert set(domains["75"]) == {"test", "oracle"}
    assert domains["0"]["train"]["images"] == 240
    assert domains["0"]["val"]["images"] == 60
    assert set(domains["0"]["val"]) == {"accuracy", "cross_entropy", "calibration_error", "images"}
    values = [domains[name]["val"]["accuracy"] for name in list(domains)[:5]]
    assert last["worst_accuracy"]["val"] == min(values)
    assert last["epoch"] == 12 * 8 / 240  # the smallest larger part: 300 - 60 and 299 - 59
    assert last["seconds_per_step"] > 0
    assert last["memory_gb"] > 0
    means = [
        np.mean([r["domains"][n]["val"]["accuracy"] for n in list(domains)[:5]]) for r in records
    ]
    assert select(records) == records[int(np.argmax(means))]
    best = json.loads((tmp_path / "checkpoint/best/state.json").read_text())
    assert best["step"] == select(records)["step"]
    # What a record says is what the saved model does.
    model = load_model(tmp_path)
    domain = load("RotatedDigits").domains[0]
    _, held_out = split_indices(300, 0.2, seed_hash(0, 0))
    images = torch.from_numpy(domain.images.pixels[held_out]).permute(0, 3, 1, 2)  # type: ignore[attr-defined]
    with torch.no_grad():
        right = model(images).argmax(1).numpy() == domain.labels[held_out]
    assert right.mean() == domains["0"]["val"]["accuracy"]


def test_a_batch_in_parts_gives_the_same_update(tmp_path: Path) -> None:
    """In float32, so to rounding; batch norm frozen, since its statistics are of a part."""
    weights = []
    for parts in (1, 4):
        config = {**DIGITS, "optimizer": "fad", "accumulate": parts, "freeze_bn": True, "steps": 4}
        train(make_config(config), tmp_path / str(parts))
        file = tmp_path / str(parts) / "checkpoint/step-000003/model.safetensors"
        weights.append(load_file(file))
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-6)


def test_bf16_trains_on_a_cpu(tmp_path: Path) -> None:
    records = train(make_config({**DIGITS, "precision": "bf16", "optimizer": "sgd"}), tmp_path)
    assert records[-1]["loss"]["total"] < records[0]["loss"]["total"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": "fp16"}, "needs a GPU"),
        ({"precision": "tf32"}, "needs a GPU"),
        ({"device": "cuda:99"}, "cannot be used"),
        ({"targets": ["90"]}, "has no domain '90'"),
        ({"targets": list("abc"[:0])}, "has no 'targets'"),
        ({"targets": ["0", "15", "30", "45", "60", "75"]}, "none is left to train on"),
        ({"weights": "imagenet"}, "no ImageNet weights"),
        ({"loggers": ["tensorbored"]}, "did you mean 'tensorboard'"),
    ],
)
def test_what_cannot_work_is_refused_before_training(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(make_config({**DIGITS, **change}), tmp_path)
    assert not (tmp_path / "records.jsonl").exists()


def test_two_processes_train_as_one(tmp_path: Path, steppe) -> None:
    """By torchrun, as the docs say; batch norm frozen, since each process has its own statistics.

    Float32, and sums in another order: to rounding, over 12 steps.
    """
    shared = ["train", "--dataset", "RotatedDigits", "--target", "75", "--optimizer", "fad"]
    shared += ["--steps", "12", "--set", "checkpoint_every=5", "--set", "batch_size=8"]
    shared += ["--set", "freeze_bn=true", "--device", "cpu"]
    code, _, err = steppe(*shared, "--out", tmp_path / "one")
    assert code == 0, err
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "steppe"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, *shared, "--out", tmp_path / "two"],
        capture_output=True,
        text=True,
        timeout=seconds(1000),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    one, two = (
        load_file(tmp_path / n / "checkpoint/step-000011/model.safetensors") for n in ("one", "two")
    )
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6)
    first, second = (RunDirectory(tmp_path / n).records() for n in ("one", "two"))
    assert len(first) == len(second) == 4
    for a, b in zip(first, second, strict=True):
        assert b["loss"]["total"] == pytest.approx(a["loss"]["total"], abs=1e-5)
        for domain, parts in a["domains"].items():
            for part, scores in parts.items():
                assert b["domains"][domain][part] == pytest.approx(scores, abs=1e-4)
                assert b["domains"][domain][part]["images"] == scores["images"]


def test_a_batch_that_processes_cannot_share_is_refused() -> None:
    from steppe.domains.batches import Sampling, View

    with pytest.raises(UserError, match="not a multiple of 3 processes"):
        Sampling((), 8, View(8, False), 0, rank=0, world=3)


def test_a_run_says_what_it_resolved_first(tmp_path: Path) -> None:
    config = make_config({**DIGITS, "steps": 2, "optimizer": {"name": "fad", "rho": 0.1}})
    train(config, tmp_path)
    line = (tmp_path / "log.txt").read_text().splitlines()[0]
    settings = "lr=0.02, weight_decay=0.0001, momentum=0.9, rho=0.1, alpha=0.5, beta=0.5"
    resolved = "fp32, cpu, eager, data in memory, on the host"
    assert f"fad ({settings}), batch 5 x 8, 2 steps, {resolved}" in line
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["precision"] == "auto"
    assert written["resolved"]["precision"] == "fp32"
    assert written["resolved"]["device"] == "cpu"
    assert written["resolved"]["data"].startswith("in memory")
    again = RunDirectory(tmp_path).config()
    assert again.model_copy(update={"resolved": None}) == config
    assert train(config, tmp_path, resume=True)  # what it resolved is no other run
