"""Sweeps on this machine: workers die, two launchers share a plan, and nothing is lost."""

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from steppe.errors import Interrupted, RunError, UserError
from steppe.sweeps import (
    Crew,
    Grid,
    Job,
    Sweep,
    Worker,
    cancel,
    look,
    read_plan,
    retry,
    run_sweep,
    store,
    supervise,
    write_plan,
)
from steppe.sweeps.copies import Copy, Original
from steppe.sweeps.status import show
from steppe.sweeps.store import Claim
from steppe.sweeps.takeover import claim
from steppe.sweeps.worker import _out_of_memory
from steppe.training import RunDirectory, train
from steppe.training.trainer import Trainer
from tests import processes
from tests.limits import seconds
from tests.training.test_resume import assert_same_run

GRID = Grid(
    ("RotatedDigits",),
    optimizers=("sgd", "fad"),
    trials=1,
    draws=1,
    overrides=("steps=30", "checkpoint_every=6", "batch_size=4"),
)


def plan(path: Path, **changes) -> Sweep:
    return write_plan(Grid(**{**vars(GRID), **changes}), path)


def assert_complete(sweep: Sweep) -> None:
    """Every run is done once, and its result is that of a run alone."""
    for name in sweep.names:
        job = Job(sweep.folder(name))
        kinds = [event.kind for event in job.events()]
        assert kinds.count("done") == 1
        assert kinds[-1] == "done"
        assert RunDirectory(job.result).state == "done"
        assert not list(job.path.glob("attempt-*"))
    for name in sweep.names[::4]:
        alone = sweep.path / "alone" / name
        train(Job(sweep.folder(name)).config().model_copy(update={"device": "cpu"}), alone)
        assert_same_run(Job(sweep.folder(name)).result, alone)


def test_two_launchers_and_workers_killed_at_random(tmp_path: Path) -> None:
    sweep = plan(tmp_path / "sweep")
    # Nobody who is alive is silent for so long.
    words = ("sweep", "run", sweep.path, "--workers", 1, "--stale", seconds(6))
    launchers = [processes.Steppe(*words, folder=tmp_path) for _ in range(2)]
    rng, killed = random.Random(0), 0
    deadline = time.monotonic() + seconds(1200)
    while any(launcher.poll() is None for launcher in launchers):
        assert time.monotonic() < deadline
        time.sleep(rng.uniform(0.1, 0.6))
        pids = set()
        for name in sweep.names:
            last = Job(sweep.folder(name)).last()
            if last and last.kind == "claim":
                pids.add(last.facts["pid"])
        if pids and killed < 5:
            with contextlib.suppress(ProcessLookupError):  # one that the other launcher restarted
                os.kill(rng.choice(sorted(pids)), signal.SIGKILL)
                killed += 1
    for launcher in launchers:
        assert launcher.returncode == 0, launcher.stdout + launcher.stderr
    assert killed > 1
    assert_complete(sweep)
    claims = sum(
        event.kind == "claim" for name in sweep.names for event in Job(sweep.folder(name)).events()
    )
    assert claims > len(sweep.names)  # some were taken over


def test_interrupted_and_run_again(tmp_path: Path) -> None:
    """From a shell: launcher and worker are programs of their own."""
    sweep = plan(tmp_path / "sweep", overrides=("steps=3000", "checkpoint_every=500"))
    command = [sys.executable, "-m", "steppe", "sweep", "run", sweep.path, "--workers", "1"]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + seconds(600)
    while not look(sweep).counts["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=seconds(600))
    assert launcher.returncode == 130
    status = look(sweep)
    assert status.counts["planned"] == len(sweep.names)  # what ran was given back
    assert any(Job(sweep.folder(n)).last() for n in sweep.names)


def failing(message: str):
    def step(self, batches):
        raise ValueError(message)

    return step


def test_a_failing_run_is_tried_again_and_then_shown(tmp_path, monkeypatch, capsys) -> None:
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",), overrides=("steps=2",))
    monkeypatch.setattr(Trainer, "step", failing("the fan stopped"))
    assert Worker(sweep, "cpu").work() == 0
    status = look(sweep)
    assert status.counts["failed"] == 6
    assert status.over
    assert {failure.attempts for failure in status.failures} == {2}
    assert "in step\n    raise ValueError(message)" in status.failures[0].traceback
    from rich.console import Console

    Console(width=200).print(show(sweep, status))
    assert "ValueError: the fan stopped" in capsys.readouterr().out
    monkeypatch.undo()
    assert len(retry(sweep)) == 6
    assert look(sweep).counts["planned"] == 6
    assert Worker(sweep, "cpu").work() == 6
    assert look(sweep).counts["done"] == 6


def test_cancelled_while_it_runs(tmp_path: Path, monkeypatch) -> None:
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",))
    step = Trainer.step

    def cancelled(self, batches):
        step(self, batches)
        if self.done == 3 and not look(sweep).counts["cancelled"]:
            assert len(cancel(sweep)) == 6
            time.sleep(seconds(1))  # time for many beats: it is heard before the run is over
        time.sleep(0.02)

    freed = []
    monkeypatch.setattr("steppe.sweeps.worker._free_memory", lambda: freed.append(1))
    monkeypatch.setattr(Trainer, "step", cancelled)
    assert Worker(sweep, "cpu", beat=0.05).work() == 0
    assert freed
    assert look(sweep).counts["cancelled"] == 6
    with pytest.raises(UserError, match="unknown run 'nothing'"):
        cancel(sweep, ("nothing",))


def test_a_stopped_worker_gives_its_run_back(tmp_path: Path, monkeypatch) -> None:
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",))
    step = Trainer.step

    def interrupted(self, batches):
        step(self, batches)
        if self.done == 10:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(Interrupted):
        Worker(sweep, "cpu").work()
    job = Job(sweep.folder(sweep.names[0]))
    assert [event.kind for event in job.events()] == ["claim", "released"]
    monkeypatch.undo()
    assert Worker(sweep, "cpu", limit=1).work() == 1
    assert "resumed after step 9" in (job.result / "log.txt").read_text()


def test_status_counts_and_estimates(tmp_path: Path) -> None:
    sweep = plan(tmp_path / "sweep", overrides=("steps=4",))
    status = look(sweep)
    assert status.counts["planned"] == 12
    assert status.seconds_left is None
    Worker(sweep, "cpu", limit=5).work()
    status = look(read_plan(sweep.path))
    assert (status.counts["done"], status.counts["planned"]) == (5, 7)
    assert not status.complete
    assert status.axes["optimizer"]["sgd"]["done"] == 5
    assert status.seconds_left > 0
    assert status.runs_per_hour > 100
    assert json.loads(json.dumps(status.to_json()))["counts"]["done"] == 5


def test_ensembles_of_a_sweep(tmp_path: Path) -> None:
    """Trials and draws are members; EoA with `sma`."""
    from steppe.sweeps import ensemble
    from steppe.training import evaluate_ensemble

    options = {"averaging": ("sma",), "trials": 2, "draws": 1, "overrides": ("steps=4",)}
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",), **options)
    with pytest.raises(UserError, match="no finished runs yet"):
        list(ensemble.ensembles(sweep))
    Worker(sweep, "cpu").work()
    found = list(ensemble.ensembles(sweep, "cpu"))
    assert [e.axes["targets"] for e in found] == ["0", "15", "30", "45", "60", "75"]
    last = found[-1]
    assert len(last.runs) == 2
    folders = [Job(sweep.folder(name)).result for name in last.runs]
    assert evaluate_ensemble(folders, which="best", device="cpu") == last.scores
    ensemble.save(sweep, found)
    saved = json.loads((sweep.path / "ensembles.json").read_text())
    assert saved[-1]["scores"]["75"]["ensemble"] == last.scores["75"].ensemble.to_json()
    assert ensemble.table(found).row_count == 6


def test_a_signal_between_runs_leaves_no_claim_behind(tmp_path: Path, monkeypatch) -> None:
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",))
    note = Job.note

    def interrupted(self: Job, number: int, kind: str, **facts) -> bool:
        done = note(self, number, kind, **facts)
        if kind == "claim":
            signal.raise_signal(signal.SIGTERM)
        return done

    monkeypatch.setattr(Job, "note", interrupted)
    with pytest.raises(Interrupted):
        Worker(sweep, "cpu").work()
    assert look(sweep).counts["planned"] == 6
    assert [e.kind for e in Job(sweep.folder(sweep.names[0])).events()] == ["claim", "released"]


def test_a_signal_just_before_a_run_is_not_lost(tmp_path: Path, monkeypatch) -> None:
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",))
    stop = partial(signal.raise_signal, signal.SIGTERM)
    monkeypatch.setattr("steppe.sweeps.worker.import_plugins", lambda plugins: stop())
    with pytest.raises(Interrupted):
        Worker(sweep, "cpu").work()
    assert [e.kind for e in Job(sweep.folder(sweep.names[0])).events()] == ["claim", "released"]


def test_a_run_that_kills_its_workers_has_failed(tmp_path: Path) -> None:
    """Out of memory, say: nobody is left to say so. Like any failure, it is tried once more."""
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",), overrides=("steps=2",))
    job = Job(sweep.folder(sweep.names[0]))
    for number in (1, 2, 3):
        assert job.note(number, "claim")
    old = time.time() - 100
    os.utime(job.path / "events/00003.json", (old, old))
    assert Worker(sweep, "cpu").work() == 6
    assert [e.kind for e in job.events()] == [*["claim"] * 3, "failed", "claim", "done"]
    assert "3 workers in a row died" in job.events()[3].facts["error"]


def short_of_memory(fits: int, running, most):
    """Makes a first step that raises if more than `fits` runs are at work."""
    step = Trainer.step

    def first_step(self, batches):
        if self.done == 0:
            with running.get_lock():
                running.value += 1
                beside = running.value
                most.value = max(most.value, beside)
            try:
                deadline = time.monotonic() + seconds(60)
                while most.value <= fits and time.monotonic() < deadline:  # for all to be there
                    time.sleep(0.01)
                time.sleep(0.2)
                if beside > fits:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return step(self, batches)
            finally:
                with running.get_lock():
                    running.value -= 1
        return step(self, batches)

    return first_step


def test_runs_that_do_not_fit_beside_each_other(tmp_path: Path, monkeypatch) -> None:
    """Whoever finds no memory waits, and fails no run."""
    sweep = plan(tmp_path / "sweep", overrides=("steps=2", "batch_size=4"))
    fork = multiprocessing.get_context("fork")
    running, most = fork.Value("i", 0), fork.Value("i", 0)
    monkeypatch.setattr(Trainer, "step", short_of_memory(2, running, most))
    torch.set_num_threads(1)
    crew = [fork.Process(target=lambda: Worker(sweep, "cpu").work()) for _ in range(5)]
    for worker in crew:
        worker.start()
    for worker in crew:
        worker.join(timeout=seconds(1200))
        assert worker.exitcode == 0
    assert look(sweep).counts["done"] == len(sweep.names) == 12
    kinds = Counter(e.kind for name in sweep.names for e in Job(sweep.folder(name)).events())
    assert kinds["failed"] == 0
    assert kinds["released"] > 0
    assert most.value > 2


def test_one_that_does_not_fit_alone_has_failed(tmp_path: Path, monkeypatch) -> None:
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",), overrides=("steps=2",))
    first, second, *_ = (Job(sweep.folder(name)) for name in sweep.names)
    worker = Worker(sweep, "cpu", limit=1)
    monkeypatch.setattr(store, "worker_name", lambda: "another")
    taken = claim(first, [], memory=socket.gethostname())
    elsewhere = claim(second, [], memory="another machine's")
    monkeypatch.undo()
    assert taken is not None
    assert elsewhere is not None

    gone = []

    def full(self, batches):
        held = torch.zeros(1)
        gone.append(weakref.ref(held))
        raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")

    release = Claim.release
    monkeypatch.setattr(Claim, "release", lambda own: gone[-1]() is None and release(own))
    monkeypatch.setattr(logging.getLogger("steppe"), "propagate", False)  # pytest keeps errors

    monkeypatch.setattr(Trainer, "step", full)
    assert worker.work() == 0
    third = Job(sweep.folder(sweep.names[2]))
    assert [event.kind for event in third.events()] == ["claim", "released"]
    assert worker._next() == (None, True)  # while the other is at work
    taken.release()
    monkeypatch.setattr(store, "worker_name", lambda: "a third")
    beside = claim(third, third.events(), memory=socket.gethostname())
    assert beside is not None
    monkeypatch.undo()

    def full_and_over(self, batches):
        beside.release()  # the other one had no memory either
        full(self, batches)

    monkeypatch.setattr(Trainer, "step", full_and_over)
    worker._crowd = None
    assert worker.work() == 0
    assert [event.kind for event in first.events()] == [*["claim", "released"] * 2]
    monkeypatch.setattr(Trainer, "step", full)
    assert worker.work() == 0
    assert [event.kind for event in first.events()][4:] == ["claim", "failed"]
    monkeypatch.undo()
    elsewhere.release()
    worker.limit = None
    assert worker.work() == 6


def test_a_worker_that_waits_for_memory_comes_back(tmp_path: Path, monkeypatch) -> None:
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",))
    _, *rest = (Job(sweep.folder(name)) for name in sweep.names)
    taken = []
    for number, job in enumerate(rest[:4]):
        monkeypatch.setattr(store, "worker_name", lambda number=number: f"worker {number}")
        taken.append(claim(job, [], memory=socket.gethostname()))
    monkeypatch.undo()
    worker = Worker(sweep, "cpu")
    worker._crowd = 4, time.time()
    assert not worker._has_room()  # beside four, where two are allowed
    assert taken[0].commit()
    assert worker._has_room()  # beside three, where three are
    monkeypatch.setattr(store, "worker_name", lambda: "worker 0")
    again = claim(rest[4], [], memory=socket.gethostname())
    monkeypatch.undo()
    assert not worker._has_room()
    old = time.time() - 100  # whoever has it is dead
    for path in (rest[4].path / "events/00001.json", again.folder / "heartbeat"):
        os.utime(path, (old, old))
    assert worker._has_room()
    assert worker._crowd is not None
    assert taken[1].commit()
    assert worker._has_room()
    assert worker._crowd is None  # as many as there were have room again


@pytest.mark.parametrize(
    ("error", "wanting"),
    [
        (torch.OutOfMemoryError("CUDA"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), True),
        (ValueError("a fan stopped"), False),
    ],
)
def test_errors_that_say_that_memory_was_wanting(error: Exception, wanting: bool) -> None:
    assert _out_of_memory(error) == wanting
    later = RuntimeError("the compiler failed")
    later.__cause__ = error
    assert _out_of_memory(later) == wanting


def test_a_gpu_that_failed_hides_no_error(tmp_path: Path, monkeypatch) -> None:
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",))

    def broken(*given, **options) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    monkeypatch.setattr("steppe.sweeps.worker.train", broken)
    assert Worker(sweep, "cpu", limit=1).work() == 0
    last = Job(sweep.folder(sweep.names[0])).events()[-1]
    assert last.kind == "failed"
    assert "device-side assert" in last.facts["error"]


def test_after_a_fault_of_the_gpu_its_worker_ends(tmp_path: Path, monkeypatch) -> None:
    """Through MPS it stops everybody on the GPU: who was not alone is taken over, not failed."""
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",), overrides=("steps=30",))
    first, second, *_ = (Job(sweep.folder(name)) for name in sweep.names)
    monkeypatch.setattr(store, "worker_name", lambda: "another")
    taken = claim(first, [], memory=socket.gethostname())
    monkeypatch.undo()
    step = Trainer.step

    def broken(*given) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    def faulty(self, batches):
        step(self, batches)
        if self.done == 10:
            broken()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    monkeypatch.setattr(Trainer, "step", faulty)
    with pytest.raises(RunError, match=r"illegal memory access was encountered$"):
        Worker(sweep, "cpu").work()
    assert [event.kind for event in second.events()] == ["claim"]
    taken.release()
    old = time.time() - 100
    for path in (second.path / "events/00001.json", second.attempt(1) / "heartbeat"):
        os.utime(path, (old, old))
    with pytest.raises(RunError, match="illegal memory access"):
        Worker(sweep, "cpu").work()  # alone, so the fault is its own
    assert [event.kind for event in first.events()] == ["claim", "released", "claim", "failed"]
    monkeypatch.undo()
    assert Worker(sweep, "cpu").work() == 6
    assert_complete(sweep)


def test_a_run_that_diverges_harms_none_beside_it(tmp_path: Path) -> None:
    grids = [
        Grid(**{**vars(GRID), "optimizers": ("sgd",), "targets": "0,15", **changes})
        for changes in ({}, {"overrides": (*GRID.overrides, "optimizer.lr=1e30"), "tag": "wild"})
    ]
    sweep = write_plan(grids, tmp_path / "sweep")
    words = ("sweep", "run", sweep.path, "--workers", 2)
    assert processes.Steppe(*words, folder=tmp_path).wait() == 1
    status = look(sweep)
    assert (status.counts["done"], status.counts["failed"]) == (2, 2)
    assert all("diverged" in failure.error for failure in status.failures)
    for name in sweep.names:
        if "wild" not in name:
            alone = tmp_path / "alone" / name
            train(Job(sweep.folder(name)).config().model_copy(update={"device": "cpu"}), alone)
            assert_same_run(Job(sweep.folder(name)).result, alone)


def test_the_memory_of_a_gpu_is_named_by_its_serial(tmp_path: Path, monkeypatch) -> None:
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",))
    monkeypatch.setattr("steppe.sweeps.worker.find_device", torch.device)
    facts = {torch.device("cuda:1"): SimpleNamespace(uuid="8e1c")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", facts.__getitem__)
    assert Worker(sweep, "cuda:1")._memory == "8e1c"


def test_what_is_done_starts_no_workers_and_what_is_left_does(tmp_path: Path, monkeypatch) -> None:
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",), overrides=("steps=2",))
    started = []
    # Both have left when the first look finds a run that was given back, and one starts again.
    over = SimpleNamespace(over=True, counts={"planned": 0, "done": 6})
    left = SimpleNamespace(over=False, counts={"planned": 1, "done": 5})
    looks = iter([left, left, over, over, over, over])

    def start(self, words, log, variables):
        started.append(log)
        return Copy(self, 0, 0)

    monkeypatch.setattr(Original, "start", start)
    monkeypatch.setattr(supervise, "look", lambda *given: next(looks))
    monkeypatch.setattr(supervise, "LOOK_SECONDS", 0.0)
    run_sweep(sweep, crew=Crew(2))
    assert len(started) == 3
    assert started[2] == started[0]
    assert run_sweep(sweep, crew=Crew(2)).over
    assert len(started) == 3


def test_workers_that_die_at_once_are_given_up(tmp_path: Path, monkeypatch) -> None:
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",))
    started = []

    def start(self, words, log, variables):
        started.append(log)
        return Copy(self, 0, 1)

    monkeypatch.setattr(Original, "start", start)
    monkeypatch.setattr(supervise, "LOOK_SECONDS", 0.0)
    with pytest.raises(RunError, match=r"keep dying .*workers\). Fix the cause and rerun: "):
        run_sweep(sweep, crew=Crew(2))
    assert Counter(Counter(started).values()) == {1 + supervise.RESTARTS: 2}


def test_a_worker_on_the_wrong_machine_fails_no_sweep(tmp_path: Path, monkeypatch) -> None:
    from steppe.sweeps import work
    from steppe.sweeps.worker import REFUSALS

    sweep = plan(tmp_path / "sweep", optimizers=("sgd",))
    with pytest.raises(UserError, match="cannot be used"):
        work(sweep.path, "cuda:99")
    assert look(sweep).counts["planned"] == 6

    def nothing(self, batches):
        raise UserError("the images are not here")

    monkeypatch.setattr(Trainer, "step", nothing)
    with pytest.raises(UserError, match="the images are not here"):
        Worker(sweep, "cpu").work()
    tried = [len(Job(sweep.folder(name)).events()) // 2 for name in sweep.names]
    assert sum(tried) == REFUSALS


def test_a_sweep_extended_while_it_runs(tmp_path: Path, monkeypatch) -> None:
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",), overrides=("steps=2",))
    step, grown = Trainer.step, []

    def growing(self, batches):
        if not grown:
            options = {**vars(GRID), "overrides": ("steps=2",)}
            grown.append(write_plan(Grid(**options), sweep.path, extend=True))
        step(self, batches)

    monkeypatch.setattr(Trainer, "step", growing)
    assert Worker(sweep, "cpu").work() == 12
    # Whoever waits with the plan as it was sees all of it.
    assert look(sweep).counts["done"] == 12
    assert look(sweep).complete
    with pytest.raises(UserError, match="already has .*, with steps=2 instead of 30"):
        write_plan(GRID, sweep.path, extend=True)
    assert read_plan(sweep.path).retries == 1


def test_named_runs_that_cannot_be_changed_are_named(tmp_path: Path) -> None:
    sweep = plan(tmp_path / "sweep", optimizers=("sgd",), overrides=("steps=2",))
    Worker(sweep, "cpu", limit=1).work()
    with pytest.raises(UserError, match="is done; only planned, running or lost runs can"):
        cancel(sweep, sweep.names[:1])


def test_a_plan_that_was_cut_off_can_be_made_again(tmp_path: Path) -> None:
    (tmp_path / "sweep/runs/half").mkdir(parents=True)
    assert len(plan(tmp_path / "sweep").names) == 12
