"""Reading runs: what makes two of them the same choice, and files that are damaged."""

import json
import random
import re
import tempfile
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import Field

from steppe.errors import UserError
from steppe.reports import SELECTIONS, build_report, load_runs
from steppe.reports.report import rerunnable
from steppe.reports.selection import leave_one_out
from steppe.training import RunConfig, export_run, make_config, train
from steppe.training.config import MACHINE
from tests.reports.trees import DOMAINS, config, lines_of, record, some_sweep, write_run

TARGETS = ("sketch",)


def records(steps=(0, 100, 200)):
    return [record(s, TARGETS, lambda d, p, s=s: 0.1 + s / 1000) for s in steps]


def load_one(folder):
    (run,) = load_runs(folder).runs
    return run


def test_a_run_is_its_config_and_records(tmp_path):
    write_run(tmp_path / "a", config(TARGETS, 2, 3), records())
    run = load_one(tmp_path)
    assert (run.dataset, run.targets, run.trial, run.choice) == ("PACS", TARGETS, 2, "draw 3")
    assert (run.row.name, run.steps, run.space, run.state) == ("adam", 301, "fad", "done")
    assert run.hparams == {"batch_size": 32, "lr": 1e-3}
    assert [r.step for r in run.records] == [0, 100, 200]
    assert run.records[1].accuracy["sketch", "test"] == 0.2
    assert ("sketch", "val") not in run.records[1].accuracy


def test_old_configs_and_unknown_names_are_read(tmp_path):
    old = config("75", dataset="Mine", averaging="none", algorithm="Own", draw=None)
    old["targets"] = "75,15"
    del old["steps"]
    write_run(tmp_path / "a", old, records())
    run = load_one(tmp_path)
    assert (run.row, run.targets, run.steps) == (("Own", "adam", "none"), ("75", "15"), 201)


def choices(tmp_path, *configs):
    for number, one in enumerate(configs):
        write_run(tmp_path / str(number), one, records())
    return [run.choice for run in load_runs(tmp_path).runs]


def test_choices_are_told_apart_by_options_and_not_by_seeds(tmp_path):
    same = [
        config(TARGETS),
        config(TARGETS, trial=1, seed=5, device="cuda:1", workers=3, loggers=["wandb"]),
        config(("photo",), averaging="none", root="/data"),
    ]
    other = [
        config(TARGETS, optimizer={"name": "adam", "lr": 1e-4}),
        config(TARGETS, batch_size=16),
        config(TARGETS, algorithm={"name": "ERM", "x": 1}),
        config(TARGETS, steps=5),
    ]
    found = choices(tmp_path, *same, *other)
    assert len(set(found[:3])) == 1
    assert len(set(found[2:])) == 5
    assert all(len(choice) == 8 for choice in found)


def test_runs_that_differ_in_the_machine_alone_are_matched_by_leave_one_out(tmp_path):
    """One of the runs that hold out a second domain had its images on the device."""
    for other in (d for d in DOMAINS if d not in TARGETS):
        targets = (*TARGETS, other)
        data = "device" if other == "photo" else "host"
        found = [record(0, targets, lambda d, p: 0.5)]
        write_run(tmp_path / other, config(targets, data=data), found)
    write_run(tmp_path / "alone", config(TARGETS, data="auto"), records())
    chosen = leave_one_out(load_runs(tmp_path).runs, frozenset(TARGETS))
    assert chosen is not None
    assert (chosen.run.path.name, chosen.step, chosen.validation) == ("alone", 0, 0.5)


@pytest.mark.parametrize("mark", [MACHINE, None])
def test_a_new_key_of_the_machine_needs_no_more_than_its_mark(tmp_path, monkeypatch, mark):
    class Extended(RunConfig):
        rack: str = Field("left", json_schema_extra=mark)

    for module in ("config", "complete"):
        monkeypatch.setattr(f"steppe.training.{module}.RunConfig", Extended)
    digits = {"dataset": "RotatedDigits", "targets": ["75"], "device": "cpu", "steps": 1}
    one, other = (make_config({**digits, "rack": rack}) for rack in ("left", "right"))
    train(one, tmp_path / "one")
    train(other, tmp_path / "other")
    marked = mark is not None
    same, rest = load_runs(tmp_path).runs
    assert (same.choice == rest.choice) is marked
    assert ("rack" not in rerunnable(same)) is marked
    exported = export_run(tmp_path / "one", tmp_path / "weights.safetensors")
    assert ("rack" not in json.loads(exported["config"])) is marked
    with nullcontext() if marked else pytest.raises(UserError, match="rack='left', not 'right'"):
        train(other, tmp_path / "one", resume=True)


def test_runs_are_found_wherever_finished_ones_lie(tmp_path):
    for place in ("x", "runs/NAME/result", "deep/er/est"):
        write_run(tmp_path / place, config(TARGETS), records())
    for place in ("runs/NAME/attempt-2", "x/checkpoint/y", "runs/OTHER/attempt-1/result"):
        write_run(tmp_path / place, config(TARGETS), records())
    (tmp_path / "runs" / "NAME" / "config.json").write_text(json.dumps(config(TARGETS)))
    loaded = load_runs(tmp_path)
    names = [str(run.path.relative_to(tmp_path)) for run in loaded.runs]
    assert names == ["deep/er/est", "runs/NAME/result", "x"]
    assert (loaded.problems, loaded.pending) == ((), ())
    files = [tmp_path / "x" / "records.jsonl", str(tmp_path / "deep"), tmp_path / "x"]
    assert [run.path.name for run in load_runs(files).runs] == ["est", "x"]


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        load_runs(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", ""),
        ("[]", "expected a JSON object"),
        ("\xff", ""),
        ("[" * 100_000, ""),
        ('{"targets": ["a"]}', "no dataset"),
        ('{"dataset": "PACS", "targets": []}', "no targets"),
        (
            '{"dataset": "PACS", "targets": ["a", 1]}',
            "targets must be names of domains, got ['a', 1]",
        ),
        (
            '{"dataset": "PACS", "targets": ["a"], "trial_seed": "x"}',
            "trial_seed must be an integer, got 'x'",
        ),
        ('{"dataset": "PACS", "targets": ["a"], "optimizer": 3}', "optimizer must be a name"),
        (
            '{"dataset": "PACS", "targets": ["a"], "optimizer": {"name": 3}}',
            "optimizer must be a name",
        ),
    ],
)
def test_a_damaged_config_is_named_and_the_others_are_read(tmp_path, text, says):
    write_run(tmp_path / "bad", {}, records())
    (tmp_path / "bad" / "config.json").write_bytes(text.encode("latin-1"))
    write_run(tmp_path / "good", config(TARGETS), records())
    loaded = load_runs(tmp_path)
    assert [run.path.name for run in loaded.runs] == ["good"]
    (problem,) = loaded.problems
    assert problem.startswith(str(tmp_path / "bad" / "config.json"))
    assert says in problem


WRONG_LINES = [
    b"{",
    b"null",
    b"3",
    b"[1]",
    b"\xff\xfe",
    b"{}",
    b'{"step": "x", "domains": {}}',
    b'{"step": true, "domains": {}}',
    b'{"step": -1, "domains": {}}',
    b'{"step": 1, "domains": []}',
    b'{"step": 1, "domains": {"a": {"val": 3}}}',
    b'{"step": 1, "domains": {"a": {"val": {"accuracy": null}}}}',
    b'{"step": 1, "domains": {"a": {"val": {"accuracy": NaN}}}}',
    b'{"step": 1, "domains": {"a": {"val": {"accuracy": true}}}}',
    b'{"step": 1, "domains": {"a": {"val": {"accuracy": 1.5}}}}',
    b'{"step": 1, "domains": {"a": {"val": {"accuracy": -0.1}}}}',
    b'{"step": 1, "domains": {"a": {"val": {"accuracy": 1%s}}}}' % (b"0" * 400),
]


def test_unreadable_lines_are_counted_and_named(tmp_path):
    data = b"\n".join(WRONG_LINES) + b"\n\n" + b"".join(lines_of(records()))
    write_run(tmp_path / "a", config(TARGETS), data)
    loaded = load_runs(tmp_path)
    assert loaded.problems == (
        f"{tmp_path / 'a' / 'records.jsonl'}: 17 unreadable lines (1, 2, 3, 4, 5, ...)",
    )
    assert [r.step for r in loaded.runs[0].records] == [0, 100, 200]


def test_a_cut_line_is_damage_once_the_run_is_done(tmp_path):
    data = b"".join(lines_of(records())) + b'{"step": 30'
    write_run(tmp_path / "a", config(TARGETS), data)
    write_run(tmp_path / "b", config(TARGETS), data, state="running")
    loaded = load_runs(tmp_path)
    assert loaded.problems == (f"{tmp_path / 'a' / 'records.jsonl'}: 1 unreadable line (4)",)
    assert [len(run.records) for run in loaded.runs] == [3, 3]


def test_a_run_counts_once_however_it_is_reached(tmp_path):
    folder = write_run(tmp_path / "a", config(TARGETS), records())
    (tmp_path / "link").symlink_to(folder)
    given = [folder, tmp_path / "link", tmp_path / "a" / ".." / "a" / "config.json"]
    assert [run.path for run in load_runs(given).runs] == [folder]


@pytest.mark.parametrize("name", ["", "notes.txt"])
def test_a_folder_without_runs_is_an_error(tmp_path, name):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match=r"no run \(config\.json\) found at or below"):
        load_runs(tmp_path / name)


def test_runs_of_different_lengths_are_pointed_out(tmp_path):
    choices(tmp_path, config(("sketch",), steps=301), config(("sketch",), steps=1001))
    said = "PACS: runs differ in length (301, 1,001 updates)"
    assert said in build_report(load_runs(tmp_path)).problems


def test_methods_with_fewer_runs_are_pointed_out(tmp_path):
    def write(optimizer, target, trial):
        own = config((target,), trial, optimizer={"name": optimizer, "lr": 0.1})
        write_run(tmp_path / f"{optimizer}-{target}-{trial}", own, records())

    for where in product(("sgd", "adam"), ("sketch", "photo"), (0, 1)):
        write(*where)
    assert not any("trials" in text for text in build_report(load_runs(tmp_path)).problems)
    for target, trial in (("sketch", 0), ("sketch", 1), ("photo", 0)):
        write("fad", target, trial)
    said = "PACS: methods differ in the number of targets times trials (3: fad; 4: adam, sgd)"
    assert said in build_report(load_runs(tmp_path)).problems


@pytest.mark.parametrize("draw", [None, 3])
def test_sources_are_part_of_the_choice(tmp_path, draw):
    """A run that holds out one of them as well is of the same choice."""
    found = choices(
        tmp_path,
        config(("sketch",), draw=draw),
        config(("sketch",), draw=draw, sources=["photo", "cartoon"]),
        config(("sketch", "photo"), draw=draw, sources=["cartoon"]),
        config(("sketch",), draw=draw, sources=["photo", "art_painting"]),
    )
    assert found[1] == found[2]
    assert len(set(found)) == 3
    assert any("different source domains" in p for p in build_report(load_runs(tmp_path)).problems)


def test_the_last_line_of_a_step_counts(tmp_path):
    again = record(100, TARGETS, lambda d, p: 0.9)
    write_run(tmp_path / "a", config(TARGETS), [*records(), again])
    run = load_one(tmp_path)
    assert [r.accuracy["sketch", "test"] for r in run.records] == [0.1, 0.9, 0.30000000000000004]


def tables_of(runs):
    """The tables of all selections, from folders with names drawn at random."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (one, data) in runs.items():
            write_run(Path(folder) / name, one, data, state="running")
        loaded = load_runs(folder)
        found = [build_report(loaded, s).to_json()["tables"] for s in SELECTIONS]
        return found, loaded


@settings(max_examples=10)
@given(st.randoms(use_true_random=False), st.integers(0, 5))
def test_order_repetition_and_garbage_change_no_table(rng, seed):
    sweep = some_sweep(seed, trials=1, draws=2)
    plain, _ = tables_of({f"{i:03}": (c, r) for i, (c, r) in enumerate(sweep)})
    spoiled, garbage = {}, 0
    names = rng.sample(range(1000), len(sweep))
    for name, (one, found) in zip(names, sweep, strict=True):
        lines = lines_of(found)
        lines += rng.choices(lines, k=2)
        wrong = rng.sample(WRONG_LINES, k=rng.randint(0, 2))
        garbage += len(wrong)
        lines += [line + b"\n" for line in wrong]
        rng.shuffle(lines)
        whole = lines_of(found)[0]
        cut = whole[: rng.randrange(len(whole) - 1)]
        spoiled[str(name)] = (one, b"".join(lines) + cut)
    tables, loaded = tables_of(dict(rng.sample(list(spoiled.items()), len(spoiled))))
    assert tables == plain
    named = [re.search(r": (\d+) unreadable line", problem) for problem in loaded.problems]
    assert sum(int(found[1]) for found in named) == garbage


@settings(max_examples=10)
@given(st.data(), st.integers(0, 5))
def test_a_cut_file_is_the_file_without_the_line(data, seed):
    sweep = some_sweep(seed, sizes=(1,), trials=1, draws=2)
    cut, whole = {}, {}
    for i, (one, found) in enumerate(sweep):
        text = b"".join(lines_of(found))
        at = data.draw(st.integers(0, len(text)))
        # A line that lacks no more than its end is whole.
        n = (text[:at] + (b"\n" if text[at : at + 1] == b"\n" else b"")).count(b"\n")
        cut[str(i)], whole[str(i)] = (one, text[:at]), (one, found[:n])
    (tables, loaded), (expected, _) = tables_of(cut), tables_of(whole)
    assert tables == expected
    assert loaded.problems == ()


@settings(max_examples=8)
@given(st.integers(0, 5), st.floats(0, 1))
def test_missing_runs_touch_only_their_own_cells(seed, share):
    """Any subset of a sweep has tables; a trial that lost nothing keeps its numbers."""
    rng = random.Random(seed)
    sweep = some_sweep(seed, trials=2, draws=2, optimizers=("adam", "fad"))
    lost = [c["optimizer"]["name"] == "adam" and rng.random() < share for c, _ in sweep]
    left = {str(i): own for i, own in enumerate(sweep) if not lost[i]}
    full, _ = tables_of({str(i): own for i, own in enumerate(sweep)})
    found, _ = tables_of(left)
    for before, after in zip(full, found, strict=True):
        rows = [{r["optimizer"]: r for r in t[0]["rows"]} for t in (before, after)]
        assert rows[0]["fad"] == rows[1]["fad"]
        if "adam" in rows[1]:
            for column, cell in rows[1]["adam"]["cells"].items():
                assert cell is None or cell["n"] <= rows[0]["adam"]["cells"][column]["n"]
            missing = None in rows[1]["adam"]["cells"].values()
            assert (rows[1]["adam"]["avg"] is None) == missing
        else:
            assert not any(c["optimizer"]["name"] == "adam" for c, _ in left.values())
