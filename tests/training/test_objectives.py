"""Several objectives in one algorithm: each has its optimizer, its turn and its own loss."""

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional as F

from steppe.algorithms import ERM, Losses, Objective, algorithm, registry
from steppe.averaging.swad import SWAD
from steppe.domains import load
from steppe.training import RunConfig, load_model, make_config, train
from steppe.training.initial import initialize
from steppe.training.trainer import Trainer

SEEN: list[list[str]] = []


class Alternating(ERM):
    """Trains the classifier at even steps and the featurizer at odd ones, and nothing at step 4."""

    def objectives(self) -> tuple[Objective, ...]:
        network = self.network
        even, odd = (
            tuple(algorithm.trainable(m)) for m in (network.classifier, network.featurizer)
        )
        return (
            Objective("main", even, active=lambda step: step % 2 == 0 and step != 4),
            Objective("features", odd, active=lambda step: step % 2 == 1),
        )

    def forward(self, prepared: Any, objective: str = "main", first: Any = None) -> Losses:
        losses = super().forward(prepared)
        return Losses(losses.total, {f"{objective} again": losses.total})

    def commit(self, prepared: Any, first: Mapping[str, Losses]) -> None:
        SEEN.append(sorted(first))


@pytest.mark.parametrize("optimizer", ["adam", "fad"])
def test_objectives_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    spec = registry.AlgorithmSpec.of(Alternating, "Alternating")
    monkeypatch.setitem(registry.algorithms._table, "alternating", spec)
    SEEN.clear()
    values = {"dataset": "RotatedDigits", "targets": "75", "algorithm": "alternating"}
    values |= {"optimizer": optimizer, "steps": 8, "checkpoint_every": 5, "device": "cpu"}
    records = train(make_config(values), tmp_path)
    assert [["main"], ["features"], ["main"], ["features"], [], *SEEN[1:4]] == SEEN
    assert list(records[0]["loss"]) == ["total", "main again"]
    assert set(records[-1]["loss"]) == {"total", "main again", "features", "features again"}
    assert records[-1]["loss"]["features"] == records[-1]["loss"]["features again"]
    assert all(math.isfinite(value) for record in records for value in record["loss"].values())


def test_means_are_of_the_steps_that_had_a_value() -> None:
    from steppe.training.means import Means

    means = Means()
    assert means.not_finite() is None
    assert means.take() == {}
    for value in (1.0, 3.0):
        means.add({"total": torch.tensor(value)})
    means.add({"penalty": torch.tensor(5.0)})
    kept = means.state_dict()
    again = Means()
    again.load_state_dict(kept, torch.device("cpu"))
    assert means.take() == again.take() == {"total": 2.0, "penalty": 5.0}
    means.add({"total": torch.tensor(math.inf)})
    assert means.not_finite() == math.inf


def registered(monkeypatch: pytest.MonkeyPatch, cls: type[ERM], **values: Any) -> RunConfig:
    """A short run of a class that is registered for one test."""
    spec = registry.AlgorithmSpec.of(cls, cls.__name__)
    monkeypatch.setitem(registry.algorithms._table, cls.__name__.lower(), spec)
    chosen = {"dataset": "RotatedDigits", "targets": "75", "algorithm": cls.__name__}
    return make_config({**chosen, "steps": 8, "device": "cpu", **values})


class Cooling(ERM):
    """A tenth of the learning rate from step 3 on, and half of that from step 5 on."""

    def objectives(self) -> tuple[Objective, ...]:
        own = tuple(algorithm.trainable(self.network))
        return (Objective("main", own, lr_steps={3: 0.1, 5: 0.5}),)


@pytest.mark.parametrize("optimizer", ["sgd", "fad"])
def test_a_learning_rate_changes_at_a_step_and_stays_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    seen: list[tuple[int, float]] = []
    step = Trainer.step

    def watched(self: Trainer, batches: Any) -> None:
        step(self, batches)
        (group,) = self.optimizers["main"].param_groups
        seen.append((self.done - 1, group["lr"]))
        if self.done == stops[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "step", watched)
    config = registered(
        monkeypatch, Cooling, optimizer={"name": optimizer, "lr": 0.2}, checkpoint_every=2
    )
    stops = [4, 6, 99]
    while stops:  # the run goes on from its last checkpoint
        with suppress(KeyboardInterrupt):
            train(config, tmp_path, resume=True)
        del stops[0]
    assert len(seen) > 8
    expected = [0.2] * 3 + [0.2 * 0.1] * 2 + [0.2 * 0.1 * 0.5] * 3
    assert dict(seen) == dict(enumerate(expected))
    assert all(lr == expected[number] for number, lr in seen)


class Later(ERM):
    """Trains only the classifier at first, by an objective that is not the main one."""

    def objectives(self) -> tuple[Objective, ...]:
        network = self.network
        head, everything = (tuple(algorithm.trainable(m)) for m in (network.classifier, network))
        return (
            Objective("head", head, active=lambda step: step < 5),
            Objective("main", everything, active=lambda step: step >= 5),
        )

    def forward(self, prepared: Any, objective: str = "main", first: Any = None) -> Losses:
        return super().forward(prepared)


def test_averages_wait_for_the_main_objective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: dict[str, list[int]] = {"update": [], "observe": []}
    for name, found in steps.items():
        before = getattr(SWAD, name)

        def watched(self: SWAD, *given: Any, _do: Any = before, _found: Any = found) -> None:
            _found.append(trainer[0].done)
            _do(self, *given)

        monkeypatch.setattr(SWAD, name, watched)
    trainer: list[Trainer] = []
    step = Trainer.step
    monkeypatch.setattr(
        Trainer, "step", lambda self, batches: (trainer.append(self), step(self, batches))
    )
    swad = {"name": "swad", "every": 2}
    train(registered(monkeypatch, Later, averaging=swad, optimizer="sgd"), tmp_path)
    assert steps["update"] == [5, 6, 7]
    assert steps["observe"] == [7, 8]  # after steps 6 and 7, but not after 0, 2 and 4


class Numbered(ERM):
    """Predicts source domains in its own way."""

    seen: ClassVar[set[tuple[int, int]]] = set()

    def predict_source(self, images: torch.Tensor, domain: int) -> torch.Tensor:
        self.seen.add((domain, len(images)))
        return F.one_hot(torch.full((len(images),), domain), self.network.n_classes).double()


def test_predictions_know_their_source_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"targets": "30", "sources": ["0", "75"], "steps": 1, "optimizer": "sgd"}
    Numbered.seen.clear()
    (record,) = train(registered(monkeypatch, Numbered, **chosen), tmp_path)
    assert {domain for domain, _ in Numbered.seen} == {0, 1}
    # Everything is predicted to be of class 0 in domain 0 and of class 1 in domain 75.
    labels = {domain.name: domain.labels for domain in load("RotatedDigits").domains}
    for number, name in enumerate(("0", "75")):
        parts = record["domains"][name].values()
        right = sum(part["accuracy"] * part["images"] for part in parts)
        assert round(right) == (labels[name] == number).sum()
    assert record["domains"]["30"]["test"]["cross_entropy"] != pytest.approx(
        record["domains"]["0"]["val"]["cross_entropy"]
    )


def test_initial_weights_have_a_seed_of_their_own(tmp_path: Path) -> None:
    def weights(steps: int = 1, **values: Any) -> list[torch.Tensor]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        lr = 1e-30 if steps == 1 else 0.1  # as they were, or trained
        chosen = {"optimizer": {"name": "sgd", "lr": lr}, "dropout": 0.2, "steps": steps, **values}
        digits = {"dataset": "RotatedDigits", "targets": "75", "device": "cpu"}
        train(make_config({**digits, **chosen}), folder)
        return list(load_model(folder, "last").parameters())

    def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
        pairs = zip(ours, theirs, strict=True)
        return all(torch.allclose(a, b, rtol=0, atol=1e-25) for a, b in pairs)

    assert same(weights(seed=1, init_seed=7), weights(seed=2, init_seed=7))
    assert same(weights(seed=7), weights(seed=1, init_seed=7))
    assert not same(weights(seed=1), weights(seed=1, init_seed=7))
    assert not same(weights(5, seed=1, init_seed=7), weights(5, seed=2, init_seed=7))
    assert same(weights(5, seed=3), weights(5, seed=3, init_seed=3))


def test_a_twin_differs_by_rounding_alone() -> None:
    digits = {"dataset": "RotatedDigits", "targets": "75", "dropout": 0.0}
    one, other = (
        initialize(make_config({**digits, "twin": twin}), ("0", "1"), 1, 5).state_dict()
        for twin in (0, 1)
    )
    for name, weights in one.items():
        torch.testing.assert_close(other[name], weights, rtol=2.4e-7, atol=0.0)
        if weights.is_floating_point() and weights.ndim > 1:  # others start at zero or one
            assert (other[name] != weights).float().mean() > 0.9
