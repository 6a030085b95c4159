"""Checkpoints: whole or not there, whatever happens while they are written or lie on the disk."""

import json
import os
import shutil
import signal
import sys
import warnings

import pytest
import torch

from steppe.errors import RunError
from steppe.training import checkpoint
from steppe.training.checkpoint import Damaged, clean, load, load_last, save, save_best

FILES = ("model.safetensors", "state.safetensors", "state.json")


def contents(step):
    """Weights and state that tell the step they belong to."""
    model = {"w": torch.full((2, 3), float(step)), "n": torch.tensor(step)}
    return model, {"done": step, "moments": {0: torch.arange(3.0) + step}, "best": (0.5, step)}


def put(root, step, tag=0):
    model, state = contents(step)
    save(root, step, model, {**state, "tag": tag})


def check(found, step):
    model, state = contents(step)
    assert found.step == step
    assert {k: v.tolist() for k, v in found.model.items()} == {
        k: v.tolist() for k, v in model.items()
    }
    assert (found.state["done"], found.state["best"]) == (step, state["best"])
    assert torch.equal(found.state["moments"][0], state["moments"][0])


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def test_the_last_two_are_kept_and_the_newest_is_read(tmp_path):
    assert load_last(tmp_path / "never made") is None
    for step in (0, 999_999, 1_000_000, 1_000_001):  # names grow longer: not in order as texts
        put(tmp_path, step)
        check(load_last(tmp_path), step)
    assert sorted(os.listdir(tmp_path)) == ["step-1000000", "step-1000001"]


def test_what_others_put_there_is_left_alone(tmp_path):
    put(tmp_path, 1)
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000009.mine")
    for step in (2, 3):
        put(tmp_path, step)
    check(load_last(tmp_path), 3)
    assert (tmp_path / "step-000009.mine").exists()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove", "folder"])
def test_damage_is_found_and_the_one_before_is_used(tmp_path, caplog, name, damage):
    put(tmp_path, 10)
    put(tmp_path, 20)
    file = tmp_path / "step-000020" / name
    size = file.stat().st_size
    if damage == "flip":
        flip(file, size // 2)
    elif damage == "cut":
        os.truncate(file, size - 1)
    elif damage == "empty":
        os.truncate(file, 0)
    else:
        file.unlink()
        if damage == "folder":
            file.mkdir()
    check(load_last(tmp_path), 10)
    (message,) = caplog.messages
    assert "step-000020 is damaged" in message
    assert name in message


def test_no_byte_can_change_unnoticed(tmp_path):
    put(tmp_path, 1)
    folder = tmp_path / "step-000001"
    for name in FILES:
        file = folder / name
        for position in range(file.stat().st_size):
            flip(file, position)
            with pytest.raises(Damaged):
                load(folder)
            flip(file, position)
    check(load(folder), 1)


def test_all_damaged_is_an_error_that_says_what_to_do(tmp_path):
    for step in (10, 20):
        put(tmp_path, step)
        flip(tmp_path / f"step-0000{step}" / "model.safetensors", -1)
    with pytest.raises(RunError, match=f"every checkpoint in {tmp_path} is damaged.*Remove"):
        load_last(tmp_path)


def test_a_run_that_went_back_behind_a_damaged_one_keeps_two_whole_ones(tmp_path):
    for step in (10, 20):
        put(tmp_path, step)
    flip(tmp_path / "step-000020" / "state.json", 5)
    put(tmp_path, 13)  # the resumed run is interrupted before it gets to 20 again
    assert sorted(os.listdir(tmp_path)) == ["step-000010", "step-000013"]
    check(load_last(tmp_path), 13)


def test_a_newer_format_is_not_taken_for_damage(tmp_path, monkeypatch):
    put(tmp_path, 10)
    monkeypatch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
    put(tmp_path, 20)
    monkeypatch.undo()
    newer = checkpoint.FORMAT + 1
    with pytest.raises(RunError, match=rf"step-000020 was written by .* \(format {newer}"):
        load_last(tmp_path)


def test_an_unreadable_one_is_not_taken_for_damage(tmp_path, monkeypatch):
    put(tmp_path, 10)

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "read", refuse)  # root may read everything
    with pytest.raises(PermissionError):
        load_last(tmp_path)


def test_tied_weights_are_kept(tmp_path):
    weight = torch.randn(2, 2)
    save(tmp_path, 0, {"a": weight, "b": weight, "c": weight.t()}, {"x": weight, "y": weight[0]})
    found = load_last(tmp_path)
    assert torch.equal(found.model["b"], weight)
    assert torch.equal(found.model["c"], weight.t())
    assert torch.equal(found.state["y"], weight[0])


OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir")


def killed_before(number, action):
    """Runs an action in a process that kills itself before its n-th operation on files.

    Returns whether it got that far.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        pid = os.fork()
    if pid == 0:
        seen = 0

        def count(event, _):
            nonlocal seen
            if event in OPERATIONS:
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        status = 1
        try:
            sys.addaudithook(count)
            action()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize(
    ("before", "step", "tag", "allowed"),
    [
        ((), 10, 0, {None, (10, 0)}),
        ((10, 20), 30, 0, {(20, 0), (30, 0)}),  # and 10 is removed
        ((10, 20), 20, 1, {(20, 0), (20, 1)}),  # takes the place of the one that is there
    ],
    ids=["first", "next", "same again"],
)
def test_killed_at_any_operation_it_is_the_old_one_or_the_new_one(
    tmp_path, caplog, before, step, tag, allowed
):
    number, seen = 0, set()
    while True:
        root = tmp_path / str(number)
        for old in before:
            put(root, old)
        killed = killed_before(number, lambda root=root: put(root, step, tag))
        clean(root)
        found = load_last(root)
        result = found and (found.step, found.state["tag"])
        assert result in allowed
        seen.add(result)
        if found:
            check(found, found.step)
        assert not list(root.glob(".*"))
        put(root, step, tag)  # what was left behind is not in the way
        check(load_last(root), step)
        if not killed:
            break
        number += 1
    assert seen == allowed  # it was killed early and late
    assert result == (step, tag)
    assert not caplog.messages  # nothing half-written was met


def test_killed_at_any_operation_the_best_is_there(tmp_path):
    number = 0
    values = set()
    while True:
        root = tmp_path / str(number)
        save_best(root, 1, contents(1)[0], 0.1)
        killed = killed_before(number, lambda root=root: save_best(root, 2, contents(2)[0], 0.2))
        clean(root)
        found = load(root / "best")
        values.add(found.step)
        assert found.model["n"].item() == found.step
        assert json.loads((root / "best" / "state.json").read_text())["value"] == found.step / 10
        if not killed:
            break
        number += 1
    assert values == {1, 2}
