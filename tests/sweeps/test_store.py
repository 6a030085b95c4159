"""The store: one of many gets a run, and whoever was too slow can spoil nothing."""

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from steppe.sweeps import Grid, look, store, write_plan
from steppe.sweeps.store import Claim, Job, state_of
from steppe.sweeps.takeover import claim
from steppe.training import RunDirectory, make_config, train
from tests.limits import seconds
from tests.training.test_resume import assert_same_run

DIGITS = {
    "dataset": "RotatedDigits",
    "targets": ["75"],
    "sources": ["0", "30"],
    "optimizer": "fad",
    "steps": 9,
    "checkpoint_every": 2,
    "batch_size": 4,
    "device": "cpu",
}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "job").mkdir()
    (tmp_path / "job/config.json").write_text(make_config(DIGITS).to_json())
    return Job(tmp_path / "job")


def take(job: Job) -> Claim:
    taken = claim(job, job.events())
    assert taken is not None
    return taken


def state(job: Job, retries: int = 1, stale: float = 60.0) -> str:
    return state_of(job, job.events(), store.clock(job.path), retries, stale)


def race(path: str, barrier, results) -> None:
    job = Job(Path(path))
    barrier.wait()
    results.put(claim(job, []) is not None)


def test_one_of_many_gets_it(job: Job) -> None:
    fork = multiprocessing.get_context("fork")
    for round_number in range(5):
        path = job.path.parent / f"race-{round_number}"
        path.mkdir()
        barrier, results = fork.Barrier(8), fork.Queue()
        racers = [fork.Process(target=race, args=(str(path), barrier, results)) for _ in range(8)]
        for racer in racers:
            racer.start()
        assert sum(results.get(timeout=seconds(300)) for _ in racers) == 1
        for racer in racers:
            racer.join()
        assert [event.number for event in Job(path).events()] == [1]
        assert os.listdir(path / "events") == ["00001.json"]


def test_a_run_from_claim_to_result(job: Job) -> None:
    assert state(job) == "planned"
    taken = take(job)
    assert state(job) == "running"
    assert claim(job, []) is None  # by someone who has not looked since
    train(job.config(), taken.folder)
    assert taken.commit()
    assert state(job) == "done"
    assert RunDirectory(job.result).state == "done"
    assert not list(job.path.glob("attempt-*"))


def test_a_stalled_worker_that_wakes_up_spoils_nothing(job: Job, tmp_path: Path) -> None:
    """It stalls before its commit; the other takes over, from its checkpoints, and commits."""
    slow = take(job)
    train(job.config(), slow.folder)
    old = time.time() - 100
    for path in (slow.folder / "heartbeat", job.path / "events/00001.json"):
        os.utime(path, (old, old))
    assert state(job) == "lost"
    quick = take(job)
    assert (quick.number, state(job)) == (2, "running")
    assert not slow.held()
    assert quick.held()
    before = {p: p.read_bytes() for p in quick.folder.rglob("*") if p.is_file()}
    assert not slow.commit()
    assert not slow.fail("late", "")
    assert not slow.release()
    assert {p: p.read_bytes() for p in quick.folder.rglob("*") if p.is_file()} == before
    assert state(job) == "running"
    train(job.config(), quick.folder, resume=True)
    assert quick.commit()
    slow.beat()  # into a folder that is gone
    assert state(job) == "done"
    train(job.config(), tmp_path / "alone")
    assert_same_run(job.result, tmp_path / "alone")


def test_the_run_of_a_dead_worker_goes_on_from_its_checkpoint(job: Job, tmp_path: Path) -> None:
    from steppe.training.trainer import Trainer

    dead = take(job)
    step, steps = Trainer.step, []

    def dying(self, batches):
        step(self, batches)
        steps.append(self.done)
        if self.done == 6 and len(steps) == 6:
            raise RuntimeError("the machine is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", dying)
        with pytest.raises(RuntimeError):
            train(job.config(), dead.folder)
        # Damaged while it was copied, as if by a writer at work: passed over.
        newest = max((dead.folder / "checkpoint").glob("step-*"))
        (newest / "model.safetensors").write_bytes(b"half")
        old = time.time() - 100
        for path in (dead.folder / "heartbeat", job.path / "events/00001.json"):
            os.utime(path, (old, old))
        heir = take(job)
        train(job.config(), heir.folder, resume=True)
    assert steps == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9]
    assert heir.commit()
    train(job.config(), tmp_path / "alone")
    assert_same_run(job.result, tmp_path / "alone")


def test_a_commit_that_was_cut_off_is_finished_by_anyone(job: Job) -> None:
    taken = take(job)
    (taken.folder / "records.jsonl").write_text("{}\n")
    assert job.note(2, "done", attempt=1)  # and then the machine is gone
    assert not job.result.exists()
    assert state(job) == "done"
    for _ in range(2):
        job.settle(job.last())
    assert (job.result / "records.jsonl").exists()


def test_failures_are_counted_and_forgiven(job: Job) -> None:
    for attempt in range(3):
        taken = take(job)
        (taken.folder / "kept").touch()
        assert taken.fail("ValueError: no", "Traceback ...")
        assert state(job, retries=2) == ("failed" if attempt == 2 else "planned")
    assert job.last().facts["traceback"] == "Traceback ..."
    assert job.note(len(job.events()) + 1, "retry")
    assert state(job, retries=2) == "planned"
    assert (take(job).folder / "kept").exists()  # it goes on from what there was


def test_a_released_run_is_taken_as_it_is(job: Job) -> None:
    first = take(job)
    (first.folder / "kept").touch()
    assert first.release()
    assert state(job) == "planned"
    second = take(job)
    assert (second.folder / "kept").exists()
    assert not first.folder.exists()


def test_cancelled_is_noticed_by_the_worker(job: Job) -> None:
    taken = take(job)
    assert job.note(2, "cancelled")
    assert not taken.held()
    assert not taken.commit()
    assert state(job) == "cancelled"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["claim", "commit", "fail", "release", "steal"]), max_size=12))
def test_whatever_happens_there_is_at_most_one_result(tmp_path_factory, moves) -> None:
    """Workers that act on what they last saw, in any order: only the latest claim can commit."""
    job = Job(tmp_path_factory.mktemp("job"))
    claims: list[Claim] = []
    commits = 0
    for move in moves:
        events = job.events()
        if move in ("claim", "steal"):
            free = not events or events[-1].kind in ("failed", "released")
            silent = bool(events) and events[-1].kind == "claim" and move == "steal"
            if free or silent:
                claims.append(claim(job, events))
        elif claims:
            worker = claims[len(events) % len(claims)]
            latest = worker is claims[-1] and events[-1].kind == "claim"
            outcome = {"commit": worker.commit, "release": worker.release}.get(
                move, lambda worker=worker: worker.fail("", "")
            )()
            assert outcome == latest
            commits += outcome and move == "commit"
    assert commits <= 1
    assert job.result.exists() == bool(commits)
    assert [e.number for e in job.events()] == list(range(1, len(job.events()) + 1))


def test_where_files_cannot_be_linked(job: Job, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert job.note(1, "claim")
    assert not job.note(1, "claim")
    cut_off = job.path / "events/00002.json"
    cut_off.write_text('{"kind": "cl')  # by a crash, or not all of it is there yet
    assert state(job) == "running"
    old = time.time() - 100
    os.utime(cut_off, (old, old))
    assert state(job) == "planned"
    assert json.loads((job.path / "events/00001.json").read_text())["kind"] == "claim"


def test_a_writer_that_was_only_cancelled_keeps_its_folder(job: Job) -> None:
    """It may not have heard of it yet: the next one works on a copy, in a place of its own."""
    alive = take(job)
    (alive.folder / "checkpoint").mkdir()
    (alive.folder / "records.jsonl").write_text("{}\n")
    assert job.note(2, "cancelled")
    assert job.note(3, "retry")
    heir = take(job)
    assert alive.folder.exists()
    assert heir.folder != alive.folder
    assert (heir.folder / "records.jsonl").exists()


@pytest.mark.parametrize("half_copied", [False, True])
def test_a_takeover_that_was_cut_off_loses_nothing(job: Job, half_copied: bool) -> None:
    first = take(job)
    train(job.config(), first.folder)
    assert job.note(2, "claim")  # and dies: before its copy, or in the middle of it
    if half_copied:
        (job.path / ".attempt-00002.copying/checkpoint").mkdir(parents=True)
    heir = take(job)
    assert heir.number == 3
    assert list((heir.folder / "checkpoint").glob("step-*"))


def test_deaths_count_only_without_progress(job: Job) -> None:
    for number, step in enumerate(["step-000010", "step-000020", "step-000020"], start=1):
        assert job.note(number, "claim", step=step)
    assert store.deaths(job.events()) == 2


def test_a_commit_that_was_cut_off_is_finished_by_who_looks(tmp_path: Path) -> None:
    sweep = write_plan(Grid(("RotatedDigits",), trials=1, draws=1), tmp_path / "sweep")
    job = Job(sweep.folder(sweep.names[0]))
    taken = take(job)
    (taken.folder / "records.jsonl").touch()
    assert job.note(2, "done", attempt=1)
    assert look(sweep).counts["done"] == 1
    assert job.result.exists()
