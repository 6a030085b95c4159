"""Faults in the middle of a run: each is told clearly, and nothing that was written is lost.

After every one of them `--resume` must end as if nothing had happened: the same records, and the
same bits in the weights and in the state of the optimizer.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from steppe.domains.store import Store
from steppe.errors import Diverged, Interrupted, RunError, UserError
from steppe.training import RunDirectory, checkpoint, load_model, make_config, train
from steppe.training.directory import VOLATILE
from steppe.training.interrupts import Interrupts
from steppe.training.progress import Display
from steppe.training.scoring import Scoring
from steppe.training.setup import open_data
from tests import processes
from tests.limits import seconds
from tests.training import full_disk

DIGITS = {
    "dataset": "RotatedDigits",
    "targets": "75",
    "optimizer": "fad",
    "steps": 21,
    "checkpoint_every": 4,
    "batch_size": 8,
}


def words(values, out, *more):
    """The command line that trains what a config has."""
    plain = dict(values)
    options = ["--dataset", plain.pop("dataset"), "--target", plain.pop("targets"), "--out", out]
    sets = [word for key, value in plain.items() for word in ("--set", f"{key}={value}")]
    return [str(word) for word in ("train", *options, *sets, *more)]


@pytest.fixture
def start(tmp_path):
    """The command line in a process of its own, which does not outlive the test."""
    with contextlib.ExitStack() as stack:

        def call(*command):
            process = processes.Steppe(*command, folder=tmp_path)
            stack.callback(process.kill)
            return process

        yield call


def read_until(process, text):
    """The lines of standard error, up to one that has the text."""
    deadline = time.monotonic() + seconds(600)
    while text not in (lines := process.stderr.rpartition("\n")[0]):
        assert process.poll() is None, f"ended early: {process.stderr}"
        assert time.monotonic() < deadline, lines
        time.sleep(0.01)
    lines = lines.splitlines(keepends=True)
    last = next(number for number, line in enumerate(lines) if text in line)
    return [line.rstrip("\n") + "\n" for line in lines[: last + 1]]


class Hook(Display):
    """Does something when so many steps are done."""

    def __init__(self, done, action):
        super().__init__()
        self.done, self.action = done, action

    def step(self, done):
        if done == self.done:
            self.action()


def send(*numbers):
    def action():
        for number in numbers:
            os.kill(os.getpid(), number)

    return action


def lasting(records):
    return [{k: v for k, v in record.items() if k not in VOLATILE} for record in records]


def bits(folder):
    """A checkpoint's index: the checksums of all tensors, and every plain value of the state."""
    index = json.loads((folder / "state.json").read_text())
    del index["checksum"]
    state = dict(index.get("state", {"$dict": ()})["$dict"])
    state.pop("records_size", None)  # lines have the times that things took
    return {**index, "state": state}


def assert_same_run(path, reference):
    run, expected = RunDirectory(path), RunDirectory(reference)
    assert run.state == "done"
    assert lasting(run.records()) == lasting(expected.records())
    names = sorted(os.listdir(expected.checkpoints))
    assert sorted(os.listdir(run.checkpoints)) == names  # nothing half-written is left
    for name in names:
        assert bits(run.checkpoints / name) == bits(expected.checkpoints / name)
    assert not list(run.path.glob(".*.writing"))


def assert_failed_whole(path, reference, last, recorded):
    """A failed run whose last checkpoint is whole and whose records are the first ones."""
    run = RunDirectory(path)
    assert run.state == "failed"
    assert [record["step"] for record in run.records()] == recorded
    expected = RunDirectory(reference).records()[: len(recorded)]
    assert lasting(run.records()) == lasting(expected)
    assert run.records_file.read_bytes()[-1:] == b"\n"
    assert checkpoint.load_last(run.checkpoints).step == last
    assert not list(run.checkpoints.glob(".*"))


def assert_one_line(text):
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("steppe: ")] == lines[-1:]
    assert "Traceback" not in text
    assert "failed:" not in text
    return lines[-1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    train(make_config(DIGITS), path)
    return path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was interrupted after 11 of its steps: the checkpoints are of steps 8 and 10."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Interrupted):
        train(make_config(DIGITS), path, display=Hook(11, send(signal.SIGTERM)))
    assert RunDirectory(path).state == "planned"
    return path


@pytest.fixture
def half(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "run"))


# The operation at which the disk is full, what then is left of it or may be written to a file, and
# what the run must still have: its last checkpoint, and the steps of its records. A record's line
# has some 2,000 bytes: on a tmpfs, the third goes partly into a page that is there already.
FAULTS = {
    "records.jsonl": (
        # The run looks for records first.
        {"event": "open", "path": "/records.jsonl", "times": 4, "leave": 0},
        {"leave": 4500},
        (4, [0, 4]),
    ),
    "step-000008": (
        {"event": "os.mkdir", "path": ".writing-step-000008", "times": 1, "leave": 20480},
        {},
        (4, [0, 4, 8]),
    ),
    "best": (
        {"event": "os.mkdir", "path": ".writing-best", "times": 3, "leave": 20480},
        {},
        (0, [0, 4]),
    ),
}


def check_full_disk(how, tmp_path, reference, message):
    disk, seen = tmp_path / "disk", tmp_path / "seen"
    disk.mkdir()
    seen.mkdir()
    faults = {
        name: {**fault, **(limited if how == "limit" else {})}
        for name, (fault, limited, _) in FAULTS.items()
    }
    train_words = [word for word in words(DIGITS, "") if word not in ("--out", "")]
    processes.run(full_disk.meet, how, disk, seen, faults, train_words)
    for name, (_, _, whole) in FAULTS.items():
        first, second = json.loads((seen / name / "seen.json").read_text())
        code, out, err = first
        assert code == 1, err
        last = assert_one_line(err)
        assert f"{name} could not be written: {message}" in last
        assert "Free some space, then continue with --resume" in last
        assert not out
        assert_failed_whole(seen / name / "failed", reference, *whole)
        assert second[0] == 0, second
        assert_same_run(seen / name / "resumed", reference)


def test_a_full_disk(tmp_path, undisturbed):
    processes.run(full_disk.try_mount, tmp_path)
    if reason := (tmp_path / "reason").read_text():
        pytest.skip(f"no file system of a test's own here: {reason}")
    check_full_disk("tmpfs", tmp_path, undisturbed, "No space left on device")


def test_a_limit_on_the_size_of_files(tmp_path, undisturbed):
    check_full_disk("limit", tmp_path, undisturbed, "File too large")


def test_sigterm_saves_and_another_process_is_kept_out(tmp_path, undisturbed, steppe, start):
    out = tmp_path / "run"
    process = start(*words(DIGITS, out, "--json"))
    lines = read_until(process, "step     4")
    os.kill(process.pid, signal.SIGSTOP)  # as long as this test needs
    try:
        before = (out / "config.json").read_bytes()
        for more in ((), ("--resume",), ("--seed", 5)):
            code, _, err = steppe(*words(DIGITS, out, *more))
            assert code == 2
            assert f"{out} is being trained by another process" in assert_one_line(err)
        assert (out / "config.json").read_bytes() == before
        assert RunDirectory(out).state == "running"
    finally:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
    assert process.wait() == 143
    stdout, stderr = process.stdout, process.stderr
    assert RunDirectory(out).state == "planned"
    assert stdout == ""  # for JSON only
    assert stderr.splitlines()[-1] == "interrupted by SIGTERM: continue with --resume"
    # Not a terminal: plain lines, with the time that is left.
    assert lines[1] == "RotatedDigits, 75 held out, fad: 21 steps\n"
    assert lines[-1].startswith("step     4  loss ")
    assert lines[-1].endswith(" left\n")
    assert "\x1b" not in "".join(lines) + stderr
    code, stdout, stderr = steppe("train", "--resume", "--json", "--out", out)
    assert code == 0
    assert "resumed after step" in stderr
    assert_same_run(out, undisturbed)
    best = max(
        RunDirectory(out).records(),
        key=lambda r: np.mean([d["val"]["accuracy"] for d in r["domains"].values() if "val" in d]),
    )
    assert json.loads(stdout) == best


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
@pytest.mark.parametrize("evaluated", [0, 3], ids=["training", "evaluation"])
def test_a_signal_at_any_moment_saves_the_state(
    tmp_path, monkeypatch, undisturbed, number, code, evaluated
):
    handlers = signal.getsignal(number)
    display = Display() if evaluated else Hook(7, send(number))
    evaluation_batches, calls = Store.evaluation, []

    def watched(*args, **kwargs):
        calls.append(args)
        if evaluated and len(calls) == 12 + evaluated:  # of the second record, at step 4
            send(number)()
        return evaluation_batches(*args, **kwargs)

    monkeypatch.setattr(Store, "evaluation", watched)
    config = make_config(DIGITS)
    with pytest.raises(Interrupted) as caught:
        train(config, tmp_path, display=display)
    assert caught.value.code == code
    assert signal.getsignal(number) is handlers
    run = RunDirectory(tmp_path)
    assert run.state == "planned"
    assert checkpoint.load_last(run.checkpoints).step == (4 if evaluated else 6)
    assert [r["step"] for r in run.records()] == ([0] if evaluated else [0, 4])
    monkeypatch.undo()
    train(config, tmp_path, resume=True)
    assert_same_run(tmp_path, undisturbed)


def test_a_second_signal_is_not_held_back(tmp_path, undisturbed):
    config = make_config(DIGITS)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, display=Hook(7, send(signal.SIGTERM, signal.SIGINT)))
    run = RunDirectory(tmp_path)
    assert run.state == "planned"
    assert checkpoint.load_last(run.checkpoints).step == 4  # it had no time to save
    train(config, tmp_path, resume=True)
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.parametrize("place", ["device", "stream"])
def test_a_resumed_run_may_have_its_images_elsewhere(tmp_path, undisturbed, place):
    config = make_config({**DIGITS, "data": "host"})
    with pytest.raises(Interrupted):
        train(config, tmp_path, display=Hook(7, send(signal.SIGTERM)))
    train(config.model_copy(update={"data": place}), tmp_path, resume=True)
    assert_same_run(tmp_path, undisturbed)


def test_a_resumed_run_keeps_its_engine_and_precision(tmp_path):
    config = make_config({**DIGITS, "steps": 1})
    train(config, tmp_path)
    for key, value in (("engine", "compile"), ("precision", "bf16")):
        with pytest.raises(UserError, match=f"started with {key}='auto', not '{value}'"):
            train(config.model_copy(update={key: value}), tmp_path, resume=True)


def test_a_second_sigterm_ends_the_process():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        pid = os.fork()
    if pid == 0:
        try:
            with Interrupts() as interrupts:
                for _ in range(2):  # the same one at once is not a second one
                    send(signal.SIGTERM)()
                time.sleep(1.1)
                if interrupts.number == signal.SIGTERM:
                    send(signal.SIGTERM)()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_a_thread_may_train(tmp_path, undisturbed):
    # Only the main thread may have handlers of signals.
    thread = threading.Thread(target=train, args=(make_config(DIGITS), tmp_path))
    thread.start()
    thread.join()
    assert_same_run(tmp_path, undisturbed)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json"])
@pytest.mark.parametrize("damage", [flip, os.unlink, lambda path: os.truncate(path, 100)])
def test_a_damaged_checkpoint_costs_steps_and_nothing_else(half, undisturbed, steppe, name, damage):
    damage(half / "checkpoint" / "step-000010" / name)
    code, _, err = steppe("train", "--resume", "--out", half)
    assert code == 0
    assert "step-000010 is damaged" in err
    assert name in err
    assert "resumed after step 8" in err
    assert_same_run(half, undisturbed)


def test_when_every_checkpoint_is_damaged_a_person_decides(half, undisturbed, steppe):
    for step in (8, 10):
        flip(half / "checkpoint" / f"step-{step:06d}" / "model.safetensors")
    records = (half / "records.jsonl").read_bytes()
    code, _, err = steppe("train", "--resume", "--out", half)
    assert code == 1
    assert f"every checkpoint in {half / 'checkpoint'} is damaged" in assert_one_line(err)
    assert RunDirectory(half).state == "failed"
    assert (half / "records.jsonl").read_bytes() == records
    shutil.rmtree(half / "checkpoint")  # as the message says
    assert steppe("train", "--resume", "--out", half)[0] == 0
    assert_same_run(half, undisturbed)


def test_a_damaged_best_is_told_and_the_last_can_be_used(half, steppe):
    flip(half / "checkpoint" / "best" / "model.safetensors")
    code, _, err = steppe("evaluate", half, "--which", "best")
    assert code == 1
    assert "best is damaged" in assert_one_line(err)
    assert "Choose one, for example with --which step:" in err
    assert steppe("evaluate", half)[0] == 1  # the best is what is taken by default
    assert steppe("evaluate", half, "--which", "last", "--json")[0] == 0


def test_a_checkpoint_of_a_newer_format(half, steppe, monkeypatch):
    found = checkpoint.load_last(half / "checkpoint")
    monkeypatch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
    checkpoint.save(half / "checkpoint", 11, found.model, found.state)
    monkeypatch.undo()
    code, _, err = steppe("train", "--resume", "--out", half)
    assert code == 1
    assert (
        f"step-000011 was written by a newer steppe (format {checkpoint.FORMAT + 1}"
        in assert_one_line(err)
    )


def test_a_config_of_a_newer_version(half, steppe):
    values = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**values, "version": 99, "novelty": 1}))
    for command in (("train", "--resume", "--out", half), ("evaluate", half)):
        code, _, err = steppe(*command)
        assert code == 2
        assert f"{half / 'config.json'}: this config was written by a newer steppe" in err
        assert assert_one_line(err).endswith("pip install -U steppe")
    assert RunDirectory(half).state == "planned"


@pytest.mark.parametrize("left", [b'{"step": 9, "epo', b'{"step": 9}\n{"st', b"\x00" * 5000])
def test_what_a_crash_left_at_the_end_of_the_records_is_cut(half, undisturbed, left):
    run = RunDirectory(half)
    with run.records_file.open("ab") as file:
        file.write(left)
    train(run.config(), half, resume=True)
    assert_same_run(half, undisturbed)


def test_records_that_are_gone_are_missed(half, undisturbed, steppe):
    records = (half / "records.jsonl").read_bytes()
    os.truncate(half / "records.jsonl", len(records) - 10)
    code, _, err = steppe("train", "--resume", "--out", half)
    assert code == 1
    assert "records.jsonl has lost 10 bytes" in assert_one_line(err)
    (half / "records.jsonl").write_bytes(records)
    assert steppe("train", "--resume", "--out", half)[0] == 0
    assert_same_run(half, undisturbed)


@pytest.mark.parametrize("name", ["config.json", "data.json"])
def test_a_damaged_file_of_a_run_is_named(half, steppe, name):
    os.truncate(half / name, 30)
    code, _, err = steppe("train", "--resume", "--out", half)
    assert code == 2
    assert f"{half / name} is" in assert_one_line(err)


def test_a_mistake_leaves_nothing_in_the_way(tmp_path, steppe, undisturbed):
    out = tmp_path / "run"
    code, _, err = steppe(*words({**DIGITS, "targets": "74"}, out))
    assert code == 2
    assert "has no domain '74'" in assert_one_line(err)
    code, _, err = steppe(*words({**DIGITS, "stepz": "3"}, out))
    assert code == 2
    assert "unknown config key 'stepz', did you mean 'steps'?" in assert_one_line(err)
    code, _, err = steppe(*words(DIGITS, out))
    assert code == 0, err
    assert_same_run(out, undisturbed)
    for more, message in (
        ((), "already holds a run: add --resume"),
        (("--resume", "--seed", 3), "was started with seed=0, not 3"),
    ):
        code, _, err = steppe(*words(DIGITS, out, *more))
        assert code == 2
        assert message in assert_one_line(err)
    code, _, err = steppe(*words(DIGITS, out, "--resume"))
    assert code == 0
    assert "is already done" in err
    assert_same_run(out, undisturbed)


def test_a_folder_that_another_process_has_taken_is_left_as_it_is(tmp_path):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        file = (tmp_path / ".lock").open("w")
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.write(writer, b"!")
        signal.pause()
    try:
        assert os.read(reader, 1)
        with pytest.raises(UserError, match="is being trained by another process"):
            train(make_config(DIGITS), tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.parametrize(
    ("lr", "recorded", "message"),
    [
        (3.0, [0], "cross_entropy became nan at step 4"),  # in the evaluation
        (30.0, [0], "the loss became nan at step 3"),  # in a step
    ],
)
def test_a_loss_that_diverges(tmp_path, steppe, lr, recorded, message):
    out = tmp_path / "run"
    values = {**DIGITS, "optimizer": "sgd", "optimizer.lr": lr, "freeze_bn": "true"}
    code, _, err = steppe(*words(values, out))
    assert code == 1
    last = assert_one_line(err)
    assert message in last
    assert str(out) in last
    assert "smaller optimizer.lr" in last
    run = RunDirectory(out)
    assert run.state == "failed"
    assert [record["step"] for record in run.records()] == recorded
    assert b"NaN" not in run.records_file.read_bytes()
    assert b"Infinity" not in run.records_file.read_bytes()
    for which in ("last", "best"):
        logits = load_model(out, which)(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
        assert logits.isfinite().all()
    code, _, err = steppe("train", "--resume", "--out", out)  # ends the same way, not worse
    assert code == 1
    assert message in assert_one_line(err)
    assert [record["step"] for record in run.records()] == recorded


@pytest.mark.parametrize(("domain", "kind"), [("75", RunError), ("0", Diverged)])
def test_the_target_alone_makes_no_divergence(tmp_path, monkeypatch, domain, kind):
    """A learning rate may be chosen by it, so the held-out domain must have no part in it."""
    everything = Scoring.everything

    def overflowing(self, *given):
        domains = everything(self, *given)
        for part in domains[domain].values():
            part["cross_entropy"] = math.inf
        return domains

    monkeypatch.setattr(Scoring, "everything", overflowing)
    with pytest.raises(RunError, match=f"domains/{domain}/.*became inf at step 0") as caught:
        train(make_config(DIGITS), tmp_path / "run")
    assert type(caught.value) is kind


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Three domains, two classes, twelve small images of each."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for domain in ("a", "b", "c"):
        for number, name in enumerate(("bright", "dark")):
            folder = root / domain / name
            folder.mkdir(parents=True)
            for i in range(12):
                pixels = rng.integers(256 >> number, size=(20, 18, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def photos(images):
    return {
        **DIGITS,
        "dataset": str(images),
        "targets": "c",
        "image_size": 16,
        "backbone": "small-cnn",
        "weights": "none",
    }


@pytest.fixture(scope="module")
def undisturbed_photos(tmp_path_factory, photos):
    path = tmp_path_factory.mktemp("undisturbed-photos") / "run"
    train(make_config({**photos, "workers": 0}), path)
    return path


def an_image(photos, part):
    """The path of an image that is trained on, or validated with."""
    _, splits = open_data(make_config(photos))
    domain = splits[1].domain
    return Path(photos["dataset"]) / "b" / domain.images.name(splits[1].parts[part][0])


@pytest.mark.parametrize("part", ["train", "val"])
def test_an_image_that_cannot_be_read(tmp_path, photos, undisturbed_photos, steppe, part):
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(make_config({**photos, "workers": 0}), out, display=Hook(7, send(signal.SIGTERM)))
    check_unreadable(an_image(photos, part), out, undisturbed_photos, steppe, steppe)


def check_unreadable(image, out, reference, steppe, broken, *more):
    """Resumes with an image cut in half, then again with the whole one."""
    whole, records = image.read_bytes(), (out / "records.jsonl").read_bytes()
    resume = ("train", "--resume", "--out", out)
    try:
        image.write_bytes(whole[: len(whole) // 2])
        code, stdout, err = broken(*resume, *more)
    finally:
        image.write_bytes(whole)
    assert code == 2
    assert f"image {image} cannot be read" in assert_one_line(err)
    assert not stdout
    assert RunDirectory(out).state == "failed"
    assert (out / "records.jsonl").read_bytes() == records
    code, _, err = steppe(*resume, "--set", "workers=0")
    assert code == 0, err
    assert_same_run(out, reference)


def test_readers_in_other_processes(tmp_path, photos, undisturbed_photos, steppe, start):
    out = tmp_path / "run"
    process = start(*words(photos, out, "--set", "workers=2"))
    read_until(process, "step     4")
    process.kill()
    # The readers live on for some seconds, until they notice; they are not taken for the run.
    code, _, err = steppe("train", "--resume", "--out", out, "--set", "workers=0", "--seed", 3)
    assert code == 2
    assert "was started with seed=0, not 3" in err

    def another(*command):
        other = start(*command)
        code = other.wait()  # its own readers do not hold it up
        return code, other.stdout, other.stderr

    image = an_image(photos, "train")
    check_unreadable(image, out, undisturbed_photos, steppe, another, "--set", "workers=2")


def test_other_images_than_it_started_with_are_refused(
    tmp_path, photos, undisturbed_photos, steppe
):
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(make_config(photos), out, display=Hook(7, send(signal.SIGTERM)))
    images = Path(photos["dataset"])
    new = images / "a" / "dark" / "new.png"
    shutil.copy(images / "a" / "dark" / "0.png", new)
    try:
        code, _, err = steppe("train", "--resume", "--out", out)
    finally:
        new.unlink()
    assert code == 2
    assert f"are not those that {out} was started with" in assert_one_line(err)
    assert checkpoint.load_last(out / "checkpoint").step == 6
    assert steppe("train", "--resume", "--out", out)[0] == 0
    assert_same_run(out, undisturbed_photos)
