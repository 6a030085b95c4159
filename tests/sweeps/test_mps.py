"""The daemon of workers that share a GPU, with a stand-in for NVIDIA's: it starts, and it stops."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from steppe.sweeps import Crew, Grid, local, mps, run_sweep, write_plan
from steppe.sweeps.copies import Original
from steppe.sweeps.mps import CONTROL, FOLDER, sharing
from tests.limits import seconds

STAND_IN = """#!/bin/sh
daemon="$CUDA_MPS_PIPE_DIRECTORY/daemon"
if [ "$1" = -d ]; then
  if [ -n "$BROKEN" ]; then echo "not on this machine" >&2; exit 1; fi
  echo "${CUDA_VISIBLE_DEVICES-all}" > "$CUDA_MPS_PIPE_DIRECTORY/gpus"
  sleep 1000 & echo $! > "$daemon"
  cp "$daemon" "$STARTED"
  exit
fi
[ -f "$daemon" ] || { echo "Cannot find MPS control daemon process"; exit 1; }
read command
if [ "$command" = quit ]; then kill $(cat "$daemon"); fi
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the process number of the last daemon that was started."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / CONTROL).write_text(STAND_IN)
    (folder / CONTROL).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    monkeypatch.setenv(FOLDER, str(tmp_path / "of the user"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(mps, "_PROBE", "")
    return tmp_path / "started"


def alive(number: int) -> bool:
    """Whether a process exists; one that ended and was not waited for does not count."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{number}/status").read_text()
    except FileNotFoundError:
        return False


def eventually(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds(60)
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_daemon_of_its_own_that_stops_at_the_end(started: Path) -> None:
    with pytest.raises(KeyboardInterrupt), sharing() as how:
        daemon, folder = int(started.read_text()), Path(how.variables[FOLDER])
        assert alive(daemon)
        assert not how.refused
        assert len(str(folder)) < 60
        assert folder.stat().st_mode & 0o777 == 0o700
        # Workers choose their GPUs themselves.
        assert (folder / "gpus").read_text() == "all\n"
        raise KeyboardInterrupt
    assert not alive(daemon)
    assert not folder.exists()


LAUNCHER = """
import os, subprocess, sys, time
from steppe.sweeps.copies import Original
from steppe.sweeps.mps import FOLDER, sharing
with sharing() as how:
    worker = subprocess.Popen(["sleep", "1000"], pass_fds=how.files)
    print(os.getpid(), worker.pid, how.variables[FOLDER], flush=True)
    time.sleep(1000)
"""


def test_killed_launchers_leave_the_daemon_to_their_workers(started: Path) -> None:
    code = f"from steppe.sweeps import mps; mps._PROBE = ''\n{LAUNCHER}"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid, worker, folder = launcher.stdout.readline().split()
        daemon = int(started.read_text())
        os.kill(int(pid), signal.SIGKILL)
    time.sleep(0.5)
    assert alive(daemon)
    os.kill(int(worker), signal.SIGKILL)
    eventually(lambda: not alive(daemon) and not Path(folder).exists())


def test_the_users_daemon_is_used(started: Path) -> None:
    theirs = Path(os.environ[FOLDER])
    theirs.mkdir()
    subprocess.run([CONTROL, "-d"], check=True)
    daemon = int(started.read_text())
    with sharing() as how:
        assert how == mps.Sharing()
    assert int(started.read_text()) == daemon
    assert alive(daemon)
    os.kill(daemon, signal.SIGKILL)


def test_without_a_daemon_workers_take_turns(started: Path, monkeypatch) -> None:
    monkeypatch.setattr(mps, "_PROBE", "raise SystemExit('CUDA error 805')")
    with sharing() as how:
        assert how == mps.Sharing(refused="CUDA error 805")
    assert not alive(int(started.read_text()))
    monkeypatch.setenv("BROKEN", "1")
    with sharing() as how:
        assert how == mps.Sharing(refused="not on this machine")
    (started.parent / "bin" / CONTROL).unlink()
    with sharing() as how:
        assert how == mps.Sharing(refused=f"{CONTROL} was not found")


def test_workers_that_share_a_gpu_get_a_daemon(tmp_path, started, monkeypatch) -> None:
    small = ("steps=2", "batch_size=4")
    grid = Grid(("RotatedDigits",), trials=1, draws=1, targets="0,15", overrides=small)
    sweep = write_plan(grid, tmp_path / "sweep")
    given = []
    start = Original.start

    def noted(self, words, output, variables):
        given.append(variables)
        return start(self, words, output, variables)

    command = Crew.command
    monkeypatch.setattr(Original, "start", noted)
    monkeypatch.setattr(local, "devices", lambda crew: ["cuda:0"] * crew.per_gpu)
    monkeypatch.setattr(Crew, "command", lambda self, path, device: command(self, path, "cpu"))
    assert run_sweep(sweep, crew=Crew(per_gpu=2)).complete
    assert [list(variables) for variables in given] == [[FOLDER, "CUDA_MPS_LOG_DIRECTORY"]] * 2
    assert not alive(int(started.read_text()))
    assert not Path(given[0][FOLDER]).exists()
