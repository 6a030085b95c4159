"""`steppe bench learning`: pairs are pairs, intervals Student's, and what is done is not redone."""

import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from scipy import stats

from steppe.bench import learning
from steppe.cli import app
from steppe.errors import UserError
from steppe.training import RunConfig

CPU = torch.device("cpu")
DOMAINS = ("ink", "oil", "pen")
SMALL = ("image_size=16", "batch_size=2")


def study(images: Path, **changes: Any) -> learning.Study:
    values: dict[str, Any] = {
        "backbone": "small-cnn",
        "weights": "none",
        "optimizer": "fad",
        "steps": 3,
        "seeds": 3,
        "overrides": SMALL,
    }
    return learning.Study(CPU, images, **{**values, **changes})


def test_pairs_differ_in_how_they_are_carried_out_alone(images: Path) -> None:
    one = study(images, precision="bf16")
    engine, plain = (one.config(way, "oil", 7) for way in ("engine", "plain"))
    differing = {
        key for key, value in engine.model_dump().items() if value != plain.model_dump()[key]
    }
    assert differing == {"engine", "data", "packed", "precision"}
    assert (engine.engine, engine.data, engine.packed) == ("auto", "auto", True)
    assert (plain.engine, plain.data, plain.packed) == ("off", "host", False)
    assert (engine.precision, plain.precision) == ("bf16", "fp32")
    for config in (engine, plain):
        assert (config.seed, config.trial_seed, config.targets) == (7, 7, ("oil",))
        assert (config.batch_size, config.optimizer.name) == (2, "fad")


def test_on_a_cpu_a_pair_is_two_equal_runs(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In fp32, from a lossless pack or from files: the same bits."""
    path = tmp_path / "result.json"
    words = ["bench", "learning", "--images", images, "--backbone", "small-cnn", "--steps", 3]
    words += ["--seeds", 2, "--optimizer", "sam", "--target", "oil", "--save", path, "--json"]
    arguments = [str(word) for word in words] + [w for text in SMALL for w in ("--set", text)]
    app(arguments, standalone_mode=False)
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert json.loads(path.read_text()) == result
    assert result["difference"] == {"mean": 0.0, "interval": [0.0, 0.0], "n": 2}
    assert [(pair["target"], pair["seed"]) for pair in result["pairs"]] == [("oil", 0), ("oil", 1)]
    assert all(0 <= pair["engine"] == pair["plain"] <= 1 for pair in result["pairs"])
    assert "pack in images.pack" in result["said"]["engine"][0]
    assert "files in images" in result["said"]["plain"][0]
    assert "oil, seed 1: engine" in printed.err
    assert "0:00:00 left" in printed.err


def test_what_counts_is_the_target_after_the_last_step(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scores(value: float) -> dict[str, dict[str, float]]:
        return {"test": {"accuracy": value}, "oracle": {"accuracy": 0.9}}

    records = [{"domains": {"ink": scores(0.8), "oil": scores(v)}} for v in (0.2, 0.4)]
    monkeypatch.setattr(learning, "train", lambda *_, **__: records)
    with Progress(disable=True) as progress:
        config = study(images).config("plain", "oil", 0)
        assert learning._run(config, progress, progress.add_task(""))[0] == 0.4


class Runs:
    """Stands in for training: accuracies that are known, a count, and an end."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.configs: list[RunConfig] = []
        self._stop_after = stop_after

    def __call__(self, config: RunConfig, progress: Progress, bar: Any) -> tuple[float, float]:
        if len(self.configs) == self._stop_after:
            raise KeyboardInterrupt
        self.configs.append(config)
        return accuracy(config.engine == "auto", config.targets[0], config.seed), 1.0


def accuracy(engine: bool, target: str, seed: int) -> float:
    base = 0.5 + 0.1 * DOMAINS.index(target)
    return base + (0.01 * (seed + 1) * (DOMAINS.index(target) + 1) if engine else 0.0)


def test_intervals_are_students_over_seeds(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_run", Runs())
    result = learning.measure(study(images))
    # A target's difference is its number times the seed's, in points: the mean over targets is 2.
    means = [2.0, 4.0, 6.0]
    low, high = stats.t.interval(
        0.95, len(means) - 1, loc=statistics.mean(means), scale=stats.sem(means)
    )
    found = result["difference"]
    assert found["mean"] == pytest.approx(4.0)
    assert found["interval"] == pytest.approx([low, high], abs=1e-3)
    assert result["by seed"] == pytest.approx({"0": 2.0, "1": 4.0, "2": 6.0})
    oil = result["by target"]["oil"]
    assert oil["interval"] == pytest.approx([low, high], abs=1e-3)
    assert (oil["plain"], oil["engine"]) == pytest.approx((60.0, 64.0))
    assert result["by target"]["pen"]["mean"] == pytest.approx(6.0)
    assert result["within the bar"] is False
    assert learning.tables(result)[0].row_count == len(DOMAINS) + 1


@pytest.mark.parametrize(
    ("points", "inside"), [([0.9, 1.0, 1.1], True), ([-1.2, -1.0, -1.1], True), ([0, 1, 2], False)]
)
def test_the_whole_interval_is_within_the_bar(
    images: Path, points: list[float], inside: bool
) -> None:
    pairs = [learning.Pair("oil", i, 0.5 + p / 100, 0.5, 1, 1) for i, p in enumerate(points)]
    result = learning.summarize(study(images), pairs, ["oil"], {})
    assert result["within the bar"] is inside


def test_a_killed_one_goes_on_where_it_was(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    path.touch()  # as the command line leaves it
    killed = Runs(stop_after=9)
    monkeypatch.setattr(learning, "_run", killed)
    with pytest.raises(KeyboardInterrupt):
        learning.measure(study(images), path)
    kept = json.loads(path.read_text())
    assert len(kept["pairs"]) == 4
    assert kept["difference"] == {"mean": 2.0, "interval": None, "n": 1}  # one seed is whole
    assert kept["within the bar"] is None
    assert kept["by target"]["ink"]["n"] == 2
    rest = Runs()
    monkeypatch.setattr(learning, "_run", rest)
    result = learning.measure(study(images), path)
    assert len(rest.configs) == 2 * 5
    done = {(config.targets[0], config.seed) for config in rest.configs}
    assert done == {(d, s) for s in (1, 2) for d in DOMAINS} - {("ink", 1)}
    monkeypatch.setattr(learning, "_run", Runs())
    assert result["pairs"] == learning.measure(study(images))["pairs"]
    assert json.loads(path.read_text())["pairs"] == result["pairs"]
    none = Runs(stop_after=0)
    monkeypatch.setattr(learning, "_run", none)
    assert learning.measure(study(images), path)["difference"] == result["difference"]
    with pytest.raises(UserError, match="has pairs with steps=3, not 4: choose another --save"):
        learning.measure(study(images, steps=4), path)
    path.write_text("{}")
    with pytest.raises(UserError, match="holds something else"):
        learning.measure(study(images), path)
    assert [p.name for p in tmp_path.glob("result*")] == ["result.json"]


@pytest.mark.parametrize("text", ["engine=off", "seed=7", "optimizer.name=adam", "precision=bf16"])
def test_what_is_compared_cannot_be_overridden(images: Path, text: str) -> None:
    with pytest.raises(UserError, match="the benchmark's to set"):
        replace(study(images), overrides=(text,)).config("engine", "oil", 0)


def test_pairs_of_another_study_are_refused(images: Path, tmp_path: Path) -> None:
    """A folder of the same name with other images is another study."""
    save, other = tmp_path / "l.json", tmp_path / "other" / images.name
    shutil.copytree(images, other)
    (other / "ink/cat/0.png").rename(other / "ink/cat/renamed.png")
    facts = study(images).facts()
    save.write_text(json.dumps({**facts, "pairs": [], "said": {}}))
    with pytest.raises(UserError, match="fingerprint"):
        learning._saved(study(other), save)


def test_a_target_that_is_not_there(images: Path) -> None:
    with pytest.raises(UserError, match="no domain 'ole': ink, oil, pen"):
        learning.measure(study(images, targets=("ole",)))
