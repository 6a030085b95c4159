"""The step that a run calls its best is the one that a report shows."""

import json
import random

import numpy as np
import pytest

from steppe.reports import load_runs
from steppe.reports.selection import best_step
from steppe.training import make_config, select, train, validation_accuracy
from steppe.training.scoring import Scoring
from steppe.validation import mean
from tests.reports.trees import config, record, write_run


@pytest.mark.parametrize("n", [1, 3, 5, 7, 8, 9, 20])
def test_means_have_numpys_bits(n):
    rng = random.Random(n)
    for _ in range(200):
        values = [rng.random() for _ in range(n)]
        assert mean(values) == np.mean(values)


@pytest.mark.parametrize("sources", [3, 5, 9, 17])
def test_a_run_and_its_report_choose_the_same_step(tmp_path, sources):
    """Every record has the same accuracies in another order: rounding alone decides."""
    rng = random.Random(sources)
    names = [f"domain {i}" for i in range(sources)]
    written = {}
    for number in range(50):
        values = [rng.randrange(60) / 60 for _ in names]
        records = []
        for step in range(6):
            here = dict(zip(names, rng.sample(values, sources), strict=True))
            score = lambda domain, _, here=here: here.get(domain, 0.5)  # noqa: E731
            records.append(record(step, ("target",), score, domains=(*names, "target")))
        folder = write_run(tmp_path / str(number), config(("target",)), records)
        written[folder] = select(records)
    for run in load_runs(tmp_path).runs:
        chosen, own = best_step(run), written[run.path]
        assert (chosen.step, chosen.validation) == (own["step"], validation_accuracy(own))


# The same nine accuracies in two orders. As numpy adds them, the second mean is higher by a bit;
# added from left to right, the first is; added exactly, as Python's `sum` nearly does from 3.12 on,
# they are equal, and the first wins.
NINE = (
    (0.4, 0.1, 0.3, 0.6, 0.6, 0.7, 0.5, 0.2, 0.4),
    (0.1, 0.2, 0.4, 0.3, 0.4, 0.6, 0.6, 0.7, 0.5),
)


def test_the_weights_that_are_saved_as_best_are_those_of_the_report(tmp_path, monkeypatch):
    names = [f"domain {i}" for i in range(9)]
    left = iter(NINE)

    def scripted(*_):
        here = dict(zip(names, next(left), strict=True))
        score = lambda domain, _: here.get(domain, 0.5)  # noqa: E731
        return record(0, ("75",), score, domains=(*names, "75"))["domains"]

    monkeypatch.setattr(Scoring, "everything", scripted)
    digits = {"dataset": "RotatedDigits", "targets": ["75"], "device": "cpu", "batch_size": 2}
    records = train(make_config({**digits, "steps": 6, "checkpoint_every": 5}), tmp_path)
    (run,) = load_runs(tmp_path).runs
    saved = json.loads((tmp_path / "checkpoint/best/state.json").read_text())
    assert saved["step"] == select(records)["step"] == best_step(run).step == 5
