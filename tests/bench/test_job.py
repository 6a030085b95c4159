"""`steppe bench job`: a run's time is divided without a rest, and cold is cold."""

import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steppe.bench import job
from steppe.cli import app
from steppe.errors import RunError, UserError
from steppe.training import train
from steppe.training.progress import Display

CPU = torch.device("cpu")
SMALL = ("image_size=16", "batch_size=2")


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
    timeline = job.Timeline(Display(), CPU, every=2)
    timeline.start("", 0, 2, 2)  # at 10
    timeline.step(1)  # at 15
    timeline.record({"evaluation_seconds": 4.0})  # at 22, after 3 s of saving
    timeline.step(2)  # at 24
    timeline.record({"evaluation_seconds": 6.5})  # at 31
    timeline.finish()
    assert timeline.seconds == {
        "start": 10.0,
        "first update": 5.0,
        "updates": 2.0,
        "evaluations": 10.5,
        "checkpoints": 3.5,
        "end": 0.5,
    }
    assert (timeline.updates, timeline.evaluations) == (2, 2)


def test_a_run_is_timed(
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(*args: Any, **options: Any) -> list[dict[str, Any]]:
        records = train(*args, **options)
        time.sleep(0.05)  # an end that can be seen
        return records

    monkeypatch.setattr(job, "train", slow)
    path = tmp_path / "result.json"
    words = ["bench", "job", "--images", images, "--backbone", "small-cnn", "--optimizer", "sam"]
    words += ["--steps", 5, "--evaluations", 3, "--target", "oil", "--json", "--save", path]
    arguments = [str(word) for word in words] + [w for text in SMALL for w in ("--set", text)]
    app(arguments, standalone_mode=False)
    result = json.loads(capsys.readouterr().out)
    assert json.loads(path.read_text()) == result
    assert (result["steps"], result["evaluations"], result["target"]) == (5, 3, "oil")
    assert result["images of a domain in a step"] == 2
    assert result["optimizer"] == "sam"
    seconds = result["seconds"]
    assert list(seconds) == ["total", *job.PARTS]
    assert sum(seconds[part] for part in job.PARTS) == pytest.approx(seconds["total"], abs=0.01)
    assert all(seconds[part] > 0 for part in job.PARTS)
    assert seconds["end"] >= 0.05
    assert result["ms per update but the first"] == pytest.approx(
        1e3 * seconds["updates"] / 4, abs=0.5
    )
    assert "eager, data pack in images.pack" in result["said"][0]
    assert str(tmp_path) not in result["said"][0]
    assert job.tables(result)[0].row_count == len(seconds) + 2


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
    overrides = (*SMALL, "optimizer.momentum=0.5")
    chosen = job.Job(CPU, images, "ink", "small-cnn", optimizer="sgd", steps=2, evaluations=2)
    result = job.cold_and_warm(job.Job(**{**chosen.__dict__, "overrides": overrides}))
    assert started == [[False, False], [True, True]]
    assert (result["steps"], result["target"], result["optimizer"]) == (2, "ink", "sgd")
    assert (result["images of a domain in a step"], result["evaluations"]) == (2, 2)
    for name in ("cold", "warm"):
        seconds = result[name]["seconds"]
        assert seconds["whole process"] > seconds["total"] > 0
    assert len(job.tables(result)[0].columns) == 3


def test_what_is_wrong_is_said_before_a_process_is_started(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = job.Job(CPU, images, backbone="small-cnn", steps=2, overrides=SMALL)
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=3, stdout=b"")
    )
    with pytest.raises(RunError, match="the cold run ended with exit code 3"):
        job.cold_and_warm(chosen)
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(UserError, match="did you mean 'batch_size'"):
        job.cold_and_warm(job.Job(CPU, images, steps=2, overrides=("batch_sise=2",)))
