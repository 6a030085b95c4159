"""Imported DomainBed results: its tables digit for digit, and files that are not as they should."""

import itertools
import json
import random

import pytest

from steppe.algorithms import algorithm_names
from steppe.errors import UserError
from steppe.reports import (
    across_datasets,
    best_configs,
    build_report,
    dataset_tables,
    import_domainbed,
    load_runs,
)
from steppe.training import RunConfig, read_config
from tests.reports import reference

DATASETS = {
    "PACS": ("art_painting", "cartoon", "photo", "sketch"),
    "Debug28": ("env0", "env1", "env2"),
}


def line(dataset, algorithm, tests, trial, draw, step, accuracy, n_domains):
    scores = {f"env{i}_{part}_acc": accuracy() for i in range(n_domains) for part in ("in", "out")}
    return {
        **scores,
        "env0_uda_acc": 0.5,
        "step": step,
        "epoch": step / 10,
        "loss": 0.25,
        "step_time": 0.125,
        "mem_gb": 2.0,
        "args": {
            "dataset": dataset,
            "algorithm": algorithm,
            "test_envs": tests,
            "trial_seed": trial,
            "hparams_seed": draw,
            "seed": 7,
            "steps": None,
            "checkpoint_freq": None,
        },
        "hparams": {
            "lr": 5e-5,
            "weight_decay": 0.0,
            "batch_size": 32,
            "resnet_dropout": 0.1,
            "data_augmentation": True,
            "irm_lambda": 100.0,
            "irm_penalty_anneal_iters": 500,
        },
    }


def results(seed):
    """Lines of a sweep by folder: ties, missing and unfinished runs."""
    rng = random.Random(seed)
    grid = [0.1, 0.2, 0.3, 0.6, 0.7] if seed % 2 else [rng.random() for _ in range(400)]
    found = {}
    for (dataset, domains), algorithm in itertools.product(DATASETS.items(), ("ERM", "IRM", "My")):
        n = len(domains)
        sets = [list(s) for size in (1, 2) for s in itertools.combinations(range(n), size)]
        for tests, trial, draw in itertools.product(sets, range(3), range(4)):
            # Half of the sweeps are whole, so that leave-one-out has something to choose.
            if seed % 4 > 1 and rng.random() < 0.1:
                continue
            rng.shuffle(tests)
            steps = range(0, 300 if rng.random() < 0.9 else 200, 100)
            folder = f"{rng.getrandbits(64):x}"
            found[folder] = [
                line(dataset, algorithm, tests, trial, draw, step, lambda: rng.choice(grid), n)
                for step in steps
            ]
    if seed % 4 > 1:  # a domain that was never finished: no cell, no average
        for folder, lines in list(found.items()):
            args = lines[0]["args"]
            if (args["algorithm"], args["dataset"], args["test_envs"]) == ("IRM", "PACS", [2]):
                del found[folder]
    return found


def write(root, found):
    for folder, lines in found.items():
        (root / folder).mkdir(parents=True)
        text = "".join(json.dumps(r, sort_keys=True) + "\n" for r in lines)
        (root / folder / "results.jsonl").write_text(text)
        if len(lines) == 3:
            (root / folder / "done").write_text("done")


@pytest.mark.parametrize("seed", range(4))
def test_tables_are_domainbeds(tmp_path, seed):
    found = results(seed)
    write(tmp_path / "src", found)
    imported = import_domainbed(tmp_path / "src", tmp_path / "dst")
    assert (imported.n, imported.problems) == (len(found), ())
    loaded = load_runs(tmp_path / "dst")
    lines = [r for folder in sorted(found) for r in found[folder]]
    n_missing = 0
    for selection in reference.RULES:
        tables = {table.dataset: table for table in dataset_tables(loaded.runs, selection)}
        assert set(tables) == set(DATASETS)
        for dataset, domains in DATASETS.items():
            expected = reference.table(lines, selection, dataset, len(domains))
            assert tables[dataset].columns == domains
            assert {row.row.algorithm for row in tables[dataset].rows} == set(expected)
            for row in tables[dataset].rows:
                cells, average = expected[row.row.algorithm]
                for domain, cell in zip(domains, cells, strict=True):
                    ours = row.cells[domain]
                    n_missing += cell is None
                    # The order of trials is the file system's in DomainBed: a rounding apart.
                    assert (ours and ours[:3]) == (cell and pytest.approx(cell, rel=1e-12))
                shown = row.average and row.average.mean
                assert shown == (average and pytest.approx(average, rel=1e-12))
        expected = reference.averages(lines, selection)
        for row in across_datasets(loaded.runs, selection).rows:
            for dataset, cell in row.cells.items():
                key = (row.row.algorithm, dataset)
                assert (cell is None) == (key not in expected)
                assert cell is None or cell[:2] == pytest.approx(expected[key], rel=1e-12)
    assert (n_missing > 0) == (seed > 1)


def test_the_reference_is_sensitive_to_the_rules(tmp_path):
    """The generated sweeps tell the rules apart, and one tie-break from another."""
    lines = [r for own in results(1).values() for r in own]
    found = [reference.accuracies(lines, selection) for selection in reference.RULES]
    assert found[0] != found[1] != found[2] != found[0]
    mirrored = [
        {**r, "args": {**r["args"], "hparams_seed": -r["args"]["hparams_seed"]}} for r in lines
    ]
    for selection, own in zip(reference.RULES, found, strict=True):
        assert reference.accuracies(mirrored, selection) != own


def small(tmp_path, folders=("a",)):
    found = {
        folder: [line("PACS", "IRM", [3], 1, 2, s, lambda: 0.5, 4) for s in (0, 100, 200)]
        for folder in folders
    }
    write(tmp_path / "src", found)
    return tmp_path / "src", tmp_path / "dst"


def test_a_run_keeps_what_domainbed_says_about_it(tmp_path):
    src, dst = small(tmp_path)
    import_domainbed(src, dst)
    (run,) = load_runs(dst).runs
    assert (run.dataset, run.targets, run.row) == ("PACS", ("sketch",), ("IRM", "adam", "none"))
    assert (run.trial, run.draw, run.choice, run.steps) == (1, 2, "draw 2", 201)
    assert (run.state, run.space) == ("done", "domainbed")
    assert run.hparams["irm_lambda"] == 100.0
    assert run.records[0].accuracy["photo", "val"] == 0.5
    assert run.records[0].seconds_per_step == 0.125
    assert set(run.records[0].loss) == {"loss"}


def test_a_chosen_import_can_be_run_again(tmp_path):
    src, dst = small(tmp_path)
    import_domainbed(src, dst)
    (best,) = best_configs(load_runs(dst).runs)
    own = {k: v for k, v in best["config"].items() if k in RunConfig.model_fields}
    assert set(best["config"]) - set(own) <= {"draw", "space"}
    (tmp_path / "best.json").write_text(json.dumps(own))
    config = read_config(tmp_path / "best.json")
    assert config.algorithm.options == {"penalty": 100.0, "anneal_steps": 500}
    assert (config.optimizer.options["lr"], config.batch_size, config.dropout) == (5e-5, 32, 0.1)
    assert (config.targets, config.trial_seed, config.steps) == (("sketch",), 1, 201)


def test_importing_again_changes_nothing(tmp_path):
    src, dst = small(tmp_path, ("a", "b"))
    import_domainbed(src, dst)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in dst.rglob("*") if p.is_file()}
    again = import_domainbed(src, dst)
    assert (again.n, again.problems) == (2, ())
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before}


def test_a_replaced_run_is_named_and_a_foreign_one_left_alone(tmp_path):
    src, dst = small(tmp_path, ("a", "b"))
    import_domainbed(src, dst)
    with (src / "a" / "results.jsonl").open("a") as file:
        file.write(json.dumps(line("PACS", "IRM", [3], 1, 2, 300, lambda: 0.5, 4)) + "\n")
    (dst / "b" / "config.json").write_text('{"dataset": "PACS", "targets": ["photo"]}')
    again = import_domainbed(src, dst)
    assert again.n == 1
    assert again.problems == (
        f"{dst / 'a'}: differed and was replaced",
        f"{dst / 'b'}: exists and was not imported from DomainBed; left unchanged",
    )
    assert "photo" in (dst / "b" / "config.json").read_text()
    assert len((dst / "a" / "records.jsonl").read_text().splitlines()) == 4


def test_unreadable_lines_are_counted_and_named(tmp_path):
    src, dst = small(tmp_path, ("a", "b", "attempt-1"))
    good = (src / "a" / "results.jsonl").read_text().splitlines()
    other = json.dumps(line("VLCS", "IRM", [3], 1, 2, 5, lambda: 0.5, 4))
    bad = ["{", "[]", "null", '"text"', other, good[0].replace("0.5", "NaN"), good[0][:-9]]
    (src / "a" / "results.jsonl").write_text("\n".join([bad[0], *good, *bad[1:]]))
    (src / "b" / "results.jsonl").write_text("no JSON at all\n")
    imported = import_domainbed(src, dst)
    assert imported.n == 2
    file = src / "a" / "results.jsonl"
    assert imported.problems[0] == f"{file}: 7 unreadable lines (1, 5, 6, 7, 8, ...)"
    assert [p for p in imported.problems if str(src / "b") in p] == [
        f"{src / 'b' / 'results.jsonl'}: 1 unreadable line (1)",
        f"{src / 'b' / 'results.jsonl'}: contains no run",
    ]
    runs = load_runs(dst).runs
    assert len(runs) == 2
    assert all([r.step for r in run.records] == [0, 100, 200] for run in runs)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"dataset": "PACS"', '"dataset": ""'), (": 0.5", ": 1.5"), (": 0.5", ": -0.5")],
)
def test_a_line_that_makes_no_sense_is_no_record(tmp_path, old, new):
    src, dst = small(tmp_path)
    file = src / "a" / "results.jsonl"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    imported = import_domainbed(src, dst)
    assert imported.n == 0
    assert imported.problems[0] == f"{file}: 3 unreadable lines (1, 2, 3)"


def test_an_imported_config_has_no_nan(tmp_path):
    src, dst = small(tmp_path)
    file = src / "a" / "results.jsonl"
    file.write_text(file.read_text().replace('"hparams": {', '"hparams": {"odd": NaN, '))
    assert import_domainbed(src, dst).problems == ()
    text = (dst / "a" / "config.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["imported"]["hparams"]["odd"] is None


def test_a_diverged_loss_is_no_reason_to_lose_the_line(tmp_path):
    src, dst = small(tmp_path)
    file = src / "a" / "results.jsonl"
    file.write_text(file.read_text().replace('"loss": 0.25', '"loss": NaN'))
    assert import_domainbed(src, dst).problems == ()
    (run,) = load_runs(dst).runs
    assert len(run.records) == 3
    assert run.records[0].loss == {}


def test_an_unfinished_run_counts_and_is_named(tmp_path):
    src, dst = small(tmp_path)
    (src / "a" / "done").unlink()
    import_domainbed(src, dst)
    report = build_report(load_runs(dst))
    assert report.tables[0].rows[0].cells["sketch"].n == 1
    assert [p for p in report.problems if "not finished" in p]


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir()])
def test_a_folder_without_results_is_an_error(tmp_path, make):
    make(tmp_path / "src")
    with pytest.raises(UserError, match="DomainBed's output"):
        import_domainbed(tmp_path / "src", tmp_path / "dst")


DOMAINBED = (
    *("ERM", "ERMPlusPlus", "Fish", "IRM", "GroupDRO", "Mixup", "MLDG", "CORAL", "MMD", "DANN"),
    *("CDANN", "MTL", "SagNet", "ARM", "VREx", "RSC", "SD", "ANDMask", "SANDMask", "IGA"),
    *("SelfReg", "Fishr", "TRM", "IB_ERM", "IB_IRM", "CAD", "CondCAD", "Transfer"),
    *("CausIRL_CORAL", "CausIRL_MMD", "EQRM", "RDM", "ADRMX", "URM"),
)
"""All of its algorithms, as it spells them."""


def test_every_name_of_domainbed_is_known(tmp_path):
    for name in DOMAINBED:
        found = line("PACS", name, [0], 0, 0, 0, lambda: 0.5, 4)
        (tmp_path / "src" / name).mkdir(parents=True)
        (tmp_path / "src" / name / "results.jsonl").write_text(json.dumps(found) + "\n")
    assert import_domainbed(tmp_path / "src", tmp_path / "dst").n == len(DOMAINBED)
    imported = {run.config["algorithm"]["name"] for run in load_runs(tmp_path / "dst").runs}
    assert imported == {name.replace("_", "-") for name in DOMAINBED}
    assert imported - set(algorithm_names()) == {"ERMPlusPlus"}  # a recipe


def test_options_are_imported_in_steppes_units(tmp_path):
    """DomainBed's second learning rate of EQRM is a number of its own, ours a factor."""
    found = line("PACS", "EQRM", [0], 0, 0, 0, lambda: 0.5, 4)
    found["hparams"] |= {"eqrm_lr": 2e-6, "eqrm_quantile": 0.9, "eqrm_burnin_iters": 700.5}
    (tmp_path / "src").mkdir()
    (tmp_path / "src/results.jsonl").write_text(json.dumps(found) + "\n")
    import_domainbed(tmp_path / "src", tmp_path / "dst")
    (run,) = load_runs(tmp_path / "dst").runs
    expected = {"name": "EQRM", "quantile": 0.9, "burn_in_steps": 700}
    assert run.config["algorithm"] == {**expected, "lr_factor": pytest.approx(0.04)}
