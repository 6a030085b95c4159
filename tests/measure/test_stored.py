"""The format of stored measurements: what was written once is read, and written, for ever."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from steppe.measure import load_measurements
from steppe.measure.stored import measurement_file, save_measurement

GOLDEN = Path(__file__).parent / "golden"


def golden_run(folder: Path) -> Path:
    (folder / "curvature").mkdir()
    for path in GOLDEN.iterdir():
        (folder / "curvature" / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("name", ["train", "75@best"])
def test_a_file_is_read_and_written_byte_for_byte(tmp_path: Path, name: str) -> None:
    golden = (GOLDEN / f"{name}.json").read_bytes()
    found = load_measurements(golden_run(tmp_path))[name]
    assert json.loads(json.dumps(found.to_json())) == json.loads(golden)
    measurement_file(tmp_path, name).unlink()
    save_measurement(tmp_path, found)
    assert measurement_file(tmp_path, name).read_bytes() == golden


def test_what_a_solver_tells_of_its_work_is_not_stored(tmp_path: Path) -> None:
    found = load_measurements(golden_run(tmp_path))["train"]
    fresh = replace(
        found,
        trace=replace(found.trace, products=7),
        flatness=replace(found.flatness, loss=1.0, zeroth_starts=(1.0, 2.0)),
    )
    assert fresh == found
    assert fresh.to_json() == found.to_json()


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from steppe.measure import load_measurements; "
        f"print(len(load_measurements({str(golden_run(tmp_path))!r})), 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["2", "False"]
