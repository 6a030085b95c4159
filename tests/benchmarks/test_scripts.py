"""Every script runs from its command line to a stored result."""

import json
import math
from pathlib import Path

import data
import defaults
import fidelity
import growth
import harness
import job
import learning
import merge
import optim
import predict
import pytest
import report
import sanity
import sweep
import throughput
from torch import nn

SMALL = ("--set", "image_size=16", "--set", "batch_size=2")


def test_optim(carry_out, monkeypatch):
    small = lambda: nn.Sequential(nn.Linear(30, 40), nn.LayerNorm(40))  # noqa: E731
    monkeypatch.setattr(optim, "network", small)
    result = carry_out(optim, "--rounds", 2)
    assert result["parameters"] == 1320
    assert {f"{name} / floor" for name in optim.ELEMENTS} <= result["ratios"].keys()
    assert {f"{name} / pytorch_optimizer's" for name in optim.PEERS} <= result["ratios"].keys()
    assert all(value["median"] > 0 for value in result["ms"].values())
    assert result["environment"]["command"] == "python benchmarks/optim.py --rounds 2 --json"


def test_data(carry_out, images):
    words = ("--batch", 6, "--workers", 2, "--rounds", 1, "--batches", 3)
    result = carry_out(data, "--images", images, *words)
    assert result["images"] == "images: 30 in 3 domains"
    assert result["workers"] == 2
    assert all(spread["median"] > 0 for spread in result["images per second"].values())


def test_predict(carry_out, images):
    words = ("--backbone", "small-cnn", "--size", 16, "--batch", 4, "--count", 41, "--rounds", 1)
    result = carry_out(predict, "--images", images, *words)
    assert (result["images"], result["count"]) == ("images", 41)
    assert all(spread["median"] > 0 for spread in result["images per second"].values())
    assert result["share of the time that the device is busy"]["in all"]["median"] > 0


def test_job(carry_out, images, tmp_path):
    words = ("--backbone", "small-cnn", "--optimizer", "sam", "--steps", 5, "--evaluations", 3)
    result = carry_out(job, "--images", images, "--target", "oil", *words, *SMALL)
    assert (result["steps"], result["evaluations"], result["target"]) == (5, 3, "oil")
    assert (result["images of a domain in a step"], result["optimizer"]) == (2, "sam")
    seconds = result["seconds"]
    assert list(seconds) == ["total", *job.PARTS]
    assert sum(seconds[part] for part in job.PARTS) == pytest.approx(seconds["total"], abs=0.01)
    assert "eager, data pack in images.pack" in result["said"][0]
    assert str(tmp_path) not in result["said"][0]


@pytest.mark.slow
def test_learning(carry_out, images, tmp_path):
    """On a CPU, in fp32, from a lossless pack or from files: the same bits."""
    words = ("--backbone", "small-cnn", "--optimizer", "sam", "--steps", 3, "--target", "oil")
    words += ("--seeds", 2, "--out", tmp_path / "out", "--workers", 1, *SMALL)
    result = carry_out(learning, "--images", images, *words)
    assert result["difference"] == {"mean": 0.0, "interval": [0.0, 0.0], "n": 2}
    assert [(pair["target"], pair["seed"]) for pair in result["pairs"]] == [("oil", 0), ("oil", 1)]
    assert all(0 <= pair["engine"] == pair["plain"] <= 1 for pair in result["pairs"])
    assert "pack in images.pack" in result["said"]["engine"][0]
    assert "files in images" in result["said"]["plain"][0]


def test_sanity(carry_out, images, tmp_path):
    words = ("--algorithms", "irm", "--steps", 8, "--batch", 2, "--targets", 1, "--trials", 2)
    words += ("--image-size", 16, "--workers", 1, "--out", tmp_path / "out")
    words += ("--set", "algorithm.penalty=1")
    result = carry_out(sanity, "--images", images, *words)
    assert list(result["algorithms"]) == ["ERM", "IRM"]
    irm = result["algorithms"]["IRM"]
    assert (irm["runs"], irm["diverged"]) == (2, 0)
    assert all(0 <= irm[part] <= 100 for part in ("validation", "target"))
    assert irm["cross-entropy"] > 0
    (config, *_) = (tmp_path / "out").rglob("*IRM*/config.json")
    assert json.loads(config.read_text())["algorithm"]["anneal_steps"] == 2  # a quarter


def test_fidelity(carry_out, monkeypatch):
    monkeypatch.setattr(fidelity, "radii", lambda: (0.1,))
    result = carry_out(fidelity, "--steps", 1, "--batch", 4, "--batches", 1)
    assert [row["precision"] for row in result["cosine to float64"]] == ["fp32", "fp16", "bf16"]


@pytest.mark.slow
def test_sweep(carry_out):
    result = carry_out(sweep, "--runs", 6, "--steps", 1)
    assert (result["runs"], result["done"]) == (6, 6)


@pytest.mark.slow
def test_throughput(carry_out, images):
    words = ("--targets", 1, "--trials", 1, "--optimizers", "sgd,fad", "--steps", 2, "--batch", 2)
    words += ("--images", images, "--device", "cpu", "--per-gpu", 2)
    sweeps = carry_out(throughput, *words)["sweeps"]
    assert [row["done"] for row in sweeps.values()] == [2, 2]
    assert sweeps["2 workers"]["accuracies as alone"] == "2 of 2"
    assert sweeps["2 workers"]["records as alone"] == "2 of 2"


@pytest.mark.slow
def test_report(carry_out):
    result = carry_out(report, "--runs", 5, "--records", 2)
    assert result["runs"] == 144
    assert all(seconds > 0 for seconds in result["CPU seconds"].values())


@pytest.mark.slow
def test_merge(carry_out):
    result = carry_out(merge, "--runs", 2, "--backbone", "small-cnn", "--rounds", 1)
    assert list(result["seconds"]) == list(merge.CONTENDERS)
    assert all(value["median"] > 0 for value in result["ratios"].values())


@pytest.mark.slow
def test_growth(carry_out, monkeypatch):
    small = {name: ((20, 40), work) for name, (_, work) in growth.KINDS.items()}
    monkeypatch.setattr(growth, "KINDS", small)
    result = carry_out(growth, "--rounds", 1)
    assert all(found["40"]["CPU seconds"] > 0 for found in result["growth"].values())


@pytest.mark.slow
def test_defaults(carry_out, tmp_path, monkeypatch):
    study = defaults.Study("RotatedDigits", "75", optimizers=("sgd",))
    monkeypatch.setattr(defaults, "STUDIES", {"digits": study})
    monkeypatch.setattr(defaults, "SEEDS", 1)
    monkeypatch.setattr(defaults, "FACTORS", (1 / 3, 1))
    result = carry_out(defaults, "--study", "digits", "--out", tmp_path / "out", "--workers", 1)
    (row,) = result["studies"]["digits"].values()
    assert len(row) == 2
    assert all(0 < value <= 100 for values in row.values() for value in values)


def test_a_mistake_is_told_on_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["data.py", "--images", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        data.main()
    assert ended.value.code == 2
    assert "data.py: " in capsys.readouterr().err


def test_every_stored_result_can_be_shown():
    for path in Path(harness.__file__).parent.glob("*.json"):
        result = json.loads(path.read_text())
        if "studies" not in result:
            assert harness.tables(result)


def test_contenders_take_turns():
    seen: list[str] = []
    turns = {name: lambda name=name: seen.append(name) or len(seen) for name in "ab"}
    assert harness.take_turns(turns, 2, "", warm_up=1) == {"a": [3, 5], "b": [4, 6]}
    assert "".join(seen) == "ababab"
    assert harness.ratio([1.0, 6.0], [2.0, 3.0]) == {"median": 1.25, "min": 0.5, "max": 2.0}
    assert math.isclose(harness.spread([1 / 3])["median"], 0.33333)
