"""Several objectives in one algorithm: each has its optimizer, its turn and its own loss."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from steppe.algorithms import ERM, Losses, Objective, algorithm, registry
from steppe.training import make_config, train

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
