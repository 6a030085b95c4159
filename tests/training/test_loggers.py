"""Loggers, with the real trackers: what was sent is read back from what they wrote."""

import json
import logging
import random
import struct
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np
import pytest

from steppe.errors import UserError
from steppe.training import loggers
from steppe.training.loggers import flatten, open_loggers

CONFIG = {"dataset": "PACS", "optimizer": {"name": "fad", "rho": 0.05}}
ACCURACY = "domains/photo/val/accuracy"


@pytest.fixture(autouse=True)
def _no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for folder in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{folder}_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "a run"
    path.mkdir()
    return path


def start(names, directory, resume=False):
    return open_loggers(names, directory, CONFIG, resume)


def read_tensorboard(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    tags = events.Tags()
    scalars = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]
    }
    texts = [
        event.tensor_proto.string_val[0].decode()
        for tag in tags["tensors"]
        for event in events.Tensors(tag)
    ]
    return scalars, texts


def log_entries(data, block=2**15):
    """The entries of a LevelDB log, which is what W&B keeps a run in, after 7 bytes of its own."""
    entry, at = b"", 7
    while at < len(data):
        if block - at % block < 7:  # too short for an entry's head: zeros up to the next block
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)  # after the checksum
        entry += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield entry
            entry = b""


def read_wandb(directory):
    """The run, its history as (step, values), and its exit code, for each start of the run."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process writes the last of a finished run a moment later
    starts = []
    for file in (directory / "wandb").glob("offline-run-*/*.wandb"):
        records = [Record.FromString(entry) for entry in log_entries(file.read_bytes())]
        history = []
        for record in records:
            if record.HasField("history"):
                items = record.history.item
                values = {item.nested_key[0]: json.loads(item.value_json) for item in items}
                step = values["_step"]
                history.append((step, {k: v for k, v in values.items() if k[0] != "_"}))
        (run,) = (record.run for record in records if record.HasField("run"))
        codes = [record.exit.exit_code for record in records if record.HasField("exit")]
        starts.append((run, history, codes))
    return sorted(starts, key=lambda start: start[0].start_time.ToNanoseconds())


def test_flatten_keeps_numbers_and_only_numbers():
    record = {
        "step": 300,
        "loss": {"total": np.float32(0.5), "nan": float("nan")},
        "domains": {"photo": {"val": {"accuracy": 0.9, "worst": None}}},
        "diverged": True,
        "note": "text",
        "shape": [1, 2],
    }
    flat = flatten(record)
    assert np.isnan(flat.pop("loss/nan"))
    assert flat == {"step": 300.0, "loss/total": 0.5, ACCURACY: 0.9}
    assert {type(value) for value in flat.values()} == {float}


def test_tensorboard_has_a_record_at_once_and_drops_what_is_sent_again(directory):
    killed = start(["tensorboard"], directory)
    killed.record(0, {ACCURACY: 0.125})
    killed.record(100, {ACCURACY: 0.25, "loss": 2.0})
    killed.record(200, {ACCURACY: 0.5, "loss": 1.0})
    (file,) = (directory / "tensorboard").iterdir()
    size = file.stat().st_size  # what a kill would leave
    scalars, texts = read_tensorboard(directory)
    assert scalars[ACCURACY] == [(0, 0.125), (100, 0.25), (200, 0.5)]
    assert [json.loads(text) for text in texts] == [CONFIG]
    assert file.stat().st_size == size

    resumed = start(["tensorboard"], directory, resume=True)
    resumed.record(100, {ACCURACY: 0.3125, "loss": 1.5})
    resumed.record(200, {ACCURACY: 0.625})
    resumed.close("done")
    scalars, _ = read_tensorboard(directory)
    assert scalars == {ACCURACY: [(0, 0.125), (100, 0.3125), (200, 0.625)], "loss": [(100, 1.5)]}
    killed.close("failed")


def test_wandb_resumes_the_same_run_and_drops_what_is_sent_again(directory):
    stopped = start(["wandb"], directory)
    stopped.record(100, {ACCURACY: 0.25})
    stopped.record(200, {ACCURACY: 0.5, "loss": 1.0})
    stopped.record(100, {ACCURACY: 0.75})
    stopped.close("running")
    time.sleep(1)  # W&B names its folders after the second they are made in
    resumed = start(["wandb"], directory, resume=True)
    resumed.record(200, {ACCURACY: 0.5})
    resumed.record(300, {ACCURACY: 0.75})
    resumed.close("done")
    anew = start(["wandb"], directory)
    anew.close("done")

    (first, history, codes), (second, later, later_codes), (third, _, _) = read_wandb(directory)
    assert first.run_id == second.run_id != third.run_id
    assert (first.display_name, first.project) == ("a run", "steppe")
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert {key: config[key] for key in CONFIG} == CONFIG
    assert history == [(100, {ACCURACY: 0.25}), (200, {ACCURACY: 0.5, "loss": 1.0})]
    assert later == [(200, {ACCURACY: 0.5}), (300, {ACCURACY: 0.75})]
    assert (codes, later_codes) == ([1], [0])


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow-skinny")
def test_mlflow_resumes_the_same_run_and_skips_what_is_sent_again(directory):
    killed = start(["mlflow"], directory)
    killed.record(100, {ACCURACY: 0.25, "art (1)": 1.0})
    killed.record(200, {ACCURACY: 0.5})
    resumed = start(["mlflow"], directory, resume=True)
    resumed.record(100, {ACCURACY: 0.25, "art (1)": 1.0})
    resumed.record(200, {ACCURACY: 0.5, "art (1)": 2.0})
    resumed.record(300, {ACCURACY: 0.75})

    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("steppe").experiment_id
    (run,) = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == ("a run", "RUNNING")
    assert run.data.params == {"dataset": "PACS", "optimizer/name": "fad", "optimizer/rho": "0.05"}

    def points(name):
        return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]

    assert points(ACCURACY) == [(100, 0.25), (200, 0.5), (300, 0.75)]
    assert points("art _1_") == [(100, 1.0), (200, 2.0)]
    for state, status in {"done": "FINISHED", "failed": "FAILED", "running": "KILLED"}.items():
        logger = start(["mlflow"], directory, resume=True)
        assert client.get_run(run.info.run_id).info.status == "RUNNING"
        logger.close(state)
        assert client.get_run(run.info.run_id).info.status == status


def test_a_tracker_is_imported_only_when_asked_for(directory):
    code = f"""if True:
        import sys
        from pathlib import Path
        from steppe.training.loggers import _BACKENDS, open_loggers
        print([name for name in _BACKENDS if name in sys.modules])
        open_loggers(["tensorboard"], Path({str(directory)!r}), {{}})
        print([name for name in _BACKENDS if name in sys.modules])
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.splitlines() == ["[]", "['tensorboard']"], result.stderr


def test_an_unknown_name_is_refused_before_anything_starts(directory):
    with pytest.raises(UserError, match="unknown logger 'wand', did you mean 'wandb'?"):
        start(["tensorboard", "wandb", "wand"], directory)
    assert list(directory.iterdir()) == []


def test_a_missing_package_names_the_extra(directory, monkeypatch):
    monkeypatch.setitem(loggers._BACKENDS, "not_here", loggers._WandB)
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'steppe\[loggers\]'") as caught:
            start(["not_here"], directory)
        assert caught.value.name == "not_here"
        # The second time with a folder of that name, as W&B makes one where it runs.
        (directory / "not_here").mkdir(exist_ok=True)
        monkeypatch.syspath_prepend(directory)


def test_a_failure_in_the_middle_is_told_once_and_stops_nothing(directory, caplog):
    (directory / "tensorboard").write_text("a file where the folder should be")
    opened = start(["tensorboard", "wandb"], directory)
    for step in (100, 200):
        opened.record(step, {ACCURACY: step / 1000})
    opened.close("done")
    (message,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    assert message.name == "steppe"
    assert "'tensorboard' failed" in message.getMessage()
    assert "File exists" in message.getMessage()
    ((_, history, _),) = read_wandb(directory)
    assert history == [(100, {ACCURACY: 0.1}), (200, {ACCURACY: 0.2})]


class Unreachable:
    """Draws from Python's generator before it gives up, as a client that waits to ask again."""

    refused = False

    def __init__(self, directory, config, resume):
        random.random()
        if self.refused:
            raise ConnectionError("refused")
        self.calls = []

    def record(self, step, values):
        self.calls.append(step)
        random.random()
        if step > 100:
            raise ConnectionError("gone")

    def close(self, state):
        self.calls.append(state)


def test_a_tracker_does_not_disturb_the_random_numbers_of_training(directory, monkeypatch, caplog):
    monkeypatch.setitem(loggers._BACKENDS, "tensorboard", Unreachable)
    before = random.getstate()
    logger = start(["tensorboard"], directory)
    backend = logger._open["tensorboard"]
    for step in (100, 200, 300):
        logger.record(step, {})
    logger.close("done")
    assert random.getstate() == before
    assert backend.calls == [100, 200]  # a server that is gone is not waited for again
    assert caplog.text.count("ConnectionError: gone") == 1


def test_a_failed_start_stops_a_new_run_and_not_a_resumed_one(directory, monkeypatch, caplog):
    monkeypatch.setitem(loggers._BACKENDS, "tensorboard", Unreachable)
    monkeypatch.setattr(Unreachable, "refused", True)
    with pytest.raises(UserError, match="'tensorboard' could not be started: .* refused"):
        start(["wandb", "tensorboard"], directory)
    ((_, _, codes),) = read_wandb(directory)
    assert codes == [1]  # what was started before is closed

    assert not start(["tensorboard"], directory, resume=True)._open
    assert "refused" in caplog.text
