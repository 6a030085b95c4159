"""Folders that somebody else made, disks that are full, readers that have seen enough."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steppe.cli import app
from steppe.errors import UserError
from steppe.reports import build_report, load_runs, write
from steppe.sealed import seal
from tests.reports.trees import config, record, write_run

TARGETS = ("sketch",)


def lines(steps=(0, 100)):
    return [record(step, TARGETS, lambda domain, part: 0.5) for step in steps]


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def steppe(*words, **options):
    """The command line in a process of its own, and what it said."""
    command = [sys.executable, "-m", "steppe", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", **options)


@pytest.mark.parametrize("make", [fifo, device])
@pytest.mark.parametrize("name", ["config.json", "records.jsonl", "state"])
def test_what_is_no_plain_file_is_named_and_not_read(tmp_path, name, make):
    bad = write_run(tmp_path / "bad", config(TARGETS), lines())
    (bad / name).unlink()
    make(bad / name)
    write_run(tmp_path / "good", config(TARGETS), lines())
    loaded = load_runs(tmp_path)
    assert loaded.problems == (f"{bad / name}: not a plain file",)
    assert "good" in [run.path.name for run in loaded.runs]


def test_a_report_of_nothing_but_devices_says_so(tmp_path):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "config.json")
    with pytest.raises(
        UserError, match="none of the runs has a record yet .*config.json: not a plain"
    ):
        write(build_report(load_runs(tmp_path)), "terminal")


def test_a_measurement_that_is_no_plain_file_is_named(tmp_path):
    run = write_run(tmp_path / "run", config(TARGETS), lines())
    (run / "curvature").mkdir()
    os.mkfifo(run / "curvature" / "train.json")
    report = build_report(load_runs(tmp_path))
    assert f"{run / 'curvature' / 'train.json'} cannot be read: not a plain file" in report.problems


def test_a_line_that_differs_from_its_checksum_is_unreadable(tmp_path):
    sealed = [seal(json.dumps(line)) for line in lines((0, 100, 200))]
    old = json.dumps(lines((300,))[0]).encode()
    wrong = sealed[1].replace(b"0.5", b"0.7", 1)
    write_run(
        tmp_path / "run", config(TARGETS), b"\n".join([sealed[0], wrong, sealed[2], old, b""])
    )
    loaded = load_runs(tmp_path)
    assert [r.step for r in loaded.runs[0].records] == [0, 200, 300]
    assert "1 unreadable line (2)" in loaded.problems[0]


def test_a_name_that_is_not_utf8_can_be_reported(tmp_path):
    name = os.fsdecode(b"\xff\xfed")
    found = [record(0, (name,), lambda domain, part: 0.5, domains=(name, "b"))]
    write_run(tmp_path / "run", config((name,)), found)
    (run,) = load_runs(tmp_path).runs
    assert run.targets == (r"\udcff\udcfed",)
    assert (r"\udcff\udcfed", "test") in run.records[0].accuracy
    for form in ("terminal", "markdown", "latex", "csv", "json", "html"):
        result = CliRunner().invoke(app, ["report", str(tmp_path), "--format", form])
        assert result.exit_code == 0, result.output
        assert "udcff" in result.stdout


def test_names_reach_the_terminal_without_control_codes(tmp_path):
    name = "\x1b[31mred\x07"
    found = [record(0, (name,), lambda domain, part: 0.5, domains=(name, "b"))]
    write_run(tmp_path / "run", config((name,), dataset="\x1b]0;title\x07"), found)
    write_run(tmp_path / "\x1b[31mbad", config((name,)), b"{\n")
    for form in ("terminal", "markdown", "latex", "csv", "json"):
        result = CliRunner().invoke(app, ["report", str(tmp_path), "--format", form])
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout + result.stderr
        assert "\x07" not in result.stdout + result.stderr


def small_files():
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


@pytest.mark.parametrize("option", ["--out", "--best"])
def test_a_failed_write_leaves_the_old_report(tmp_path, option):
    runs = [write_run(tmp_path / str(i), config(TARGETS, trial=i), lines()) for i in range(20)]
    (tmp_path / "old").write_text("old")
    words = ("report", *runs, "--format", "html", option, tmp_path / "old")
    result = steppe(*words, preexec_fn=small_files)
    assert result.returncode == 2
    assert result.stderr == f"steppe: {tmp_path / 'old'}: File too large\n"
    assert (tmp_path / "old").read_text() == "old"
    assert not list(tmp_path.glob(".old*"))


def test_a_report_that_cannot_be_made_leaves_no_file(tmp_path):
    result = steppe("report", tmp_path / "none", "--out", tmp_path / "r.html")
    assert result.returncode == 2
    assert not (tmp_path / "r.html").exists()
    result = steppe("report", tmp_path, "--out", tmp_path)
    assert (result.returncode, result.stderr) == (2, f"steppe: {tmp_path}: Is a directory\n")


def test_a_full_standard_output_is_one_line(tmp_path):
    write_run(tmp_path / "run", config(TARGETS), lines())
    command = [sys.executable, "-m", "steppe", "report", str(tmp_path)]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode
    assert result.stderr.startswith("steppe: ")
    assert result.stderr.endswith(": No space left on device\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("runs", [1, 40])  # what fits into a buffer, and what does not
def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path, runs):
    for i in range(runs):
        write_run(tmp_path / str(i), config(TARGETS, trial=i, dataset=f"d{i}"), lines())
    command = [sys.executable, "-m", "steppe", "report", str(tmp_path), "--format", "json"]
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert result.stderr == ""
    assert result.returncode == 1


def test_names_in_a_csv_file_stay_as_they_are(tmp_path):
    odd = "a\u00a0b\x1b"
    write_run(tmp_path / "run", config((odd,)), [record(0, (odd,), lambda domain, part: 0.5)])
    assert odd in write(build_report(load_runs(tmp_path)), "csv")
    shown = CliRunner().invoke(app, ["report", str(tmp_path), "--format", "csv"])
    assert r"a b\x1b".encode().decode("unicode_escape")[:-4] in shown.stdout
    assert "\x1b" not in shown.stdout
