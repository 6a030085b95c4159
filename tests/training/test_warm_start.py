"""The warm start: the classifier alone learns first, under its own learning rate."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from steppe.algorithms import Objective, algorithm_names, build_algorithm
from steppe.algorithms.algorithm import trainable
from steppe.domains.batches import Batch
from steppe.errors import UserError
from steppe.training import configure, make_config, train
from steppe.training.backbones import build_network
from steppe.training.trainer import Trainer
from steppe.training.warm_start import later
from tests.training.axes import OPTIONS

DIGITS = {
    "dataset": "RotatedDigits",
    "sources": ["0", "30"],
    "targets": ["75"],
    "steps": 9,
    "checkpoint_every": 2,
    "batch_size": 4,
    "device": "cpu",
}
BUILT_IN = algorithm_names()


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoint/step-{step:06d}/model.safetensors")


@pytest.mark.parametrize("optimizer", ["adam", "fad"])
@pytest.mark.parametrize("freeze_bn", [True, False])
def test_the_backbone_stays_bit_equal_and_the_classifier_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, freeze_bn: bool
) -> None:
    seen, step = [], Trainer.step

    def watched(self: Trainer, batches: list[Batch]) -> None:
        seen.append({n: x.clone() for n, x in self.algorithm.state_dict().items()})
        step(self, batches)

    monkeypatch.setattr(Trainer, "step", watched)
    config = {**DIGITS, "optimizer": optimizer, "freeze_bn": freeze_bn, "linear_steps": 5}
    records = train(make_config({**config, "linear_lr": 0.01}), tmp_path)
    parameters = [n for n, _ in build().named_parameters()]
    for name in parameters:
        learns = "classifier" in name
        for t in range(8):
            moved = not torch.equal(seen[t][name], seen[t + 1][name])
            assert moved == (learns or t >= 5), (name, t)
    for name in (name for name in seen[0] if "running" in name):
        assert torch.equal(seen[0][name], seen[5][name]) == freeze_bn
    losses = [list(record["loss"]) for record in records]
    assert losses == [["linear"], ["linear"], ["linear"], ["total"], ["total"]]


def build(name: str = "ERM", **options: object):
    torch.manual_seed(0)
    network = build_network("small-cnn", n_classes=10, image_size=8, channels=1, freeze_bn=False)
    return build_algorithm(name, network, 2, **options)


def test_it_is_adam_on_the_classifier_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, step = [], Trainer.step

    def kept(self: Trainer, batches: list[Batch]) -> None:
        taken.append([Batch(*map(torch.clone, batch)) for batch in batches])
        step(self, batches)

    monkeypatch.setattr(Trainer, "step", kept)
    plain = {"name": "adam", "weight_decay": 0.0}
    config = {**DIGITS, "linear_steps": 7, "linear_lr": 0.02, "optimizer": plain}
    train(make_config(config), tmp_path)
    network = build().network
    optimizer = torch.optim.Adam(network.classifier.parameters(), lr=0.02)
    for batches in taken[:7]:
        with torch.no_grad():
            features = network.features(torch.cat([batch.images for batch in batches]))
        optimizer.zero_grad()
        labels = torch.cat([batch.labels for batch in batches])
        F.cross_entropy(network.classifier(features), labels).backward()
        optimizer.step()
    found = weights(tmp_path, 6)
    for name, value in network.classifier.state_dict().items():
        torch.testing.assert_close(found[f"network.classifier.{name}"], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in BUILT_IN if n != "CLIPood"])  # its classifier is fixed
def test_every_algorithm_has_a_loss_of_its_classifier_alone(name: str) -> None:
    algorithm = build(name, **OPTIONS.get(name, {}))
    own = set(algorithm.network.classifier.parameters())
    asked = {p: p.requires_grad for p in algorithm.parameters()}
    images = torch.randint(0, 256, (16, 1, 8, 8), dtype=torch.uint8)
    batches = [Batch(part, torch.arange(8)) for part in images.split(8)]
    prepared = algorithm.prepare(batches)
    losses = algorithm(prepared, objective="linear")
    losses.total.backward()
    assert {p for p in algorithm.parameters() if p.grad is not None} == own
    assert all(p.grad.abs().max() > 0 for p in own)
    assert {p: p.requires_grad for p in algorithm.parameters()} == asked
    assert losses.total.item() == pytest.approx(algorithm.risks(prepared).mean().item(), rel=1e-5)


def test_an_algorithm_begins_after_it() -> None:
    algorithm = build()
    own = Objective(
        "main",
        tuple(trainable(algorithm)),
        active=lambda step: step % 2 == 0,
        reset=lambda step: step == 3,
        lr_steps={4: 0.1},
    )
    (shifted,) = later([own], 5)
    assert [t for t in range(12) if shifted.active(t)] == [5, 7, 9, 11]
    assert [t for t in range(12) if shifted.reset(t)] == [8]
    assert shifted.lr_steps == {9: 0.1}


def test_averages_count_its_steps_but_a_valley_begins_later(tmp_path: Path) -> None:
    config = {**DIGITS, "linear_steps": 5}
    averaging = {"name": "sma", "start": 4}
    sma = train(make_config({**config, "averaging": averaging}), tmp_path / "sma")
    assert all(record["averaged"] for record in sma)
    swad = {"name": "swad", "every": 1, "n_converge": 1, "n_tolerance": 9}
    train(make_config({**config, "averaging": swad}), tmp_path / "swad")
    # A valley that begins with the first look begins with the first step of the whole network.
    log = (tmp_path / "swad/log.txt").read_text()
    assert "valley begins after step 0" in log


@pytest.mark.parametrize(
    ("options", "overrides"),
    [({"linear_lr": 0.1}, []), ({"linear_probe": True}, ["linear_lr = 0.1"])],
)
def test_a_learning_rate_without_steps_is_an_error(options: dict, overrides: list[str]) -> None:
    with pytest.raises(UserError, match="linear_lr=0.1 has no effect .* --linear-steps N"):
        configure({**DIGITS, **options}, overrides)
    stored = make_config({**DIGITS, "linear_lr": 0.1})  # by an older version
    assert configure({}, resumed=stored).linear_lr == 0.1
    assert configure({**DIGITS, **options}, [*overrides, "linear_steps=2"]).linear_lr == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear_steps": 9}, "linear_steps=9 leaves none of steps=9"),
        ({"linear_steps": -1}, "linear_steps=-1"),
        ({"linear_lr": 0}, "linear_lr=0"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_config({**DIGITS, **options})
