"""Runs, sweeps, packs and measurements that older versions of steppe made give what they gave.

Each archive in `older` holds a sweep that is done (without its weights) with its report and status,
a run that was interrupted after three of five steps, with its measured curvature and what it came
to when it was not interrupted, and a folder of images with its pack. `first` was made by commit
b4e5216, `second` by 357ba32.
"""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from steppe.domains import load
from steppe.domains.pack import Packed
from steppe.measure import load_measurements
from steppe.reports import build_report, load_runs, write
from steppe.sweeps import look, read_plan
from steppe.training import RunDirectory, evaluate_run, train

OLDER = Path(__file__).with_name("older")


@pytest.fixture(params=["first", "second"])
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(OLDER / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / request.param


def test_a_sweep_has_the_same_status_and_tables(older: Path) -> None:
    status = json.loads(json.dumps(look(read_plan(older / "sweep")).to_json()))
    stored = json.loads((older / "status.json").read_text())
    assert {key: status[key] for key in ("counts", "axes", "failures")} == {
        key: stored[key] for key in ("counts", "axes", "failures")
    }
    made = build_report(load_runs([older / "sweep"]), "train-val", "steppe report", "sweep")
    found, stored = json.loads(write(made, "json")), json.loads((older / "report.json").read_text())
    for now, then in zip(found["tables"], stored["tables"], strict=True):
        for row, wanted in zip(now["rows"], then["rows"], strict=True):
            # Targets that no run held out had cells without a value, and then no mean.
            cells = {target: cell for target, cell in wanted.pop("cells").items() if cell}
            assert row["cells"] == cells
            assert wanted.pop("avg") in (row["avg"], None)
            assert {key: row[key] for key in wanted} == wanted
    for now, then in zip(found["cost"], stored["cost"], strict=True):
        then.pop("partial")
        assert {key: now[key] for key in then} == then
    (pair,), (before,) = found["comparisons"], stored["comparisons"]
    assert (pair["a"], pair["b"]) == (before["b"], before["a"])  # against the best, now
    assert pair["difference"] == pytest.approx(-before["difference"], abs=1e-12)
    assert (pair["low"], pair["high"]) == pytest.approx((-before["high"], -before["low"]))


def test_a_run_goes_on_and_ends_as_it_would_have(older: Path) -> None:
    run = RunDirectory(older / "run")
    stored = json.loads((older / "curvature.json").read_text())
    (measured,) = load_measurements(older / "run").values()
    assert measured.to_json() == stored
    records = train(run.config(), older / "run", resume=True)
    expected = [json.loads(line) for line in (older / "expected.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [record["step"] for record in expected]
    for record, wanted in zip(records, expected, strict=True):
        assert record["loss"] == close(wanted["loss"])
        for name, parts in wanted["domains"].items():
            assert {part: record["domains"][name][part] for part in parts} == {
                part: close(values) for part, values in parts.items()
            }
    evaluated = json.loads((older / "evaluate.json").read_text())
    (score,) = evaluate_run(older / "run", device="cpu").values()
    wanted = evaluated["75"]
    assert {key: score.to_json()[key] for key in wanted} == close(wanted)


def close(values: dict[str, Any]) -> Any:
    """Numbers of threads differ, and with them the last bits."""
    return pytest.approx(values, rel=1e-5, abs=1e-6)


def test_a_pack_is_used(older: Path) -> None:
    ink = load(older / "pets").domains[0]
    assert isinstance(ink.images, Packed)
    file = Image.open(older / "pets/ink/cat/0.png").resize((8, 8), Image.Resampling.BILINEAR)
    assert np.abs(ink.images[0].astype(int) - np.asarray(file).astype(int)).max() < 64
