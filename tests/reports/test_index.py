"""The index of a sweep's runs changes how long a report takes, and nothing else."""

import errno
import json
import os
import random
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings, strategies as st

from steppe.reports import SELECTIONS, build_report, index, load_runs, runs
from steppe.reports.report import write
from steppe.sealed import seal
from tests.reports.trees import config, record, some_sweep, write_run

TICK = 0.02


@pytest.fixture(autouse=True)
def _small_and_fast(monkeypatch):
    monkeypatch.setattr(index, "LEAST", 1)
    monkeypatch.setattr(index, "_TICK", int(TICK * 1e9))


def sweep_at(root, n=None, **axes):
    (root / "runs").mkdir(parents=True)
    (root / "sweep.json").write_text("{}")
    for number, (settings_, records) in enumerate(some_sweep(0, **axes)[:n]):
        write_run(root / "runs" / f"run{number}" / "result", settings_, records)
    time.sleep(2 * TICK)
    return root


@contextmanager
def unindexed():
    with patch.object(runs, "PLAN", "no such file"):
        yield


@contextmanager
def counted():
    """The files whose records are read."""
    with patch.object(runs, "read_lines", wraps=runs.read_lines) as reading:
        yield reading.call_args_list


def reports(loaded):
    made = [build_report(loaded, rule) for rule in SELECTIONS] if loaded.runs else []
    texts = [json.loads(write(report, "json")) for report in made]
    return repr(loaded), [repr({**text, "made": ""}) for text in texts]


def test_only_runs_that_changed_are_read(tmp_path):
    root = sweep_at(tmp_path)
    load_runs(root)
    with counted() as read:
        before = load_runs(root)
    assert read == []
    assert len(before.runs) > 10
    with (root / "runs" / "run3" / "result" / "records.jsonl").open("a") as file:
        file.write(json.dumps(record(300, ("photo",), lambda d, p: 0.9)) + "\n")
    with counted() as read:
        after = load_runs(root)
    assert [call.args[0].parts[-3] for call in read] == ["run3"]
    assert [len(run.records) for run in after.runs if run not in before.runs] == [4]


def change(rng, root):
    """Change something that a report could miss, or damage the index."""
    results = sorted((root / "runs").glob("*/result"))
    folder = rng.choice(results)
    file, kept = folder / "records.jsonl", root / index.NAME
    data = file.read_bytes()

    def append():
        with file.open("a") as opened:
            opened.write(json.dumps(record(rng.randrange(400), ("photo",), lambda d, p: 0.9)))
            opened.write("\n" * rng.randrange(2))

    def edit():  # neither the size nor the time of the change shows it
        stat = file.stat()
        file.write_bytes(data.replace(b"0.3", b"0.4", rng.randrange(1, 9)))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def other_file():
        stat = file.stat()
        file.unlink()
        file.write_bytes(data.replace(b"0.1", b"0.6"))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def retry():
        shutil.rmtree(folder)
        shutil.copytree(rng.choice(results), folder)

    def swap():
        other = rng.choice([one for one in results if one != folder])
        for source, target in ((folder, "x"), (other, folder), ("x", other)):
            os.rename(root / source, root / target)

    def damage():
        old = bytearray(kept.read_bytes())
        old[rng.randrange(len(old))] ^= 1 << rng.randrange(8)
        kept.write_bytes(old)

    def forge():  # as a downloaded sweep could, but it cannot know the files' inodes
        lines = kept.read_bytes().split(b"\n")
        shutil.copytree(folder, folder.with_name("copy"))
        shutil.rmtree(folder)
        folder.with_name("copy").rename(folder)
        kept.write_bytes(b"\n".join(line.replace(b"0.7", b"0.8") for line in lines))

    changes = [
        append,
        edit,
        other_file,
        retry,
        swap,
        damage,
        forge,
        lambda: file.write_bytes(data[: rng.randrange(len(data) + 1)]),
        lambda: file.unlink(),
        lambda: (folder / "state").write_text(rng.choice(["done", "running", "\xff"])),
        lambda: (folder / "config.json").write_text(json.dumps(config(("photo",), draw=9))),
        lambda: (folder / "config.json").write_bytes(rng.choice([b"{", b"\xff", b""])),
        lambda: shutil.rmtree(folder.parent),
        lambda: kept.unlink(),
        lambda: kept.write_bytes(kept.read_bytes()[: rng.randrange(kept.stat().st_size)]),
        lambda: kept.write_bytes(b"\x93NUMPY" + rng.randbytes(100)),
        lambda: kept.write_bytes(seal('{"steppe": "0"}') + kept.read_bytes()),
    ]
    chosen = rng.choice(changes)
    if kept.exists() or chosen in changes[:5]:
        chosen()


@pytest.mark.parametrize("seed", range(3))
def test_reports_are_the_same_with_and_without_it(tmp_path, seed):
    rng = random.Random(seed)
    root = sweep_at(tmp_path / "sweep", draws=1)
    for _ in range(25):
        time.sleep(2 * TICK)
        with unindexed():
            plain = load_runs(root)
        for _ in range(2):  # the second reads what the first wrote
            assert reports(load_runs(root)) == reports(plain)
        for _ in range(rng.randrange(3)):
            if len(list((root / "runs").glob("*/result/records.jsonl"))) > 3:
                folders = list((root / "runs").glob("*/result"))
                for folder in folders:  # `change` needs every file
                    if not (folder / "records.jsonl").exists():
                        shutil.rmtree(folder.parent)
                change(rng, root)


NUMBERS = st.floats() | st.integers() | st.none() | st.booleans() | st.text(max_size=3)
TEXTS = st.text(max_size=5)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**65),
            st.dictionaries(TEXTS, st.floats(0, 1), min_size=1, max_size=3),
            st.dictionaries(TEXTS, NUMBERS, max_size=3),
            NUMBERS,
        ),
        max_size=4,
    )
)
def test_every_value_comes_back_as_it_was(found):
    lines = [
        {
            "step": step,
            "domains": {"photo": {part: {"accuracy": value} for part, value in scores.items()}},
            "loss": loss,
            "seconds_per_step": number,
            "memory_gb": number,
        }
        for step, scores, loss, number in found
    ]
    with tempfile.TemporaryDirectory() as home:
        root = sweep_at(Path(home) / "sweep", 1)
        write_run(root / "runs" / "x" / "result", config(("photo",)), lines)
        time.sleep(2 * TICK)
        with unindexed():
            plain = repr(load_runs(root))
        assert [repr(load_runs(root)) for _ in range(2)] == [plain, plain]


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("fails", ["replace", "tempfile.TemporaryFile"])
def test_a_sweep_that_cannot_be_written_is_reported(tmp_path, code, fails):
    root = sweep_at(tmp_path)
    with patch(f"steppe.reports.index.{fails}", side_effect=OSError(code, "no")) as write:
        assert len(load_runs(root).runs) > 10
    assert write.called
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []


def test_nothing_is_written_through_a_link(tmp_path):
    root, other = sweep_at(tmp_path / "sweep"), tmp_path / "precious"
    other.write_text("precious")
    (root / index.NAME).symlink_to(other)
    load_runs(root)
    assert other.read_text() == "precious"


def test_only_sweeps_of_many_runs_get_one(tmp_path, monkeypatch):
    write_run(tmp_path / "no sweep" / "a", *some_sweep(0)[0])
    time.sleep(2 * TICK)
    load_runs(tmp_path / "no sweep")
    root = sweep_at(tmp_path / "sweep")
    with monkeypatch.context() as few:
        few.setattr(index, "LEAST", 1000)
        load_runs(root)
    assert not list(tmp_path.rglob(f"*{index.NAME}*"))
    load_runs(root.parent)  # also from above
    assert (root / index.NAME).exists()


def test_files_that_may_still_change_unnoticed_are_not_indexed(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_TICK", 10**12)
    root = sweep_at(tmp_path)
    load_runs(root)
    assert not (root / index.NAME).exists()


def test_other_code_reads_the_runs_again(tmp_path):
    root = sweep_at(tmp_path)
    load_runs(root)
    with patch.object(runs, "__file__", __file__), counted() as read:
        load_runs(root)
    assert len(read) > 10
