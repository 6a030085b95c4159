"""Protocols: the runs that each plans, what it refuses, and the second phase of a search."""

import hashlib
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steppe.cli import listing
from steppe.domains import dataset_names, dataset_spec
from steppe.errors import UserError
from steppe.protocols import Protocol, Rule, plan, plan_winners, protocols
from steppe.protocols.planning import grids
from steppe.protocols.protocol import PLAN, register_protocol
from steppe.protocols.winners import carry_on
from steppe.reports import build_report, load_runs, select_runs
from steppe.reports.selection import pooled_validation
from steppe.sealed import KEY
from steppe.sweeps import Grid, Job, growing, jobs, look, read_plan, work, write_plan
from steppe.training import RunConfig, read_config
from tests.reports.trees import record, write_run

TINY = {
    "targets": Rule("15+60,30+75", "here"),
    "trials": Rule(1, "here"),
    "draws": Rule(2, "here"),
    "default_draw": Rule(False, "here"),
    "reruns": Rule(2, "here"),
    "space": Rule("yu2024", "here"),
    "selection": Rule("pooled-val", "here"),
    "steps": Rule(3, "here"),
}
DIGITS = {"datasets": ("RotatedDigits",), "options": {"device": "cpu"}}


@pytest.fixture
def tiny():
    protocol = register_protocol(Protocol("tiny", "two samples, the winner twice", "here", TINY))
    yield protocol
    protocols._table.pop("tiny", None)


def configs(protocol: str, **given: object) -> dict[str, RunConfig]:
    found = grids(protocols[protocol], given)
    return dict(run for grid in found for run in jobs(grid))


# What DomainBed-v2's generate_scripts.py, datasets.py and pretrain.json say, typed anew.
SINGLE = {"PACS": 4, "VLCS": 4, "OfficeHome": 4, "TerraIncognita": 4}
PAIRS = {
    "DomainNet": [("clipart", "infograph"), ("painting", "quickdraw"), ("real", "sketch")],
    "NICO++": [("autumn", "rock"), ("dim", "grass"), ("outdoor", "water")],
}
LENGTHS = {"DomainNet": (15000, 1000), "NICO++": (10000, 600)}


def uniform(draw: int, name: str, low: float, high: float) -> float:
    """The sample of a name under DomainBed's seeding, of the first split."""

    def md5(*args: object) -> int:
        return int(hashlib.md5(str(args).encode()).hexdigest(), 16) % 2**31

    return float(np.random.RandomState(md5(md5(draw, 0), name)).uniform(low, high))


def test_yu2024_plans_exactly_its_runs() -> None:
    datasets = (*SINGLE, *PAIRS)
    given = {"datasets": datasets, "algorithms": ("ERM", "CORAL"), "options": {"weights": "none"}}
    found = configs("yu2024", **given)
    assert len(found) == 10 * 2 * (4 + 4 + 4 + 4 + 3 + 3)
    wanted = set()
    for dataset in datasets:
        sets = PAIRS.get(dataset) or [(name,) for name in dataset_spec(dataset).domains]
        wanted |= set(itertools.product([dataset], sets, ["ERM", "CORAL"], range(1, 11)))
    places = {(c.dataset, c.targets, c.algorithm.name, c.draw) for c in found.values()}
    assert places == wanted
    for config in found.values():
        assert (config.steps, config.checkpoint_every) == LENGTHS.get(config.dataset, (5000, 300))
        assert (config.trial_seed, config.batch_size, config.dropout) == (0, 32, 0.0)
        assert (config.weights, config.freeze_bn, config.backbone) == ("none", False, "resnet50")
        assert (config.optimizer.name, config.split) == ("adam", "domainbed")
        assert (config.augment, config.augment_validation) == (True, False)
        lr = 10 ** uniform(config.draw, "lr", math.log10(1e-5), math.log10(3e-4))
        decay = 10 ** uniform(config.draw, "weight_decay", -6, -2)
        assert config.optimizer.options == {"lr": lr, "weight_decay": decay}
        if config.algorithm.name == "CORAL":
            assert config.algorithm.options["penalty"] == 10 ** uniform(
                config.draw, "mmd_gamma", -1, 1
            )


def test_yu2024_with_a_file_freezes_batch_norm(tmp_path: Path) -> None:
    options = {"weights": str(tmp_path / "moco.pth"), "backbone": "vit_base_patch16_224"}
    found = configs("yu2024", datasets=("PACS",), options=options)
    assert {(c.weights, c.freeze_bn, c.backbone) for c in found.values()} == {
        (options["weights"], True, options["backbone"])
    }


@pytest.mark.parametrize(
    ("name", "draws", "space"), [("domainbed", 20, "domainbed"), ("fad", 20, "fad")]
)
def test_a_protocol_equals_the_options_that_it_stands_for(name, draws, space) -> None:
    """Those that users have typed until now."""
    datasets, methods = ("PACS", "DomainNet", "NICO++"), {"algorithms": ("ERM", "IRM")}
    by_name = configs(name, datasets=datasets, **methods)
    by_hand = dict(jobs(Grid(datasets, draws=draws, trials=3, space=space, **methods)))
    assert by_name == by_hand
    assert len(by_name) == 2 * 3 * 20 * (4 + 6 + 3)


def test_quick_needs_a_fifth_of_the_steps() -> None:
    for config in configs("quick", datasets=("PACS", "NICO++", "DomainNet")).values():
        usual = config.spec()
        assert config.steps - 1 == (usual.steps - 1) / 5
        assert (config.steps - 1) % config.checkpoint_every == 0
        assert (config.draw, config.space) == (None, "fair")
    assert {c.steps for c in configs("quick", datasets=("Doodles",)).values()} == {301}


@pytest.mark.parametrize(
    ("name", "given", "both"),
    [
        ("domainbed", {"draws": 5}, ("draws=5", "draws=20")),
        ("domainbed", {"trials": 1}, ("trials=1", "trials=3")),
        ("domainbed", {"targets": "sketch"}, ("targets='sketch'", "'single' or pairs")),
        ("domainbed", {"space": "fair"}, ("space='fair'", "space='domainbed'")),
        ("domainbed", {"options": {"steps": 100}}, ("steps=100", "steps=5001")),
        ("domainbed", {"overrides": ("steps=100",)}, ("steps=100", "steps=5001")),
        ("domainbed", {"options": {"backbone": "resnet18"}}, ("'resnet18'", "'resnet50'")),
        ("domainbed", {"options": {"freeze_bn": False}}, ("freeze_bn=False", "freeze_bn=True")),
        ("domainbed", {"overrides": ("optimizer.lr=5e-05",)}, ("optimizer.lr=5e-05", "space")),
        ("domainbed", {"options": {"batch_size": 32}}, ("batch_size=32", "'domainbed' sets")),
        ("domainbed", {"algorithms": ("IRM",), "overrides": ("algorithm.penalty=1",)}, ("penalty=1",)),  # noqa: E501
        ("quick", {"overrides": ("optimizer.lr=0.1",)}, ("optimizer.lr=0.1", "'fair' sets")),
        ("yu2024", {"options": {"weights": "none", "split": "appendix"}}, ("split='appendix'",)),
        (
            "yu2024",
            {"options": {"weights": "imagenet"}},
            ("weights='imagenet'", "none or a file", "choose one of these"),
        ),
        ("yu2024", {}, ("needs --weights", "none or a file")),
    ],
)  # fmt: skip
def test_a_contradiction_names_both_values(tmp_path: Path, name, given, both) -> None:
    with pytest.raises(UserError) as told:
        plan(name, {"datasets": ("PACS",), **given}, tmp_path / "sweep")
    for words in (name, *both):
        assert words in str(told.value)
    assert not (tmp_path / "sweep").exists()


def test_what_a_protocol_leaves_open_or_repeats_is_accepted() -> None:
    given = {"datasets": ("PACS",), "optimizers": ("fad",), "averaging": ("swad",), "trials": 3}
    options = {"steps": 5001, "workers": 0, "precision": "fp16", "augment_validation": True}
    found = configs("domainbed", **given, options=options, overrides=("optimizer.ratio=0.5",))
    assert {(c.precision, c.augment_validation) for c in found.values()} == {("fp16", True)}
    assert {c.optimizer.options["ratio"] for c in found.values()} == {0.5}
    splits = configs("fad", datasets=("PACS",), options={"split": "appendix"})
    assert {config.split for config in splits.values()} == {"appendix"}
    pairs = configs("domainbed", datasets=("PACS",), targets="pairs")
    assert len(pairs) == 3 * 20 * 10


@pytest.mark.parametrize("name", list(protocols))
def test_every_rule_has_a_value_and_says_where_it_comes_from(name: str) -> None:
    protocol = protocols[name]
    assert all(rule.source for rule in protocol.rules.values())
    assert {"targets", "trials", "draws", "space", "selection", "steps"} <= protocol.rules.keys()
    known = {dataset for rule in protocol.rules.values() for dataset in rule.datasets}
    assert known <= set(dataset_names())
    assert json.loads(json.dumps(protocol.to_json())) == protocol.to_json()  # as a sweep stores it


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"stepz": Rule(3, "")}, "unknown rule of protocol 'wrong': 'stepz', did you mean 'steps'"),
        ({"optimizer": Rule("adam", "")}, "unknown rule.*'optimizer'"),
        ({"device": Rule("cpu", "")}, "unknown rule.*'device'"),
        ({"trials": Rule("3", "")}, "trials='3' is not of type int"),
        ({"space": Rule("fare", "")}, "unknown space of protocol 'wrong': 'fare'"),
        ({"selection": Rule("oracel", "")}, "did you mean 'oracle'"),
        ({"trials": Rule(3, ""), "reruns": Rule(2, "")}, "set trials to 1"),
    ],
)
def test_a_table_with_a_mistake_is_refused(rules, message) -> None:
    with pytest.raises(UserError, match=message):
        Protocol("wrong", "", "", rules)


def finish(sweep, name: str, value: float, steps=(0, 2)) -> None:
    """Puts a result where a worker would; its validation accuracy is the value."""
    job = Job(sweep.folder(name))
    config = job.config()
    domains = config.spec().domains

    def accuracy(domain: str, part: str) -> float:
        return value if part == "val" else 0.5

    records = [record(step, config.targets, accuracy, domains) for step in steps]
    write_run(job.result, json.loads(config.to_json()), records)
    job.note(1, "claim", attempt="")
    job.note(2, "done", attempt="")


def test_a_winner_is_rerun_when_its_search_is_done(tmp_path: Path, tiny: Protocol) -> None:
    given = {**DIGITS, "optimizers": ("adam", "sgd")}
    sweep = plan("tiny", given, tmp_path / "sweep")
    assert len(sweep.names) == 2 * 2 * 2
    assert {axes["draw"] for axes in sweep.axes.values()} == {1, 2}
    names = [n for n in sweep.names if "-15+60-ERM-adam" in n]
    finish(sweep, names[0], 0.4)
    assert plan_winners(sweep.path) == (sweep, 4)  # one of two is not a search
    finish(sweep, names[1], 0.8)
    other = next(n for n in sweep.names if "-30+75-ERM-adam" in n)
    finish(sweep, other, 0.9)  # of other targets: it must not win here
    grown, unknown = plan_winners(sweep.path)
    assert unknown == 3
    new = [name for name in grown.names if name not in sweep.names]
    assert new == [names[1].replace("trial0", f"trial{trial}") for trial in (1, 2)]
    winner = read_config(sweep.folder(names[1]) / "config.json")
    by_hand = Grid(("RotatedDigits",), trials=3, draws=3, targets="15+60", space="yu2024")
    seeds = {(c.trial_seed, c.draw): c.seed for _, c in jobs(by_hand)}
    for trial, name in enumerate(new, start=1):
        again = read_config(grown.folder(name) / "config.json")
        assert (again.trial_seed, again.seed) == (trial, seeds[trial, 2])
        changes = {"trial_seed": 0, "seed": winner.seed}
        assert again.model_copy(update=changes) == winner
    assert plan_winners(sweep.path) == (grown, 3)
    assert plan("tiny", given, sweep.path, extend=True) == grown


def test_a_run_that_diverged_has_lost(tmp_path: Path, tiny: Protocol) -> None:
    sweep = plan("tiny", DIGITS, tmp_path / "sweep")
    lost, won, *all_lost = sweep.names
    for name in (lost, *all_lost):
        job = Job(sweep.folder(name))
        job.note(1, "claim", attempt="")
        job.note(2, "failed", error="Diverged", traceback="", diverged=True)
    finish(sweep, won, 0.1)
    grown, unknown = plan_winners(sweep.path)
    assert unknown == 0
    assert set(grown.names) - set(sweep.names) == {
        won.replace("trial0", "trial1"),
        won.replace("trial0", "trial2"),
    }


def test_a_sweep_goes_on_by_itself(tmp_path: Path, tiny: Protocol, monkeypatch) -> None:
    """Trained for real: the report's choice on the first split is the run that was rerun."""
    monkeypatch.setattr(growing, "LOOK_SECONDS", 0.01)
    path = plan("tiny", DIGITS, tmp_path / "sweep").path
    calls = []

    def run() -> bool:
        calls.append(work(path, "cpu"))
        return True

    assert carry_on(path, run)
    assert look(read_plan(path)).counts["done"] == sum(calls) == 2 * (2 + 2)
    loaded = load_runs(path)
    selected = select_runs(loaded.runs)
    assert selected.selection == "pooled-val"
    assert sorted(place.trial for place in selected.chosen) == [0, 0, 1, 1, 2, 2]
    for column, targets in selected.columns["RotatedDigits"].items():
        chosen = [one.run for place, one in selected.chosen.items() if place.column == column]
        assert len({json.dumps(dict(run.hparams)) for run in chosen}) == 1
        first = [run for run in loaded.runs if run.trial == 0]
        assert pooled_validation(first, targets).run == chosen[0]


def test_submitted_workers_are_not_waited_for(tmp_path: Path, tiny: Protocol) -> None:
    path = plan("tiny", DIGITS, tmp_path / "sweep").path
    calls: list[int] = []
    assert carry_on(path, lambda: calls.append(1)) is None
    assert calls == [1]


def test_a_sweep_has_one_protocol(tmp_path: Path, tiny: Protocol) -> None:
    path = tmp_path / "sweep"
    plan("tiny", DIGITS, path)
    assert read_plan(path).facts["protocol"] == tiny.to_json()
    with pytest.raises(UserError, match="follows the protocol 'tiny'.* no protocol"):
        write_plan(Grid(("RotatedDigits",), trials=1, draws=0), path, extend=True)
    with pytest.raises(UserError, match="follows the protocol 'tiny'.*the protocol 'quick'"):
        plan("quick", DIGITS, path, extend=True)
    register_protocol(replace(tiny, rules={**TINY, "steps": Rule(4, "here")}))
    with pytest.raises(UserError, match="another version of the protocol 'tiny'"):
        plan("tiny", DIGITS, path, extend=True)


def results(folder: Path, protocol: str, **given: object) -> Path:
    sweep = plan(protocol, {**DIGITS, **given}, folder)
    for number, name in enumerate(sweep.names):
        finish(sweep, name, 0.01 * number)
    return folder


def test_protocols_do_not_share_a_table(steppe, tmp_path: Path, tiny: Protocol) -> None:
    one, two = results(tmp_path / "one", "tiny"), results(tmp_path / "two", "quick")
    loose = tmp_path / "loose"
    (name, config), *_ = jobs(Grid(("RotatedDigits",), trials=1, draws=0))
    write_run(
        loose / name,
        json.loads(config.to_json()),
        [record(0, config.targets, lambda d, p: 0.5, config.spec().domains)],
    )
    inside = two / "runs" / read_plan(two).names[0]
    for paths, said in (
        ((one, two), ("protocol 'tiny'", "protocol 'quick'", f"steppe report {two}")),
        ((one, loose), ("protocol 'tiny'", "no protocol", f"steppe report {one}")),
        ((one, inside), ("protocol 'tiny'", "protocol 'quick'")),
        ((tmp_path,), ("protocol 'tiny'", "protocol 'quick'", "no protocol")),
    ):
        code, _, err = steppe("report", *paths)
        assert code == 2
        assert all(words in err for words in ("cannot share a table", *said))
    code, out, _ = steppe("report", one, "--format", "json")
    assert code == 0
    found = json.loads(out)
    assert found["protocol"] == tiny.to_json()
    assert (found["selection"], found["answer"][-2]) == (
        "pooled-val",
        "All runs follow the protocol tiny.",
    )
    code, _, err = steppe("report", one, "--selection", "oracle")
    assert code == 2
    assert "--selection oracle contradicts the protocol 'tiny'" in err
    code, _, err = steppe("compare", one, two)
    assert code == 2
    assert "pass --selection" in err
    code, _, err = steppe("compare", one, two, "--selection", "train-val")
    assert code == 0
    assert "the protocols differ (one: tiny, two: quick)" in err


def test_a_set_of_targets_has_a_table_of_its_own(tmp_path: Path, tiny: Protocol) -> None:
    """Each target over all its images, and the set over the images of both."""
    sweep = plan("tiny", DIGITS, tmp_path / "sweep")
    right = {"15": (40, 5), "60": (8, 15), "30": (80, 20), "75": (0, 0)}
    for name in sweep.names:
        job = Job(sweep.folder(name))
        config = job.config()

        def accuracy(domain: str, part: str) -> float:
            hits = dict(zip(("test", "oracle"), right.get(domain, (0, 0)), strict=True))
            return hits[part] / {"test": 80, "oracle": 20}[part] if part in hits else 0.5

        records = [record(0, config.targets, accuracy, config.spec().domains)]
        write_run(job.result, json.loads(config.to_json()), records)
    report = build_report(load_runs(sweep.path))
    (table,) = report.tables
    assert {c: cell.mean for c, cell in table.rows[0].cells.items()} == {
        "15+60": pytest.approx(100 * (45 + 23) / 200),
        "30+75": pytest.approx(50.0),
    }
    sets = [{c: cell.mean for c, cell in t.rows[0].cells.items()} for t in report.target_tables]
    assert sets == [
        {"15": pytest.approx(45.0), "60": pytest.approx(23.0)},
        {"30": pytest.approx(100.0), "75": pytest.approx(0.0)},
    ]
    assert [len(t.rows[0].runs) for t in report.target_tables] == [2, 2]
    assert any("2 of 2 searches lack results of their winner" in p for p in report.problems)


@pytest.mark.parametrize("damaged", ['"protocol": 3', '"protocol": {"name": "tiny"}'])
def test_a_plan_with_a_damaged_protocol_is_named(steppe, tmp_path: Path, tiny, damaged) -> None:
    path = results(tmp_path / "sweep", "tiny")
    facts = json.loads((path / "sweep.json").read_text())
    del facts[KEY], facts["protocol"]
    (path / "sweep.json").write_text(json.dumps(facts)[:-1] + f", {damaged}}}")
    code, _, err = steppe("sweep", "run", path)
    assert (code, "its protocol is" in err) == (2, True)
    code, _, err = steppe("report", path)
    assert (code, "its protocol is unknown" in err) == (0, True)


def test_show_prints_every_rule(steppe, tmp_path: Path) -> None:
    code, out, _ = steppe("protocol", "show", "yu2024", "--json")
    found = json.loads(out)
    search = found.pop("search")
    assert (code, found) == (0, protocols["yu2024"].to_json())
    assert search["batch_size"] == "32"
    _, out, _ = steppe("protocol", "show", "yu2024")
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert {"clipart+infograph,painting+quickdraw,real+sketch"} <= set(
        lines["targets"].replace(";", "").split()
    )
    assert all(rule.source in out for rule in protocols["yu2024"].rules.values())
    assert "none or a file" in lines["weights"]
    _, listed, _ = steppe("protocol", "list", "--json")
    assert [row["name"] for row in json.loads(listed)] == list(protocols)
    assert "protocols" in listing.KINDS
    code, _, err = steppe("protocol", "show", "fda")
    assert (code, "did you mean 'fad'" in err) == (2, True)


def test_keys_of_a_plan_are_those_of_a_grid() -> None:
    assert PLAN.keys() - {"reruns", "selection"} <= Grid.__dataclass_fields__.keys()
