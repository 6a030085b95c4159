"""Tables from runs: columns, cells, averages, cost, paired differences."""

import itertools
import random
import statistics

import numpy as np
import pytest
import scipy.stats

from steppe.errors import UserError
from steppe.reports import (
    Row,
    across_datasets,
    best_configs,
    build_report,
    columns,
    cost_table,
    dataset_tables,
    load_runs,
    optimizer_by_algorithm,
    paired,
    select_runs,
)
from steppe.training import RunConfig, make_config, read_config
from tests.reports.trees import DOMAINS, config, record, write_run

VLCS = ("Caltech101", "LabelMe", "SUN09", "VOC2007")
NICO = ("autumn", "dim", "grass", "outdoor", "rock", "water")


def number(*what):
    """An accuracy that is the same whenever it is asked for, and differs otherwise."""
    return random.Random(repr(what)).random()


def add(root, targets, trial=0, dataset="PACS", domains=DOMAINS, optimizer="adam", **more):
    """A run whose test accuracy is `number` of what it is; its first steps are slow."""
    algorithm, averaging = more.pop("algorithm", "ERM"), more.pop("averaging", "none")
    what = (dataset, algorithm, optimizer, averaging, trial)
    one = config(
        targets,
        trial,
        dataset=dataset,
        optimizer=optimizer,
        algorithm=algorithm,
        averaging=averaging,
    )
    seconds = more.pop("seconds", 0.5)
    found = [
        record(
            s,
            targets,
            lambda d, p: number(*what, d) if p == "test" else 0.5,
            domains,
            averaging != "none",
            seconds_per_step=9.0 if s == 0 else seconds,
            memory_gb=1.0 + s,
        )
        for s in (0, 1)
    ]
    name = "-".join(map(str, (*what, *targets)))
    write_run(root / name, {**one, **more}, found)


def row_of(table, **axes):
    wanted = Row(**{"algorithm": "ERM", "optimizer": "adam", "averaging": "none"} | axes)
    (found,) = [row for row in table.rows if row.row == wanted]
    return found


def test_cells_are_over_trials_and_the_average_over_cells(tmp_path):
    for target, trial in itertools.product(DOMAINS, range(3)):
        add(tmp_path, (target,), trial, space="fad" if trial else "fair", steps=5 + trial)
    (table,) = dataset_tables(load_runs(tmp_path).runs)
    assert (table.dataset, table.selection) == ("PACS", "train-val")
    assert (table.columns, table.labels) == (DOMAINS, ("A", "C", "P", "S"))
    row = row_of(table)
    for target, cell in row.cells.items():
        values = [100 * number("PACS", "ERM", "adam", "none", t, target) for t in range(3)]
        assert cell.mean == pytest.approx(statistics.mean(values), rel=1e-12)
        assert cell.err == pytest.approx(statistics.pstdev(values) / 3**0.5, rel=1e-12)
        assert cell.n == 3
    assert row.average.mean == pytest.approx(
        statistics.mean(c.mean for c in row.cells.values()), rel=1e-12
    )
    assert columns.values(columns.METHODS, row) == {
        "raw": None,
        "steps": [5, 6, 7],
        "space": "fad, fair",
        "runs": 12,
    }


def test_a_target_that_was_not_run_is_missing(tmp_path):
    for target in DOMAINS[:3]:
        add(tmp_path, (target,))
    add(tmp_path, ("sketch",), optimizer="fad")
    (table,) = dataset_tables(load_runs(tmp_path).runs)
    assert table.columns == DOMAINS
    assert row_of(table).cells["sketch"] is None
    assert row_of(table).cells["photo"].n == 1
    assert row_of(table).average is None
    known = [row_of(table).cells[d].mean for d in DOMAINS[:3]]
    assert row_of(table).shown_average.mean == pytest.approx(statistics.mean(known))
    assert row_of(table).shown_average.partial
    assert [row_of(table, optimizer="fad").cells[d] is None for d in DOMAINS] == [True] * 3 + [
        False
    ]


def test_runs_for_leave_one_out_have_no_column(tmp_path):
    """Not even of a method, or a trial, that has nothing else yet."""
    add(tmp_path, ("photo",))
    add(tmp_path, ("photo", "sketch"))
    add(tmp_path, ("photo", "sketch"), trial=1)
    add(tmp_path, ("photo", "sketch"), optimizer="fad")
    runs = load_runs(tmp_path).runs
    (table,) = dataset_tables(runs)
    assert table.columns == ("photo",)
    assert row_of(table).cells["photo"].n == 1
    assert set(row_of(table, optimizer="fad").cells.values()) == {None}
    assert any(
        "3 runs are used only for leave-one-out" in r
        for r in build_report(load_runs(tmp_path)).problems
    )


def test_two_targets_are_one_column_whatever_their_order(tmp_path):
    given = {"dataset": "NICO++", "domains": NICO}
    add(tmp_path, ("rock", "autumn"), 0, **given)
    add(tmp_path, ("autumn", "rock"), 1, **given)
    add(tmp_path, ("outdoor", "water"), 0, **given)
    (table,) = dataset_tables(load_runs(tmp_path).runs)
    assert table.columns == ("autumn+rock", "outdoor+water")
    cells = row_of(table).cells
    what = ("NICO++", "ERM", "adam", "none")
    values = [np.mean([number(*what, t, d) for d in ("autumn", "rock")]) for t in (0, 1)]
    assert cells["autumn+rock"].mean == pytest.approx(100 * np.mean(values), rel=1e-12)
    assert cells["autumn+rock"].n == 2


def test_an_unknown_dataset_has_the_columns_of_its_records(tmp_path):
    domains = ("zebra", "apple", "mango")
    for target in sorted(domains):
        add(tmp_path, (target,), dataset="Mine", domains=domains)
    (table,) = dataset_tables(load_runs(tmp_path).runs)
    assert table.columns == table.labels == domains


def two_datasets(root):
    for trial in range(3):
        for target in DOMAINS:
            add(root, (target,), trial)
            add(root, (target,), trial, optimizer="fad")
            add(root, (target,), trial, algorithm="CORAL", averaging="swad")
        for target in VLCS:
            add(root, (target,), trial, "VLCS", VLCS)
            if (trial, target) != (2, "SUN09"):
                add(root, (target,), trial, "VLCS", VLCS, "fad")
    return load_runs(root).runs


def trial_mean(dataset, domains, trial, optimizer="adam"):
    what = (dataset, "ERM", optimizer, "none", trial)
    return np.mean([100 * number(*what, d) for d in domains])


def test_across_datasets_the_targets_of_a_trial_come_first(tmp_path):
    table = across_datasets(two_datasets(tmp_path), "train-val")
    assert (table.dataset, table.columns) == ("all", ("PACS", "VLCS"))
    trials = [trial_mean("PACS", DOMAINS, t) for t in range(3)]
    cell = row_of(table).cells["PACS"]
    assert cell[:2] == pytest.approx((np.mean(trials), np.std(trials) / 3**0.5), rel=1e-12)
    assert (cell.n, cell.partial) == (3, False)
    others = [trial_mean("VLCS", VLCS, t, "fad") for t in range(2)]
    others.append(trial_mean("VLCS", [d for d in VLCS if d != "SUN09"], 2, "fad"))
    cell = row_of(table, optimizer="fad").cells["VLCS"]
    assert cell.mean == pytest.approx(np.mean(others), rel=1e-12)
    assert cell.partial
    coral = row_of(table, algorithm="CORAL", averaging="swad")
    assert coral.cells["VLCS"] is None
    assert coral.average is None
    assert [row.row.name for row in table.rows] == ["adam", "fad", "CORAL adam swad"]


def test_optimizers_by_algorithms(tmp_path):
    runs = two_datasets(tmp_path)
    one = optimizer_by_algorithm(runs, dataset="PACS")
    assert one.methods == (("ERM", "none"), ("CORAL", "swad"))
    assert one.optimizers == ("adam", "fad")
    across = across_datasets(runs)
    assert one.cells[Row("ERM", "adam", "none")] == row_of(across).cells["PACS"]
    assert Row("CORAL", "fad", "swad") not in one.cells
    whole = optimizer_by_algorithm(runs)
    trials = [
        np.mean([trial_mean("PACS", DOMAINS, t), trial_mean("VLCS", VLCS, t)]) for t in range(3)
    ]
    cell = whole.cells[Row("ERM", "adam", "none")]
    assert cell[:2] == pytest.approx((np.mean(trials), np.std(trials) / 3**0.5), rel=1e-12)
    assert whole.cells[Row("ERM", "fad", "none")].n == 2  # the third trial lacks a target
    assert whole.cells[Row("CORAL", "adam", "swad")] is None
    with pytest.raises(UserError, match="did you mean 'PACS'"):
        optimizer_by_algorithm(runs, dataset="PACSS")


def test_cost_is_relative_to_sgd_under_the_same_algorithm(tmp_path):
    for optimizer, seconds in (("adam", 0.1), ("sgd", 0.2), ("fad", 0.8), ("mine", 0.3)):
        add(tmp_path, ("photo",), optimizer=optimizer, seconds=seconds)
    add(tmp_path, ("photo",), optimizer="fad", seconds=0.5, algorithm="CORAL")
    cost = {c.row.name: c for c in cost_table(load_runs(tmp_path).runs)}
    assert {n: c.seconds_per_step for n, c in cost.items()} == {
        "adam": 0.1,
        "sgd": 0.2,
        "fad": 0.8,
        "mine": 0.3,
        "CORAL fad": 0.5,
    }
    assert cost["fad"].relative == pytest.approx(4)
    assert cost["CORAL fad"].relative == pytest.approx(5)  # no SGD there: to the cheapest
    assert [cost[n].passes for n in ("sgd", "fad", "mine")] == [1, 4, None]
    assert cost["sgd"].memory_gb == 2.0
    assert cost["sgd"].accuracy.n == 1


def difference(dataset, target, trial, algorithm="ERM"):
    a, b = (number(dataset, algorithm, o, "none", trial, target) for o in ("fad", "adam"))
    return 100 * (a - b)


def test_paired_differences_of_one_trial_are_the_paired_t_test(tmp_path):
    for target, optimizer in itertools.product(DOMAINS, ("adam", "fad")):
        add(tmp_path, (target,), optimizer=optimizer)
    found = paired(load_runs(tmp_path).runs, "fad", "adam")
    values = [difference("PACS", d, 0) for d in DOMAINS]
    expected = scipy.stats.ttest_rel(values, [0.0] * 4).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert found.difference == pytest.approx(np.mean(values), rel=1e-12)
    assert (found.pairs, found.units, found.unit) == (4, 4, "targets")


def test_trials_and_algorithms_of_a_target_are_one_unit(tmp_path):
    places = [("photo", 0), ("photo", 1), ("photo", 2), ("sketch", 0), ("cartoon", 1)]
    for (target, trial), optimizer in itertools.product(places, ("adam", "fad")):
        add(tmp_path, (target,), trial, optimizer=optimizer)
    for optimizer in ("adam", "fad"):
        add(tmp_path, ("sketch",), 0, optimizer=optimizer, algorithm="CORAL")
    add(tmp_path, ("art_painting",), 0)  # fad lacks it
    found = paired(load_runs(tmp_path).runs, "fad", "adam", level=0.9)
    units = [
        np.mean([difference("PACS", "photo", t) for t in range(3)]),
        np.mean([difference("PACS", "sketch", 0, a) for a in ("ERM", "CORAL")]),
        difference("PACS", "cartoon", 1),
    ]
    err = np.std(units, ddof=1) / 3**0.5
    assert (found.difference, found.err) == pytest.approx((np.mean(units), err), rel=1e-12)
    reach = scipy.stats.t.ppf(0.95, 2) * err
    assert found.high - found.difference == pytest.approx(reach, rel=1e-9)
    assert found.what == "6 pairs; interval over 3 targets"


def test_one_target_is_compared_over_its_trials(tmp_path):
    for trial, optimizer in itertools.product(range(3), ("adam", "fad")):
        add(tmp_path, ("photo",), trial, optimizer=optimizer)
        add(tmp_path, ("photo",), trial, optimizer=optimizer, algorithm="CORAL")
    runs = load_runs(tmp_path).runs
    both = paired(runs, "fad", "adam")
    assert (both.pairs, both.units, both.unit) == (6, 3, "trials")
    one = paired(runs, "CORAL fad", Row("ERM", "adam", "none"))
    assert (one.a, one.b, one.pairs) == ("CORAL fad", "adam", 3)
    fad, adam = (("PACS", "CORAL", "fad", "none"), ("PACS", "ERM", "adam", "none"))
    values = [100 * (number(*fad, t, "photo") - number(*adam, t, "photo")) for t in range(3)]
    assert one.difference == pytest.approx(np.mean(values), rel=1e-12)


def test_over_trials_the_targets_are_taken_as_given(tmp_path):
    for target, trial, optimizer in itertools.product(DOMAINS, range(3), ("adam", "fad")):
        add(tmp_path, (target,), trial, optimizer=optimizer)
    runs = load_runs(tmp_path).runs
    found = paired(runs, "fad", "adam", over="trials")
    values = [np.mean([difference("PACS", d, t) for d in DOMAINS]) for t in range(3)]
    expected = scipy.stats.ttest_rel(values, [0.0] * 3).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert found.difference == pytest.approx(paired(runs, "fad", "adam").difference, rel=1e-12)
    assert found.what == "12 pairs; interval over 3 trials of these 4 targets"
    short = [run for run in runs if (run.targets, run.trial) != (("photo",), 2)]
    with pytest.raises(UserError, match="do not have the same targets in every trial"):
        paired(short, "fad", "adam", over="trials")
    with pytest.raises(UserError, match="unit of a comparison 'trial', did you mean 'trials'"):
        paired(runs, "fad", "adam", over="trial")


def test_over_trials_methods_must_be_even_too(tmp_path):
    for target, trial, optimizer in itertools.product(DOMAINS, range(2), ("adam", "fad")):
        add(tmp_path, (target,), trial, optimizer=optimizer)
    for optimizer in ("adam", "fad"):
        add(tmp_path, ("photo",), 1, optimizer=optimizer, algorithm="CORAL")
    runs = load_runs(tmp_path).runs
    with pytest.raises(UserError, match="do not have the same targets in every trial"):
        paired(runs, "fad", "adam", over="trials")


def test_too_little_to_compare_is_refused(tmp_path):
    for optimizer in ("adam", "fad"):
        add(tmp_path, ("photo",), optimizer=optimizer)
        add(tmp_path, ("sketch",), optimizer=optimizer, trial=optimizer == "fad")
    runs = load_runs(tmp_path).runs
    with pytest.raises(UserError, match="share 1 combinations of target and trial"):
        paired(runs, "fad", "adam")
    with pytest.raises(UserError, match="did you mean 'fad'"):
        paired(runs, "fade", "adam")
    for optimizer in ("adam", "fad"):
        add(tmp_path, ("photo",), optimizer=optimizer, algorithm="CORAL")
    with pytest.raises(UserError, match="share one trial"):
        paired(load_runs(tmp_path).runs, "fad", "adam")


def test_an_unknown_selection_is_an_error():
    with pytest.raises(UserError, match="did you mean 'train-val'"):
        select_runs([], "trainval")


def test_best_configs_can_be_run_again(tmp_path):
    given = {"dataset": "PACS", "targets": "sketch", "optimizer": {"name": "fad", "rho": 0.125}}
    one = make_config({**given, "root": str(tmp_path), "device": "cpu"}).model_dump(mode="json")
    for lr, value in ((0.25, 0.3), (0.5, 0.9)):
        chosen = {**one, "optimizer": {**one["optimizer"], "lr": lr}}
        records = [record(s, ("sketch",), lambda d, p, v=value - s / 10: v) for s in (0, 1)]
        write_run(tmp_path / str(lr), chosen, records)
    (best,) = best_configs(load_runs(tmp_path).runs)
    assert (best["target"], best["step"], best["accuracy"]) == ("sketch", 0, 90.0)
    assert (best["hparams"]["lr"], best["hparams"]["rho"]) == (0.5, 0.125)
    (tmp_path / "one.json").write_text(RunConfig(**best["config"]).to_json())
    again = read_config(tmp_path / "one.json")
    assert (again.optimizer.options["lr"], again.root, again.device) == (0.5, None, "auto")
