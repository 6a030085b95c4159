"""`benchmarks/learning.py`: pairs are pairs, and intervals Student's."""

import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import learning
import pytest
from scipy import stats

from steppe.errors import UserError
from steppe.sweeps import jobs

DOMAINS = ("ink", "oil", "pen")
SMALL = ["image_size=16", "batch_size=2"]


def options(images: Path, **changes: Any) -> learning.Options:
    values: dict[str, Any] = {"backbone": "small-cnn", "steps": 3, "overrides": SMALL}
    return learning.Options(images=images, **{**values, **changes})


def test_pairs_differ_in_how_they_are_carried_out_alone(images: Path) -> None:
    one = options(images, precision="bf16")
    pairs = zip(*([c for _, c in jobs(one.grid(way))] for way in learning.WAYS), strict=True)
    keys = set()
    for engine, plain in pairs:
        keys.add((engine.targets, engine.trial_seed))
        differing = {
            k for k in type(engine).model_fields if getattr(engine, k) != getattr(plain, k)
        }
        assert differing == {"engine", "data", "packed", "precision"}
        assert (engine.engine, engine.data, engine.packed) == ("auto", "auto", True)
        assert (plain.engine, plain.data, plain.packed) == ("off", "host", False)
        assert (engine.precision, plain.precision) == ("bf16", "fp32")
        assert (engine.batch_size, engine.optimizer.name) == (2, "fad")
    assert keys == {((domain,), seed) for domain in DOMAINS for seed in range(3)}


def test_what_counts_is_the_target_after_the_last_step() -> None:
    def scores(value: float) -> dict[str, dict[str, float]]:
        return {"test": {"accuracy": value}, "oracle": {"accuracy": 0.9}}

    records = [{"domains": {"ink": scores(0.8), "oil": scores(v)}} for v in (0.2, 0.4)]
    run: Any = SimpleNamespace(
        config=lambda: SimpleNamespace(targets=("oil",)), records=lambda: records
    )
    assert learning.last_accuracy(run) == 0.4


def test_intervals_are_students_over_seeds() -> None:
    """A target's difference is its number times the seed's, in points: on average 2 times it."""
    found = {}
    for number, target in enumerate(DOMAINS):
        for seed in range(3):
            base = 0.5 + 0.1 * number
            found["plain", target, seed] = base
            found["engine", target, seed] = base + 0.01 * (seed + 1) * (number + 1)
    result = learning.summary(found)
    means = [2.0, 4.0, 6.0]
    low, high = stats.t.interval(
        0.95, len(means) - 1, loc=statistics.mean(means), scale=stats.sem(means)
    )
    assert result["difference"]["mean"] == pytest.approx(4.0)
    assert result["difference"]["interval"] == pytest.approx([low, high], abs=1e-3)
    assert result["by seed"] == pytest.approx({"0": 2.0, "1": 4.0, "2": 6.0})
    oil = result["by target"]["oil"]
    assert oil["interval"] == pytest.approx([low, high], abs=1e-3)
    assert (oil["plain"], oil["engine"]) == pytest.approx((60.0, 64.0))
    assert result["by target"]["pen"]["mean"] == pytest.approx(6.0)
    assert result["within the bar"] is False


@pytest.mark.parametrize(
    ("points", "inside"),
    [([0.9, 1.0, 1.1], True), ([-1.2, -1.0, -1.1], True), ([0, 1, 2], False), ([1], None)],
)
def test_the_whole_interval_is_within_the_bar(points: list[float], inside: bool | None) -> None:
    found = {("engine", "oil", seed): 0.5 + p / 100 for seed, p in enumerate(points)}
    found |= {("plain", "oil", seed): 0.5 for seed in range(len(points))}
    assert learning.summary(found)["within the bar"] is inside


@pytest.mark.parametrize("text", ["engine=off", "seed=7", "optimizer.name=adam", "precision=bf16"])
def test_what_is_compared_cannot_be_overridden(images: Path, text: str) -> None:
    with pytest.raises(UserError, match="the benchmark sets"):
        options(images, overrides=[text]).grid("engine")


def test_a_target_that_is_not_there(images: Path) -> None:
    with pytest.raises(UserError, match="ole"):
        learning.measure(options(images, target=["ole"], out=images.parent / "out"))
