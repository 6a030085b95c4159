"""Values that nobody means, and run folders that somebody else made: one line each, and quickly."""

import json
import logging
import os
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_tensors

from steppe.errors import RunError, UserError
from steppe.measure import Settings, load_measurements, measure_run
from steppe.reports.curvature import described
from steppe.sealed import KEY
from steppe.training import (
    RunConfig,
    RunDirectory,
    apply_overrides,
    checkpoint,
    evaluate_ensemble,
    evaluate_run,
    export_run,
    load_model,
    make_config,
    read_config,
    train,
)

BASE: dict[str, Any] = {"dataset": "RotatedDigits", "targets": "75", "sources": "0"}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = {
    "thirty digits": 10**30,
    "thousands of digits": 10**5000,
    "negative": -(10**400),
    "infinite": float("inf"),
    "nan": float("nan"),
    "true": True,
    "empty": "",
    "null character": "a\0b",
    "half a character": "\udcff",
    "long": "x" * 5000,
    "escape": "\x1b[31m",
    "pattern": "[a-",
    "list": [5],
    "list of nothing": [[]],
    "null in a list": ["\0"],
    "number as a name": {"name": 5},
    "number as a key": {5: 6},
    "nested": nested(500),
    "nested deeply": nested(100_000),
    "bytes": b"x",
    "object": object(),
}
OPTIONS = [
    "optimizer.lr",
    "optimizer.rho",
    "optimizer.betas",
    "algorithm.penalty",
    "averaging.every",
]


@pytest.mark.parametrize("value", HOSTILE.values(), ids=list(HOSTILE))
@pytest.mark.parametrize("key", [*RunConfig.model_fields, *OPTIONS])
def test_every_key_takes_a_value_or_refuses_it_in_one_line(key, value):
    axis, dot, option = key.partition(".")
    names = {"optimizer": "fad" if option == "rho" else "adam"}
    names |= {"algorithm": "IRM", "averaging": "swad"}
    given = {axis: {"name": names[axis], option: value}} if dot else {key: value}
    told = ""
    try:
        assert json.loads(make_config({**BASE, **given}).to_json())
    except (UserError, ModuleNotFoundError) as error:
        told = str(error)
    assert "\n" not in told
    assert len(told) < 600


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("root=5", "root=5: Input should be a valid string"),
        ("steps=" + "9" * 5000, "thousands of digits"),
        ("steps=" + "[" * 20_000, "nested too deeply"),
        ("batch_size=" + "9" * 30, "more than 64 bits"),
        ("batch_size=1000000", "less than or equal to"),
        ("image_size=1000000", "less than or equal to"),
        ("workers=1000000", "less than or equal to"),
        ("steps=99999999999", "less than or equal to"),
        ('weights="\\u0000"', "null character"),
        ("optimizer.lr=1" + "0" * 400, r"optimizer\.lr=1000.*more than 64 bits"),
    ],
)
def test_set_refuses_what_nobody_means(text, told):
    with pytest.raises(UserError, match=told) as caught:
        make_config(apply_overrides(BASE, [text]))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["[" * 100_000, '{"steps": ' + "9" * 5000 + "}", "\xff"])
def test_a_config_file_that_is_no_json_is_told(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="is not JSON"):
        read_config(tmp_path / "config.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    values = {**BASE, "steps": 31, "checkpoint_every": 10, "batch_size": 8, "device": "cpu"}
    train(make_config(values), folder)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def damage(run, name="step-000030"):
    with (run / "checkpoint" / name / "model.safetensors").open("ab") as file:
        file.write(b"X")


USES = {
    "load_model": lambda run, which="last": load_model(run, which).step,
    "evaluate": lambda run, which="last": evaluate_run(run, which=which)["75"].to_json()["step"],
    "ensemble": lambda run, which="last": evaluate_ensemble([run], which=which)["75"].to_json(
        ["a"]
    )["members"][0]["step"],
    "export": lambda run, which="last": int(export_run(run, run / "m.safetensors", which)["step"]),
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
@pytest.mark.parametrize("state", ["done", "planned"])
def test_no_other_step_passes_for_the_last(run, use, state):
    (run / "state").write_text(state)
    assert use(run) == 30
    (run / "m.safetensors").unlink(missing_ok=True)
    damage(run)
    with pytest.raises(
        RunError, match=r"step-000030 is damaged.*intact: step 20, best \(step"
    ) as told:
        use(run)
    assert "--which step:20" in str(told.value)
    assert not (run / "m.safetensors").exists()
    assert use(run, which="step:20") == 20
    with pytest.raises(UserError, match="no checkpoint after step 7: choose from 20, 30"):
        use(run, which="step:7")
    with pytest.raises(RunError, match="is damaged"):
        use(run, which="step:30")


def test_curvature_measures_the_step_that_was_asked_for(run):
    quick = Settings(top=1, images=16, trace_rtol=0.5)
    damage(run)
    with pytest.raises(RunError, match="intact: step 20"):
        measure_run(run, quick, device="cpu")
    measured = measure_run(run, replace(quick, which="step:20"), device="cpu")
    assert measured.to_json()["weights"]["step"] == 20
    assert load_measurements(run) == {"train@step-20": measured}
    assert "; weights after step 20, " in described(measured)


def test_a_finished_run_without_its_last_checkpoint_says_so(run):
    shutil.rmtree(run / "checkpoint" / "step-000030")
    with pytest.raises(
        RunError, match="missing the last checkpoint, after step 30; intact: step 20"
    ):
        load_model(run, "last")
    (run / "state").write_text("planned")  # killed, say: then it is the last
    assert load_model(run, "last").step == 20


def test_a_checkpoint_under_another_name_is_damage(run):
    (run / "checkpoint" / "step-000020").rename(run / "checkpoint" / "step-000025")
    with pytest.raises(RunError, match=r"is broken \(it belongs to step 20\)"):
        load_model(run, "step:25")


@pytest.mark.parametrize("which", ["first", "step:", "step:-1", "step:x", "step:30\n", "Best", ""])
def test_which_is_one_of_three(run, which):
    with pytest.raises(UserError, match="expected last, best, or step:N"):
        load_model(run, which)


def test_training_still_goes_on_from_the_checkpoint_before(run, caplog):
    records = RunDirectory(run).records()
    (run / "state").write_text("planned")
    damage(run)
    again = train(RunDirectory(run).config(), run, resume=True)
    assert "damaged" in caplog.text
    assert [record["step"] for record in again] == [record["step"] for record in records]


def reindex(folder, change):
    """Changes a checkpoint's index and makes its checksum true again."""
    index = json.loads((folder / "state.json").read_text())
    del index["checksum"]
    change(index)
    digest = checkpoint._digest(checkpoint._dump(index))
    (folder / "state.json").write_bytes(checkpoint._dump({**index, "checksum": digest}))


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "..", "a\0b", ""])
def test_an_index_names_files_of_its_own_folder_only(run, name):
    (run / "secret").write_bytes(save_tensors({"w": torch.zeros(1)}))
    folder = run / "checkpoint" / "step-000030"

    def name_it(index):
        index["files"][name] = checkpoint._digest((run / "secret").read_bytes())

    reindex(folder, name_it)
    with pytest.raises(checkpoint.Damaged, match="is not the name of a file"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(step="x"),
        lambda index: index.update(files={}),
        lambda index: index.update(files=[]),
        lambda index: index.update(state={"$tensor": "none", "stride": []}),
        lambda index: index.update(state={"$dict": 5}),
    ],
)
def test_an_index_of_somebody_else_is_damage(run, change):
    folder = run / "checkpoint" / "step-000030"
    reindex(folder, change)
    with pytest.raises(checkpoint.Damaged):
        checkpoint.load(folder)


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
def test_a_fifo_in_a_checkpoint_is_damage(run, name):
    file = run / "checkpoint" / "step-000030" / name
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(RunError, match=f"{name}: not a plain file; intact: step 20"):
        load_model(run, "last")


@pytest.mark.parametrize("name", ["config.json", "data.json", "records.jsonl", "state"])
def test_a_fifo_in_a_run_is_not_waited_for(run, name):
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(OSError, match="not a plain file"):
        load_model(run, "last")


def test_the_weights_of_another_model_are_told(run):
    facts = json.loads((run / "data.json").read_text())
    (run / "data.json").write_text(json.dumps({**facts, "classes": ["a", "b"]}))
    with pytest.raises(RunError, match="not a checkpoint of this run"):
        load_model(run)
    (run / "data.json").write_text("[]")
    with pytest.raises(UserError, match="is damaged: no valid dataset, classes"):
        load_model(run)


def test_a_changed_record_is_told_by_its_line(run):
    directory = RunDirectory(run)
    records = directory.records()
    lines = directory.records_file.read_bytes().split(b"\n")
    assert all(KEY.encode() in line for line in lines[:-1])
    assert not any(KEY in record for record in records)
    changed = lines[1].replace(b'"accuracy": 0.', b'"accuracy": 0.1', 1)
    directory.records_file.write_bytes(b"\n".join([lines[0], changed, *lines[2:]]))
    with pytest.raises(RunError, match=r"line 2 is damaged: .* match its checksum\. Restore"):
        directory.records()
    directory.records_file.write_bytes(b"\n".join(lines[:-1]) + b"\x0b")  # a flipped newline
    with pytest.raises(RunError, match=f"line {len(records)} is damaged: its end is missing"):
        directory.records()
    older = [json.dumps(record).encode() for record in records]
    directory.records_file.write_bytes(b"\n".join([*older, b""]))
    assert directory.records() == records


def test_the_lock_is_not_a_way_to_other_files(run, tmp_path):
    (tmp_path / "mine").write_text("keep")
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"\.lock is a link.*remove it"):
        train(RunDirectory(run).config(), run, resume=True)
    (run / ".lock").unlink()
    os.mkfifo(run / ".lock")
    with pytest.raises(UserError, match="not a regular file"):
        train(RunDirectory(run).config(), run, resume=True)
    (run / ".lock").unlink()
    (run / ".lock").write_text("keep")
    train(RunDirectory(run).config(), run, resume=True)
    assert (run / ".lock").read_text() == "keep"
    assert (tmp_path / "mine").read_text() == "keep"


def test_log_lines_hold_no_control_codes(run):
    with RunDirectory(run).logging():
        logging.getLogger("steppe").warning("a domain called %s", "\x1b[31mred\x07")
    assert (run / "log.txt").read_text().endswith(r"a domain called \x1b[31mred\x07" + "\n")
