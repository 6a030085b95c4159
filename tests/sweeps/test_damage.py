"""Damaged, foreign and left-over files in a sweep: told, passed over, removed; nothing is lost."""

import ctypes
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from steppe.cli import app
from steppe.errors import UserError
from steppe.sweeps import (
    Grid,
    Job,
    Sweep,
    Worker,
    cancel,
    look,
    read_plan,
    retry,
    store,
    work,
    write_plan,
)
from steppe.sweeps.status import show
from steppe.sweeps.store import state_of
from steppe.sweeps.takeover import claim
from steppe.sweeps.tidy import tidy
from steppe.training import train
from steppe.training.trainer import Trainer
from tests.training.test_resume import assert_same_run

NEW_PID_NAMESPACE = 0x20000000


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    options = ("steps=6", "checkpoint_every=2", "batch_size=4")
    return write_plan(
        Grid(("RotatedDigits",), trials=1, draws=1, targets="75", overrides=options),
        tmp_path / "sweep",
    )


@pytest.fixture
def job(sweep: Sweep) -> Job:
    return Job(sweep.folder(sweep.names[0]))


def state(job: Job, stale: float = 60.0, now: float | None = None) -> str:
    return state_of(job, job.events(), now or store.clock(job.path), 1, stale)


def age(path: Path, seconds: float = 100.0) -> None:
    """Makes it old, or with a negative number something of the future."""
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)


def races(path: Path, rounds: int, barrier, results) -> None:
    """Claims, in a process that is number 1 of its own namespace, as in a container."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_PID_NAMESPACE):
        results.put((None, [], []))
        return
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    won, errors = [], []
    for number in range(rounds):
        barrier.wait(60)
        try:
            if Job(path / str(number)).note(1, "claim"):
                won.append(number)
            store.clock(path)
        except OSError as error:
            errors.append(str(error))
    results.put((f"{os.getpid()} {store.worker_name()}", won, errors))
    time.sleep(0.5)  # for the queue's thread
    os._exit(0)


def test_containers_with_one_host_name_and_one_pid_never_share_a_claim(tmp_path: Path) -> None:
    rounds, workers = 60, 8
    for number in range(rounds):
        (tmp_path / str(number) / "events").mkdir(parents=True)
    fork = multiprocessing.get_context("fork")
    barrier, results = fork.Barrier(workers), fork.Queue()
    crew = [
        fork.Process(target=races, args=(tmp_path, rounds, barrier, results))
        for _ in range(workers)
    ]
    for worker in crew:
        worker.start()
    found = [results.get(timeout=300) for _ in crew]
    for worker in crew:
        worker.join()
    if any(name is None for name, _, _ in found):
        pytest.skip("no rights to make pid namespaces")
    names = [name for name, _, _ in found]
    assert {name.split()[0] for name in names} == {"1"}
    assert len(set(names)) == workers
    assert sorted(number for _, won, _ in found for number in won) == list(range(rounds))
    assert not [error for _, _, errors in found for error in errors]


def test_a_forked_child_has_a_name_of_its_own(monkeypatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, store.worker_name().encode())
        os._exit(0)
    os.waitpid(child, 0)
    name = os.read(reader, 1000).decode()
    assert name.rpartition("-")[0] == store.worker_name().rpartition("-")[0]
    assert name != store.worker_name()


def test_a_sign_of_life_from_the_future_is_none(job: Job) -> None:
    taken = claim(job, [])
    age(taken.folder / "heartbeat", -1000)
    assert state(job) == "running"  # the claim itself is new
    age(job.event_file(1), -1000)
    assert state(job) == "lost"
    taken.beat()
    assert state(job) == "running"
    # Whoever looks at many runs has begun a while ago.
    assert state(job, now=time.time() - 1000) == "running"


def folder(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


DAMAGES = {
    "an unknown kind": b'{"kind": "seleased", "time": 1}',
    "no kind": b"{}",
    "a kind that is a list": b'{"kind": [], "time": 1}',
    "empty": b"",
    "a list": b"[1]",
    "not UTF-8": b'{"kind": "claim\xff", "time": 1}',
    "deep": b'{"kind": ' + b"[" * 100_000,
    "no time": b'{"kind": "claim"}',
    "a time that is none": b'{"kind": "claim", "time": NaN}',
    "a time of many digits": b'{"kind": "claim", "time": 1' + b"0" * 400 + b"}",
    "an attempt elsewhere": b'{"kind": "done", "time": 1, "attempt": "../../mine"}',
    "another attempt": b'{"kind": "done", "time": 1, "attempt": 3}',
    "a failure without an error": b'{"kind": "failed", "time": 1}',
    "a checksum that differs": b'{"kind": "claim", "time": 1, "crc32": "00000000"}',
    "a folder": folder,
    "a FIFO": os.mkfifo,
    "a device": device,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_event_is_told_and_hides_no_run(sweep: Sweep, job: Job, damage) -> None:
    (job.path / "events").mkdir()
    path = job.event_file(1)
    if callable(damage):
        damage(path)
    else:
        path.write_bytes(damage)
    assert state(job) == "running"  # by someone unknown, who may be at work
    age(path)
    status = look(sweep)
    assert status.counts["planned"] == 1
    assert not status.over
    assert not status.complete
    (problem,) = json.loads(json.dumps(status.to_json()))["problems"]
    assert problem.startswith(f"{job.name}/events/00001.json is damaged: ")
    assert "\n" not in problem
    job.result.mkdir()  # so it was that of a commit
    assert look(sweep).complete
    assert look(sweep).problems == status.problems


def test_a_worker_tells_of_a_damaged_event_and_carries_the_run_out(sweep, job, caplog) -> None:
    (job.path / "events").mkdir()
    job.event_file(1).write_text('{"kind": "seleased", "time": 1, "attempt": 1}')
    age(job.event_file(1))
    with caplog.at_level("WARNING", "steppe"):
        assert Worker(sweep, "cpu").work() == 1
    assert caplog.text.count("'seleased' is not a kind of event") == 1
    assert [event.kind for event in job.events()] == ["damaged", "claim", "done"]
    assert "'seleased'" in shown(sweep)


def shown(sweep: Sweep) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(show(sweep, look(sweep)))
    return captured.get()


def test_a_commit_whose_event_is_damaged_is_not_carried_out_again(sweep, job, monkeypatch) -> None:
    taken = claim(job, [])
    config = job.config().model_copy(update={"device": "cpu"})
    train(config, taken.folder)
    assert job.note(2, "done", attempt=1)
    data = job.event_file(2).read_bytes()
    job.event_file(2).write_bytes(data.replace(b"done", b"dome"))
    age(job.event_file(2))
    steps, step = [], Trainer.step

    def counted(self, batches):
        steps.append(self.done)
        step(self, batches)

    monkeypatch.setattr(Trainer, "step", counted)
    assert Worker(sweep, "cpu").work() == 1
    assert steps == []
    monkeypatch.undo()
    train(config, sweep.path / "alone")
    assert_same_run(job.result, sweep.path / "alone")


def test_no_flipped_bit_of_any_event_loses_a_run_in_silence(sweep: Sweep, job: Job) -> None:
    """For every bit of a claim, a failure, a claim and a commit."""
    claim(job, []).fail("ValueError: no", "Traceback ...")
    assert claim(job, job.events()).commit()
    healthy = job.events()
    for number in (1, 2, 3, 4):
        path = job.event_file(number)
        data = path.read_bytes()
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bytes(flipped))
            events = job.events()
            assert state(job) == "done"
            told = store.damage(job, events)
            same = [(e.kind, e.time) for e in events] == [(e.kind, e.time) for e in healthy]
            assert bool(told) != same
        path.write_bytes(data)


def test_a_missing_event_is_told(job: Job) -> None:
    for number in (1, 2, 3):
        assert job.note(number, "claim")
    job.event_file(2).unlink()
    assert [event.kind for event in job.events()] == ["claim", "damaged", "claim"]
    assert store.damage(job, job.events()) == [
        f"{job.name}/events/00002.json is damaged: it is missing"
    ]


def test_foreign_files_among_events_are_none(sweep: Sweep, job: Job) -> None:
    events = job.path / "events"
    (events / "backup.json").mkdir(parents=True)
    names = "00001.json~", ".00001.json.swp", "1.json", "000001.json", "٠٠٠٠١.json", "README"
    for name in names:
        (events / name).write_text("{}")
    assert look(sweep).counts["planned"] == 1
    assert not look(sweep).problems
    assert Worker(sweep, "cpu").work() == 1
    assert look(sweep).complete
    assert {*names, "backup.json"} < set(os.listdir(events))


def test_events_of_earlier_versions_stay_valid(job: Job) -> None:
    (job.path / "events").mkdir()
    job.event_file(1).write_text('{"kind": "claim", "time": 1.5, "worker": "node-7"}')
    assert [(e.kind, e.time, e.facts) for e in job.events()] == [
        ("claim", 1.5, {"worker": "node-7"})
    ]


def outside(tmp_path: Path) -> dict[str, bytes | None]:
    """All there is beside the sweep."""
    root = tmp_path / "mine"
    return {
        str(path): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))
    }


def somebody_elses_work(path: Path) -> None:
    """A folder that looks like a run whose commit was cut off."""
    for name in ("events", "attempt-00001", "attempt-00007"):
        (path / name).mkdir(parents=True)
    (path / "attempt-00007/work").write_text("keep")
    (path / "attempt-00001/records.jsonl").write_text("keep")
    (path / "events/00001.json").write_text('{"kind": "claim", "time": 0}')
    (path / "events/00002.json").write_text('{"kind": "done", "time": 0, "attempt": 1}')


def link_run(job: Job, mine: Path) -> None:
    shutil.rmtree(job.path)
    job.path.symlink_to(mine)


def link_events(job: Job, mine: Path) -> None:
    (job.path / "events").symlink_to(mine / "events")


def link_all(job: Job, mine: Path) -> None:
    mine.rename(mine.with_name(job.name))
    shutil.rmtree(job.path.parent)
    mine.mkdir()
    mine.with_name(job.name).rename(mine / job.name)
    job.path.parent.symlink_to(mine)


@pytest.mark.parametrize("link", [link_run, link_events, link_all])
@pytest.mark.parametrize(
    "act",
    [
        look,
        lambda sweep: cancel(read_plan(sweep.path)),
        lambda sweep: retry(read_plan(sweep.path)),
        lambda sweep: work(sweep.path, "cpu"),
    ],
    ids=["look", "cancel", "retry", "work"],
)
def test_nothing_is_done_behind_a_link(sweep: Sweep, job: Job, tmp_path: Path, link, act) -> None:
    somebody_elses_work(tmp_path / "mine")
    link(job, tmp_path / "mine")
    before = outside(tmp_path)
    with pytest.raises(UserError, match="is a symbolic link"):
        act(sweep)
    assert outside(tmp_path) == before


def test_linked_attempts_and_results_are_left_alone(sweep, job, tmp_path) -> None:
    somebody_elses_work(tmp_path / "mine")
    before = outside(tmp_path)
    assert job.note(1, "claim")
    assert job.note(2, "done", attempt=1)
    job.attempt(1).symlink_to(tmp_path / "mine/attempt-00001")
    job.attempt(3).symlink_to(tmp_path / "mine/attempt-00007")
    assert look(sweep).counts["done"] == 1
    assert not job.result.exists()
    job.result.symlink_to(tmp_path / "nowhere")
    look(sweep)
    job.event_file(2).unlink()
    age(job.event_file(1))
    age(job.attempt(1))
    job.result.unlink()
    assert Worker(sweep, "cpu").work() == 1  # as attempt 2, with nothing taken over
    assert outside(tmp_path) == before
    assert store.is_folder(job.result)


def test_a_done_run_without_a_result_has_failed_and_can_be_retried(sweep: Sweep, job: Job) -> None:
    assert Worker(sweep, "cpu").work() == 1
    shutil.rmtree(job.result)
    found = look(sweep)
    assert (found.counts["done"], found.counts["failed"]) == (0, 1)
    assert found.failures[0].error == "the run finished, but its result is missing"
    assert retry(sweep, (job.name,)) == [job.name]
    assert Worker(sweep, "cpu").work() == 1
    assert look(sweep).complete


def test_an_attempt_that_no_worker_made_is_not_used(sweep: Sweep, job: Job, tmp_path: Path) -> None:
    """Its links would lead the run's own writes elsewhere."""
    (tmp_path / "mine/ck/.writing-precious").mkdir(parents=True)
    (tmp_path / "mine/records.jsonl").write_text("precious")
    job.attempt(1).mkdir()
    (job.attempt(1) / "records.jsonl").symlink_to(tmp_path / "mine/records.jsonl")
    (job.attempt(1) / "heartbeat").symlink_to(tmp_path / "mine/heartbeat")
    (job.attempt(1) / "checkpoint").symlink_to(tmp_path / "mine/ck")
    assert Worker(sweep, "cpu").work() == 1
    assert (tmp_path / "mine/records.jsonl").read_text() == "precious"
    assert sorted(os.listdir(tmp_path / "mine")) == ["ck", "records.jsonl"]
    assert os.listdir(tmp_path / "mine/ck") == [".writing-precious"]
    assert not any(path.is_symlink() for path in job.result.rglob("*"))


def break_line(attempt: Path) -> None:
    path = attempt / "records.jsonl"
    path.write_bytes(b"\x00" + path.read_bytes()[1:])


def cut_records(attempt: Path) -> None:
    os.truncate(attempt / "records.jsonl", 10)


def break_checkpoints(attempt: Path) -> None:
    for path in (attempt / "checkpoint").glob("step-*"):
        (path / "state.json").write_text("{")


def break_config(attempt: Path) -> None:
    (attempt / "config.json").write_text("{")


def link_records(attempt: Path) -> None:
    path = attempt / "records.jsonl"
    mine = attempt.parents[3] / "mine"
    mine.mkdir()
    path.rename(mine / "records.jsonl")
    path.symlink_to(mine / "records.jsonl")


@pytest.mark.parametrize("gone", [True, False], ids=["given back", "silent"])
@pytest.mark.parametrize(
    "damage", [break_line, cut_records, break_checkpoints, break_config, link_records]
)
def test_a_damaged_attempt_is_started_anew(
    sweep, job, tmp_path, monkeypatch, caplog, damage, gone
) -> None:
    taken, step = claim(job, []), Trainer.step

    def failing(self, batches):
        step(self, batches)
        if self.done == 5:
            raise ValueError("the fan stopped")

    config = job.config().model_copy(update={"device": "cpu"})
    monkeypatch.setattr(Trainer, "step", failing)
    with pytest.raises(ValueError, match="fan"):
        train(config, taken.folder)
    monkeypatch.undo()
    damage(taken.folder)
    before = outside(tmp_path)
    if gone:
        assert taken.fail("ValueError: the fan stopped", "")
    else:
        age(taken.folder / "heartbeat")
        age(job.event_file(1))
    with caplog.at_level("WARNING", "steppe"):
        assert Worker(sweep, "cpu").work() == 1
    assert "attempt 1 cannot be resumed: " in caplog.text
    assert "starting over" in caplog.text
    assert outside(tmp_path) == before
    train(config, sweep.path / "alone")
    assert_same_run(job.result, sweep.path / "alone")
    assert not list(job.path.glob("*attempt-*"))


def test_what_comes_after_the_last_checkpoint_need_not_be_whole(sweep, job, monkeypatch) -> None:
    """A power cut may leave anything there: the resumed run records it again."""
    taken, step = claim(job, []), Trainer.step

    def failing(self, batches):
        step(self, batches)
        if self.done == 5:
            raise ValueError("no power")

    config = job.config().model_copy(update={"device": "cpu"})
    monkeypatch.setattr(Trainer, "step", failing)
    with pytest.raises(ValueError, match="power"):
        train(config, taken.folder)
    monkeypatch.undo()
    with (taken.folder / "records.jsonl").open("ab") as file:
        file.write(b"\0" * 100 + b"\n")
    assert taken.release()
    assert Worker(sweep, "cpu").work() == 1
    assert "resumed after step 2" in (job.result / "log.txt").read_text()
    train(config, sweep.path / "alone")
    assert_same_run(job.result, sweep.path / "alone")


def test_left_overs_of_the_killed_are_removed_and_those_of_the_living_are_not(
    sweep, job, tmp_path
) -> None:
    assert job.note(1, "claim")
    assert job.note(2, "claim")
    (tmp_path / "mine").write_text("keep")
    old = [
        sweep.path / ".clock-node-1-abcd1234",
        sweep.path / ".sweep.json.writing",
        job.path / ".clock-node-1-abcd1234",
        job.path / "events/.00001.node-1-abcd1234",
        job.path / "events/.00007.node-1",  # of an earlier version
    ]
    new = [path.with_name(path.name.replace("node-1", "node-2")) for path in old]
    new.remove(old[1])  # a plan, whose planner holds no claim
    for path in (*old, *new):
        path.touch()
    linked = job.path / "events/.00003.node-1-abcd1234"
    linked.symlink_to(tmp_path / "mine")
    for path in (*old, linked):
        age(path)
    copies = [job.path / f".attempt-0000{number}.copying" for number in (1, 2)]
    foreign = [sweep.path / ".git", job.path / "events/.hidden", job.path / "notes.txt"]
    foreign += [sweep.path / ".20260101.notes.txt", job.path / ".12345.backup"]
    for path in (*copies, *foreign):
        path.mkdir()
        age(path)
    tidy(sweep)
    assert [path for path in (*old, linked, copies[0]) if os.path.lexists(path)] == []
    assert all(path.exists() for path in (*new, copies[1], *foreign))  # claim 2 is at work
    assert (tmp_path / "mine").read_text() == "keep"
    claim(job, job.events())
    assert not copies[1].exists()


def test_attempts_beside_a_result_are_removed_at_the_next_start(sweep: Sweep, job: Job) -> None:
    assert Worker(sweep, "cpu").work() == 1
    for name in ("attempt-00001", ".attempt-00001.copying"):
        (job.path / name / "checkpoint").mkdir(parents=True)  # its remover was killed
    done = CliRunner().invoke(app, ["sweep", "run", str(sweep.path)], catch_exceptions=False)
    assert done.exit_code == 0
    assert sorted(os.listdir(job.path)) == ["config.json", "events", "result"]


def test_an_event_is_noted_though_its_temporary_was_tidied_up(job: Job, monkeypatch) -> None:
    """Its worker stalled for longer than `stale` between the two."""
    link, stalls = os.link, [1]

    def stalled(source, target):
        if stalls:
            stalls.pop()
            os.unlink(source)
        link(source, target)

    monkeypatch.setattr(os, "link", stalled)
    assert job.note(1, "claim")
    assert not job.note(1, "claim")
    assert os.listdir(job.path / "events") == ["00001.json"]


def test_no_control_code_reaches_the_terminal(sweep: Sweep, job: Job) -> None:
    claim(job, []).fail("ValueError: \x1b]0;title\x07", "Traceback\n  \x1b[2J", diverged=True)
    text = shown(sweep)
    assert r"\x1b]0;title\x07" in text
    assert "\x1b]0" not in text
    assert "\x1b[2J" not in text
