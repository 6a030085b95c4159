"""`benchmarks/job.py`: a run's time is divided without a rest, and cold is cold."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import job
import pytest

from steppe.errors import RunError, UserError
from steppe.training import make_config

SMALL = ["image_size=16", "batch_size=2"]


@pytest.mark.parametrize(
    ("steps", "evaluations", "every"),
    [(5001, 18, 295), (5001, 2, 5000), (2, 2, 1), (10, 10, 1), (10, 4, 3), (1, 2, 1)],
)
def test_evaluations_are_as_many_as_asked_for(steps: int, evaluations: int, every: int) -> None:
    assert job.interval(steps, evaluations) == every
    recorded = {step for step in range(steps) if step % every == 0 or step + 1 == steps}
    assert len(recorded) == min(evaluations, steps)


@pytest.mark.parametrize("evaluations", [1, 11])
def test_other_numbers_of_evaluations_are_refused(evaluations: int) -> None:
    with pytest.raises(UserError, match=f"--evaluations {evaluations}: a run of 10 steps"):
        job.interval(10, evaluations)


def test_every_second_has_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 15.0, 22.0, 24.0, 31.0, 31.5])
    monkeypatch.setattr(job, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    config = make_config(
        {"dataset": "Doodles", "targets": ["sketch"], "device": "cpu", "checkpoint_every": 2}
    )
    timeline = job.Timeline(config, None)
    timeline.start("", 0, 2, 2)  # at 10
    timeline.step(1)  # at 15
    timeline.record({"evaluation_seconds": 4.0})  # at 22, after 3 s of saving
    timeline.step(2)  # at 24
    timeline.record({"evaluation_seconds": 6.5})  # at 31
    timeline.spend("end")
    assert timeline.seconds == {
        "start": 10.0,
        "first update": 5.0,
        "updates": 2.0,
        "evaluations": 10.5,
        "checkpoints": 3.5,
        "end": 0.5,
    }
    assert (timeline.updates, timeline.evaluations) == (2, 2)


def test_cold_and_warm_are_processes_with_a_cache_of_their_own(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first finds an empty one, and the second what the first has left."""
    started = []
    run = subprocess.run

    def watched(command: list[str], env: dict[str, str], **options: Any) -> Any:
        places = [Path(env[name]) for name in job.CACHES]
        assert len(set(places)) == 2
        started.append([place.exists() for place in places])
        for place in places:
            place.mkdir(exist_ok=True)
        assert env["PATH"] == os.environ["PATH"]
        return run(command, env=env, **options)

    monkeypatch.setattr(subprocess, "run", watched)
    options = job.Options(
        device="cpu",
        images=images,
        target="ink",
        backbone="small-cnn",
        optimizer="sgd",
        steps=2,
        evaluations=2,
        overrides=[*SMALL, "optimizer.momentum=0.5"],
        cold=True,
    )
    result = job.measure(options)
    assert started == [[False, False], [True, True]]
    assert (result["steps"], result["target"], result["optimizer"]) == (2, "ink", "sgd")
    assert (result["images of a domain in a step"], result["evaluations"]) == (2, 2)
    for name in ("cold", "warm"):
        seconds = result[name]["seconds"]
        assert seconds["whole process"] > seconds["total"] > 0


def test_what_is_wrong_is_said_before_a_process_is_started(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common: dict[str, Any] = {"device": "cpu", "images": images, "steps": 2, "cold": True}
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=3, stdout=b"")
    )
    with pytest.raises(RunError, match="the cold run ended with exit code 3"):
        job.measure(job.Options(**common, backbone="small-cnn", overrides=SMALL))
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(UserError, match="did you mean 'batch_size'"):
        job.measure(job.Options(**common, overrides=["batch_sise=2"]))
