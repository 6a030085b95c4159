"""The linear probe: an optimum by its gradient and by scikit-learn, and the start of a run."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.errors import UserError
from steppe.training import make_config, train
from steppe.training.probe import (
    GRID,
    TOLERANCE,
    Examples,
    Probe,
    examples,
    fit_probe,
    logistic_regression,
    penalized,
)
from steppe.training.trainer import Trainer
from tests.training.test_warm_start import DIGITS


def data(n: int = 90, d: int = 6, classes: int = 3, seed: int = 0) -> Examples:
    """Features of different sizes, far from the origin, that no line separates."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator) * torch.arange(1, d + 1) + 20
    noisy = x[:, :classes] + 3 * torch.randn(n, classes, generator=generator)
    return Examples(x, noisy.argmax(1))


@pytest.mark.parametrize("c", [1e-3, 0.1, 100.0])
def test_the_gradient_is_zero_and_scikit_learn_agrees(c: float) -> None:
    from sklearn.linear_model import LogisticRegression

    features, labels = data()
    x = features.double() - features.double().mean(0)
    start = torch.zeros(3, 7, dtype=torch.float64)
    found = logistic_regression(x, labels, c, start).requires_grad_()
    logits = F.linear(x, found[:, :-1], found[:, -1])
    loss = F.cross_entropy(logits, labels) + found[:, :-1].square().sum() / (2 * c * len(x))
    (gradient,) = torch.autograd.grad(loss, found)
    assert gradient.abs().max() <= TOLERANCE
    value, ours = penalized(x, F.one_hot(labels).double(), c, found.detach())
    assert value == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(ours, gradient, rtol=0, atol=1e-14)
    theirs = LogisticRegression(C=c, tol=1e-9, max_iter=5000).fit(x.numpy(), labels.numpy())
    np.testing.assert_allclose(found[:, :-1].detach(), theirs.coef_, atol=1e-3)


def test_the_most_accurate_c_is_chosen_on_validation_images() -> None:
    train_on, validation = data(), [data(seed=1), data(n=30, seed=2)]
    each = [fit_probe(train_on, [], 3, [c for c in GRID if c <= last]) for last in GRID]
    assert [probe.c for probe in each] == list(GRID)

    def accuracy(probe: Probe) -> float:
        right = [probe.predict(x).argmax(1) == y for x, y in validation]
        return float(np.mean([each.double().mean() for each in right]))

    scores = [accuracy(probe) for probe in each]
    assert len(set(scores)) > 1
    chosen = fit_probe(train_on, validation, 3)
    assert chosen.c == GRID[scores.index(max(scores))]
    assert chosen.accuracy == pytest.approx(max(scores))
    # Of all features the same multiple and shift, the same predictions.
    moved = fit_probe(Examples(5 * train_on.features - 7, train_on.labels), [], 3, [chosen.c])
    torch.testing.assert_close(
        moved.predict(5 * train_on.features - 7), each[GRID.index(chosen.c)].predict(train_on[0]),
        rtol=0, atol=1e-3,
    )  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list:
    """Two values of C; returns the probes that runs start from."""
    found: list[Probe] = []
    load = Probe.load_into
    monkeypatch.setattr("steppe.training.probe.GRID", (1e-3, 1e-2))
    monkeypatch.setattr(Probe, "load_into", lambda self, c: (found.append(self), load(self, c)))
    return found


@pytest.mark.parametrize("algorithm", ["ERM", "MTL"])
def test_a_run_starts_from_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list, algorithm: str
) -> None:
    logits, step = [], Trainer.step
    images = torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8)

    def before(self: Trainer, batches: list) -> None:
        if not self.done:
            (probe,) = quick
            network = self.algorithm.network.eval()
            with torch.no_grad():
                features = network.features(images)
                if algorithm == "MTL":
                    features = torch.cat([features, features.mean(0).expand_as(features)], 1)
                logits.append((self.algorithm.predict(images), probe.predict(features)))
            network.train()
        step(self, batches)

    monkeypatch.setattr(Trainer, "step", before)
    config = {**DIGITS, "linear_probe": True, "algorithm": algorithm, "steps": 2}
    records = train(make_config(config), tmp_path / "run")
    ((ours, probes),) = logits
    torch.testing.assert_close(ours, probes.float(), rtol=0, atol=1e-5)
    assert records[0]["probe"] == quick[0].to_json()
    assert "probe" not in records[1]
    # A resumed run has its weights.
    train(make_config(config), tmp_path / "run", resume=True)
    assert len(quick) == 1


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_a_prediction_that_is_not_the_classifiers_is_refused(passes: int) -> None:
    classifier = torch.nn.Linear(2, 3)

    def predict(images: torch.Tensor) -> torch.Tensor:
        logits = [classifier(images) for _ in range(passes)]
        return 2 * logits[0] if logits else torch.zeros(len(images), 3)

    with pytest.raises(UserError, match="one pass of the network's classifier"):
        examples(classifier, predict, [Batch(torch.ones(4, 2), torch.zeros(4))])
    assert not classifier._forward_hooks


def test_a_probe_needs_validation_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steppe.training.scoring.Scoring.validates", False)
    with pytest.raises(UserError, match="linear_probe needs validation images"):
        train(make_config({**DIGITS, "linear_probe": True}), tmp_path)
