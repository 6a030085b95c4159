"""Workers as copies of a process: programs of their own, with their output, environment and end."""

import os
import signal
import time
from pathlib import Path

import pytest

from steppe.errors import RunError
from steppe.sweeps import Grid, Job, write_plan
from steppe.sweeps.copies import Original
from tests.limits import seconds


def test_copies_of_a_process_that_has_imported_everything(tmp_path: Path) -> None:
    small = ("steps=100000", "batch_size=4")
    grid = Grid(("RotatedDigits",), trials=1, draws=1, targets="0", overrides=small)
    sweep = write_plan(grid, tmp_path / "sweep")
    job = Job(sweep.folder(sweep.names[0]))
    reading, writing = os.pipe()
    with Original(files=(writing,)) as original:
        os.close(writing)

        def steppe(*words: str, **variables: str) -> tuple[Path, object]:
            output = tmp_path / f"{words[1]}.log"
            return output, original.start(words, output, variables)

        output, listing = steppe("list", "optimizers", "sgd")
        assert listing.wait() == 0
        assert "momentum" in output.read_text()
        assert "leaked" not in output.read_text()
        output, mistaken = steppe("data", "check", "PACS", STEPPE_DATA="/elsewhere")
        assert mistaken.wait() == 1
        assert "/elsewhere/PACS" in output.read_text()
        work = ("sweep", "work", str(sweep.path), "--device", "cpu")
        for ending in (signal.SIGTERM, signal.SIGKILL):
            output, worker = steppe(*work)
            deadline = time.monotonic() + seconds(60)
            while (last := job.last()) is None or last.facts.get("pid") != worker.pid:
                assert worker.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            worker.terminate() if ending == signal.SIGTERM else os.kill(worker.pid, ending)
            assert worker.wait() == (143 if ending == signal.SIGTERM else -ending)
        os.kill(original._process.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="ended unexpectedly"):
            steppe("list", "optimizers")
    assert not os.read(reading, 1)  # nobody has it any more
    os.close(reading)
