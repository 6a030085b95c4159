"""Averaging in a run: what is averaged, when, and which weights are evaluated, saved and loaded."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import update_bn

from steppe.domains.batches import Sampling, View
from steppe.domains.store import Store
from steppe.errors import Interrupted, UserError
from steppe.training import (
    RunDirectory,
    evaluate_ensemble,
    evaluate_run,
    export_run,
    load_model,
    make_config,
    scoring,
    select,
    setup,
    train,
)
from steppe.training.setup import open_data
from steppe.training.trainer import Trainer
from tests.training.test_resume import assert_same_run

DIGITS = {
    "dataset": "RotatedDigits",
    "targets": ["75"],
    "sources": ["0", "30"],
    "optimizer": {"name": "sgd", "lr": 0.05},
    "steps": 13,
    "checkpoint_every": 5,
    "batch_size": 8,
    "device": "cpu",
}
SWAD = {"name": "swad", "every": 2, "n_converge": 2, "n_tolerance": 2}


@pytest.fixture
def iterates(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The weights after every update, in float64."""
    seen: list[dict[str, torch.Tensor]] = []
    step = Trainer.step

    def watched(self: Trainer, batches: Any) -> None:
        step(self, batches)
        state = self.algorithm.state_dict()
        seen.append({k: v.double() for k, v in state.items() if v.is_floating_point()})

    monkeypatch.setattr(Trainer, "step", watched)
    return seen


def script(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    left = iter(losses)
    monkeypatch.setattr(scoring.Scoring, "validation_loss", lambda *_: next(left))


def mean(iterates: list[dict[str, torch.Tensor]], chosen: list[int]) -> dict[str, torch.Tensor]:
    return {name: sum(iterates[i][name] for i in chosen) / len(chosen) for name in iterates[0]}


def assert_averaged(model: nn.Module, expected: dict[str, torch.Tensor], statistics: bool) -> None:
    for name, value in model.state_dict().items():
        if value.is_floating_point() and (statistics or "running" not in name):
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_sma_serves_the_mean_of_all_iterates_from_its_start(tmp_path, iterates) -> None:
    records = train(make_config({**DIGITS, "averaging": {"name": "sma", "start": 4}}), tmp_path)
    assert [record["averaged"] for record in records] == [True] * 4
    expected = mean(iterates, list(range(3, 13)))  # the fourth update to the last
    assert_averaged(load_model(tmp_path, "last").algorithm, expected, statistics=True)
    # A run goes on from the weights themselves.
    weights = load_file(tmp_path / "checkpoint/step-000012/model.safetensors")
    assert all(torch.equal(weights[n].double(), v) for n, v in iterates[-1].items())


def test_swad_averages_the_valley_and_ends_with_it(tmp_path, iterates, monkeypatch) -> None:
    """Looks after steps 0, 2, 4, ...; both losses of the queue above 1.1 * 1.3 end the valley."""
    script(monkeypatch, [9.0, 1.0, 1.2, 1.1, 5.0, 5.0])
    records = train(make_config({**DIGITS, "averaging": {**SWAD, "counting": "paper"}}), tmp_path)
    assert [record["step"] for record in records] == [0, 5, 10]
    assert [record["averaged"] for record in records] == [False, False, True]
    assert len(iterates) == 11
    assert RunDirectory(tmp_path).state == "done"
    assert "the average is complete after step 10" in (tmp_path / "log.txt").read_text()
    expected = mean(iterates, list(range(1, 7)))  # the segments that end after steps 2, 4 and 6
    for which in ("last", "best"):
        assert_averaged(load_model(tmp_path, which).algorithm, expected, statistics=False)
    # The last record is chosen, however good the weights before it were.
    assert select(records) == records[-1]
    assert json.loads((tmp_path / "checkpoint/best/state.json").read_text())["step"] == 10
    assert train(RunDirectory(tmp_path).config(), tmp_path, resume=True) == records


def test_swad_estimates_batch_norm_statistics(tmp_path) -> None:
    """From the training batches, the domains of a step together, for the average."""
    config = make_config({**DIGITS, "averaging": SWAD})
    assert not config.freeze_bn
    train(config, tmp_path)
    model = load_model(tmp_path)
    _, splits = open_data(config)
    sampling = Sampling(tuple(s for s in splits if s.source), 8, View(8, False), 0)
    algorithm = load_model(tmp_path).algorithm
    images = [
        algorithm.network.normalize(torch.cat([b.images for b in sampling.batches(step)]))
        for step in range(config.steps)
    ]
    network = algorithm.network
    network.train()
    update_bn(images, network)
    norms = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 2
    loaded = dict(model.algorithm.network.named_modules())
    for name, norm in norms:
        torch.testing.assert_close(loaded[name].running_mean, norm.running_mean)
        torch.testing.assert_close(loaded[name].running_var, norm.running_var)


@pytest.mark.parametrize("optimizer", ["adam", "fad"])
def test_averaging_leaves_training_alone(tmp_path, optimizer: str) -> None:
    files = []
    for averaging in ("none", {"name": "sma", "start": 2}, {"name": "swad", "every": 3}):
        name = averaging if isinstance(averaging, str) else averaging["name"]
        values = {**DIGITS, "freeze_bn": True, "averaging": averaging, "optimizer": optimizer}
        train(make_config(values), tmp_path / name)
        files.append((tmp_path / name / "checkpoint/step-000012/model.safetensors").read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("averaging", [{"name": "sma", "start": 2}, SWAD], ids=lambda a: a["name"])
@pytest.mark.parametrize("moment", range(1, 23, 3))
def test_a_signal_in_an_evaluation_loses_nothing(tmp_path, monkeypatch, averaging, moment) -> None:
    """Whatever is evaluated then: the weights, or the average in their place."""
    values = {**DIGITS, "averaging": averaging}
    train(make_config(values), tmp_path / "whole")
    batches, calls = Store.evaluation, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == moment:
            signal.raise_signal(signal.SIGTERM)
        return batches(*args, **kwargs)

    monkeypatch.setattr(Store, "evaluation", watched)
    with pytest.raises(Interrupted):
        train(make_config(values), tmp_path / "broken")
    monkeypatch.undo()
    train(make_config(values), tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_validation_is_not_evaluated_twice_after_one_step(tmp_path, monkeypatch) -> None:
    scored: list[tuple[int, str, str]] = []
    score = scoring.Scoring._score

    def watched(self: Any, split: Any, part: str, done: int, watch: Any) -> Any:
        scored.append((done, split.domain.name, part))
        return score(self, split, part, done, watch)

    monkeypatch.setattr(scoring.Scoring, "_score", watched)
    train(make_config({**DIGITS, "averaging": {"name": "swad", "every": 5}}), tmp_path)
    before_the_last = [what for what in scored if what[0] < 13]
    assert len(before_the_last) == len(set(before_the_last))
    # At the last step, once for the weights and once for the average.
    assert scored.count((13, "0", "val")) == 2


def test_the_intervals_are_the_papers() -> None:
    def options(dataset: str) -> tuple[int, float]:
        config = make_config({"dataset": dataset, "targets": "x", "averaging": "SWAD"})
        return config.averaging.options["every"], config.averaging.options["tolerance"]

    assert options("PACS") == options("OfficeHome") == options("TerraIncognita") == (100, 0.3)
    assert options("VLCS") == (50, 0.2)
    assert options("DomainNet") == (500, 0.3)


def test_swad_needs_validation_images(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(scoring.Scoring, "validates", False)
    with pytest.raises(UserError, match="needs validation images"):
        train(make_config({**DIGITS, "averaging": SWAD}), tmp_path)
    assert not (tmp_path / "records.jsonl").exists()


def test_the_outcome_is_said(tmp_path, monkeypatch) -> None:
    script(monkeypatch, [9.0, 1.0, 1.2, 1.1, 5.0, 5.0])
    train(make_config({**DIGITS, "averaging": SWAD}), tmp_path / "ends")
    text = (tmp_path / "ends/log.txt").read_text()
    assert "swad: the loss valley begins after step 2 and ended before the run did" in text
    script(monkeypatch, [9.0 - i for i in range(9)])
    train(make_config({**DIGITS, "averaging": SWAD}), tmp_path / "never")
    assert "did not converge within 7 evaluations" in (tmp_path / "never/log.txt").read_text()


def test_unfinished_weights_do_not_claim_to_be_averaged(tmp_path, monkeypatch) -> None:
    step = Trainer.step

    def interrupted(self: Trainer, batches: Any) -> None:
        step(self, batches)
        if self.done == 4:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(Interrupted):
        train(make_config({**DIGITS, "averaging": SWAD}), tmp_path / "run")
    monkeypatch.undo()
    assert not load_model(tmp_path / "run").averaged
    assert export_run(tmp_path / "run", tmp_path / "file.safetensors")["averaging"] == "none"
    train(make_config({**DIGITS, "averaging": SWAD}), tmp_path / "run", resume=True)
    assert load_model(tmp_path / "run").averaged
    assert load_model(tmp_path / "run", "best").averaged
    assert export_run(tmp_path / "run", tmp_path / "file.safetensors")["averaging"] == "swad"


def test_a_class_by_class_part_is_shuffled_for_evaluation(tmp_path, monkeypatch) -> None:
    """MTL looks at a batch as a whole: in the files' order it would see one class at a time."""
    seen: list[Any] = []
    batches = Store.evaluation

    def watched(self: Any, domain: Any, chosen: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(domain.labels[chosen])
        return batches(self, domain, chosen, *args, **kwargs)

    def by_class(config: Any) -> Any:
        dataset, splits = open_data(config)
        ordered = [
            replace(s, parts={n: p[s.domain.labels[p].argsort()] for n, p in s.parts.items()})
            for s in splits
        ]
        return dataset, tuple(ordered)

    monkeypatch.setattr(setup, "open_data", by_class)
    monkeypatch.setattr(Store, "evaluation", watched)
    train(make_config({**DIGITS, "algorithm": "MTL", "steps": 1}), tmp_path)
    assert all(len(set(labels[:16])) > 4 for labels in seen)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("member") for _ in range(3)]
    for seed, folder in enumerate(folders):
        values = {**DIGITS, "seed": seed, "averaging": {"name": "sma", "start": 2}}
        train(make_config(values), folder)
    return folders


def test_an_ensemble_sums_logits(members) -> None:
    from steppe.domains import load

    found = evaluate_ensemble(members)["75"]
    (domain,) = (d for d in load("RotatedDigits").domains if d.name == "75")
    images = torch.from_numpy(domain.images.pixels).permute(0, 3, 1, 2)
    labels = torch.from_numpy(domain.labels)
    with torch.no_grad():
        logits = [load_model(folder)(images) for folder in members]
    total = logits[0] + logits[1] + logits[2]
    assert found.ensemble.accuracy == pytest.approx((total.argmax(1) == labels).double().mean())
    loss = nn.functional.cross_entropy(total.double(), labels).item()
    assert found.ensemble.cross_entropy == pytest.approx(loss, rel=1e-5)
    for folder, member in zip(members, found.members, strict=True):
        alone = evaluate_run(folder)["75"]
        assert member.accuracy == alone.accuracy
        assert member.cross_entropy == pytest.approx(alone.cross_entropy, rel=1e-6)


def test_what_cannot_be_an_ensemble_is_refused(members, tmp_path) -> None:
    train(make_config({**DIGITS, "targets": ["60"], "steps": 1}), tmp_path / "other")
    with pytest.raises(UserError, match="held out 60 and .* 75"):
        evaluate_ensemble([members[0], tmp_path / "other"])
    assert evaluate_ensemble([members[0], tmp_path / "other"], data="RotatedDigits")
    with pytest.raises(UserError, match="the ensemble lists a run twice"):
        evaluate_ensemble([members[0], members[0]])
    doodles = {"dataset": "Doodles", "targets": ["sketch"], "steps": 1, "device": "cpu"}
    train(make_config(doodles), tmp_path / "doodles")
    with pytest.raises(UserError, match="different classes"):
        evaluate_ensemble([members[0], tmp_path / "doodles"])


@pytest.mark.parametrize("algorithm", ["MTL", "ARM"])
def test_what_predicts_with_more_than_its_network_is_not_exported(tmp_path, algorithm) -> None:
    train(make_config({**DIGITS, "algorithm": algorithm, "steps": 1}), tmp_path / "run")
    with pytest.raises(UserError, match=f"{algorithm} needs more than its network"):
        export_run(tmp_path / "run", tmp_path / "file.safetensors")
