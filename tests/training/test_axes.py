"""Any algorithm under any optimizer with any averaging: it trains, is killed, and goes on."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from steppe.training import RunDirectory, load_model, select
from tests import processes
from tests.training import killing
from tests.training.axes import (
    AVERAGINGS,
    COMBINATIONS,
    FIRST_UPDATE,
    KILLED_AFTER,
    NAMES,
    OPTIMIZERS,
    OTHERS,
    STEPS,
    config,
    title,
)
from tests.training.test_resume import assert_same_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All combinations, each trained undisturbed and killed."""
    folder = tmp_path_factory.mktemp("axes")
    jobs = {title(*combination): config(*combination) for combination in (*COMBINATIONS, *OTHERS)}
    processes.run(killing.kill_each_once, jobs, folder, KILLED_AFTER, limit=2000)
    return folder


def test_every_algorithm_meets_every_averaging_and_fad() -> None:
    names = [(algorithm, optimizer, own["name"]) for algorithm, optimizer, own in COMBINATIONS]
    averagings = [own["name"] for own in AVERAGINGS]
    assert {(a, w) for a, _, w in names} == set(itertools.product(NAMES, averagings))
    assert {(o, w) for _, o, w in names} == set(itertools.product(OPTIMIZERS, averagings))
    assert {a for a, o, _ in names if o == "fad"} == set(NAMES)
    assert {a for a, o, _ in names if o != "fad"} == set(NAMES)


@pytest.mark.parametrize("combination", [*COMBINATIONS, *OTHERS], ids=lambda c: title(*c))
def test_trains_and_survives_a_kill(runs: Path, combination: tuple) -> None:
    whole, broken = (runs / title(*combination) / name for name in ("whole", "broken"))
    assert "resumed after step" in (broken / "log.txt").read_text()
    assert_same_run(whole, broken)
    records = RunDirectory(whole).records()
    averaged = [record["averaged"] for record in records]
    begun = [step >= FIRST_UPDATE.get(combination[0], 0) for step in (0, 3, 6)]
    expected = {"none": [False] * 3, "swad": [False, False, True], "sma": begun}
    expected["bma"] = [True] * 3  # the initial weights count
    if combination[2]["name"] == "swad" and len(records) < 3:  # a valley that ended early
        assert averaged[-1]
        assert records[-1]["step"] < STEPS - 1
    else:
        assert averaged == expected[combination[2]["name"]]
        assert [record["step"] for record in records] == [0, 3, 6]
    assert all(math.isfinite(value) for record in records for value in record["loss"].values())
    # The model that is loaded is the one that the last record is of.
    assert_is_evaluated(whole, records[-1], "last")
    assert_is_evaluated(whole, select(records), "best")


def assert_is_evaluated(folder: Path, record: dict, which: str) -> None:
    import torch

    from steppe.domains import load
    from steppe.training.setup import open_data

    run_config = RunDirectory(folder).config()
    _, splits = open_data(run_config)
    target = next(split for split in splits if split.domain.name == "75")
    chosen = np.random.default_rng(0).permutation(target.parts["test"])  # batches as in the run
    domain = load("RotatedDigits").domains[target.position]
    images = torch.from_numpy(domain.images.pixels[chosen]).permute(0, 3, 1, 2)
    model = load_model(folder, which)
    with torch.no_grad():
        logits = torch.cat([model(part) for part in images.split(64)])
    right = (logits.argmax(1).numpy() == domain.labels[chosen]).mean()
    assert right == pytest.approx(record["domains"]["75"]["test"]["accuracy"], abs=1e-9)
