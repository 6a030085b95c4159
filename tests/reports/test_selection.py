"""The three rules on runs with one and two targets, and what they must not look at."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

from steppe.reports import SELECTIONS, Row, Run
from steppe.reports.runs import Record
from steppe.reports.selection import (
    leave_one_out,
    oracle,
    pooled_validation,
    train_validation,
)
from tests.reports.trees import DOMAINS

IMAGES = {
    (domain, part): 10 * (1 + place) * (5 if part in ("train", "test") else 1)
    for place, domain in enumerate(DOMAINS)
    for part in ("train", "val", "test", "oracle")
}
"""Domains of different sizes, which only pooling minds."""


def make_run(targets, draw, accuracies, averaged=(), domains=DOMAINS, name=""):
    """A run whose record at step i has `accuracies[i]`: by (domain, part)."""
    records = tuple(
        Record(step, accuracy, {}, step in averaged, None, None)
        for step, accuracy in enumerate(accuracies)
    )
    return Run(
        path=name or f"{'-'.join(targets)}-{draw}",
        dataset="PACS",
        targets=tuple(targets),
        row=Row("ERM", "adam", "none"),
        trial=0,
        choice=f"draw {draw}",
        draw=draw,
        hparams={"lr": draw},
        steps=len(records),
        space=None,
        split="domainbed",
        state="done",
        config={},
        records=records,
        images=IMAGES,
    )


def scores(rng, targets):
    parts = {True: ("test", "oracle"), False: ("train", "val")}
    return {(d, p): rng.choice((0.1, 0.2, 0.3, 0.6)) for d in DOMAINS for p in parts[d in targets]}


def sweep(seed, size, more=True, n_steps=4, draws=3):
    """Runs that hold out `size` domains, and one more."""
    rng = random.Random(seed)
    sets = [s for k in (size, size + more) for s in itertools.combinations(DOMAINS, k)]
    runs = [
        make_run(s, draw, [scores(rng, s) for _ in range(n_steps)])
        for s in dict.fromkeys(sets)
        for draw in range(draws)
    ]
    rng.shuffle(runs)
    return runs


def of_images(record, keys):
    """The mean over images, each of which is right or wrong."""
    right = []
    for key in keys:
        hits = round(IMAGES[key] * record.accuracy[key])
        right += [1.0] * hits + [0.0] * (IMAGES[key] - hits)
    return np.mean(right)


def slow(selection, runs, targets):
    """Every (validation, draw, step, number) there is; the rule's words applied one by one."""
    found = []
    for run in runs:
        if set(run.targets) != set(targets):
            continue
        sources = [d for d in DOMAINS if d not in targets]
        for record in run.records:
            test = np.mean([record.accuracy[t, "test"] for t in DOMAINS if t in targets])
            if selection == "pooled-val":
                value = of_images(record, [(d, "val") for d in sources])
                test = of_images(record, itertools.product(targets, ("test", "oracle")))
            elif selection == "train-val":
                value = np.mean([record.accuracy[d, "val"] for d in sources])
            elif selection == "oracle":
                if record.step != max(r.step for r in run.records):
                    continue
                value = np.mean([record.accuracy[t, "oracle"] for t in DOMAINS if t in targets])
            else:
                values = [
                    other.records[record.step].accuracy[v, "test"]
                    for v in sources
                    for other in runs
                    if set(other.targets) == {*targets, v} and other.draw == run.draw
                ]
                if len(values) < len(sources):
                    continue
                value = np.mean(values)
            found.append((value, run.draw, -record.step, test))
    return max(found, default=None)  # of equals: the highest draw, its first step


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("size", [1, 2])
def test_rules_equal_the_slow_ones(selection, size):
    for seed in range(30):
        runs = sweep(seed, size)
        for targets in itertools.combinations(DOMAINS, size):
            chosen = SELECTIONS[selection](runs, frozenset(targets))
            value, draw, step, test = slow(selection, runs, targets)
            assert (chosen.validation, chosen.run.draw, chosen.step) == (value, draw, -step)
            assert chosen.accuracy == test
            assert set(chosen.run.targets) == set(targets)
            assert (chosen.run.choice, chosen.run.hparams) == (f"draw {draw}", {"lr": draw})


@pytest.mark.parametrize("selection", ["train-val", "pooled-val", "leave-one-out"])
@pytest.mark.parametrize("size", [1, 2])
def test_nothing_of_the_targets_is_looked_at(selection, size):
    """Other accuracies on the targets change the number, and never the choice.

    In runs that hold out more, targets stay targets; the domain held out with them may be seen.
    """
    rng = random.Random(0)
    for seed in range(10):
        runs = sweep(seed, size)
        for targets in map(frozenset, itertools.combinations(DOMAINS, size)):

            def hidden(run, targets=targets):
                if not targets <= run.target_set:
                    return run
                records = [
                    r._replace(
                        accuracy={
                            k: rng.random() if k[0] in targets else v for k, v in r.accuracy.items()
                        }
                        # Not even where a record has what no run should have.
                        | {(t, "val"): rng.random() for t in targets},
                    )
                    for r in run.records
                ]
                return dataclasses.replace(run, records=tuple(records))

            before = SELECTIONS[selection](runs, targets)
            after = SELECTIONS[selection]([hidden(run) for run in runs], targets)
            assert (before.run.choice, before.step) == (after.run.choice, after.step)
            assert before.validation == after.validation
            assert before.accuracy != after.accuracy


def test_pooling_needs_the_numbers_of_images():
    targets = frozenset({"sketch"})
    known, other = sweep(0, 1, more=False)[:2]
    runs = [dataclasses.replace(run, targets=("sketch",)) for run in (known, other)]
    records = [
        Record(
            0,
            {**scores(random.Random(n), {"sketch"}), ("photo", "val"): 0.1 * n},
            {},
            False,
            *[None] * 2,
        )
        for n in (1, 9)
    ]
    runs = [
        dataclasses.replace(run, records=(one,)) for run, one in zip(runs, records, strict=True)
    ]
    counted = dataclasses.replace(runs[1], images={})
    assert pooled_validation([runs[0], counted], targets).run is runs[0]
    assert pooled_validation([counted], targets) is None


def test_leave_one_out_needs_every_run_at_the_step():
    targets = frozenset({"sketch"})
    runs = sweep(0, 1, draws=2)
    lacking = [r for r in runs if (r.target_set, r.draw) != (targets | {"photo"}, 1)]
    assert leave_one_out(lacking, targets).run.draw == 0
    none = [r for r in lacking if (r.target_set, r.draw) != (targets | {"cartoon"}, 0)]
    assert leave_one_out(none, targets) is None
    short = [
        dataclasses.replace(r, records=r.records[:1]) if len(r.targets) == 2 else r for r in runs
    ]
    assert leave_one_out(short, targets).step == 0


def best_at(step, n=3, high=0.9):
    """Accuracies whose validation is best at a step."""
    return [
        {
            ("sketch", "test"): 0.1 * (i + 1),
            ("sketch", "oracle"): 0.2 * (i + 1),
            ("photo", "val"): high if i == step else 0.5,
        }
        for i in range(n)
    ]


def test_only_averaged_records_are_candidates():
    targets = frozenset({"sketch"})
    plain = make_run(targets, 0, best_at(0))
    assert train_validation([plain], targets).step == 0
    averaged = make_run(targets, 0, best_at(0), averaged={1})
    assert train_validation([averaged], targets).step == 1
    assert oracle([plain], targets).step == 2
    assert oracle([averaged], targets).step == 1
    raw = dataclasses.replace(make_run(targets, 0, best_at(0)), row=Row("ERM", "adam", "swad"))
    assert [rule([raw], targets) for rule in SELECTIONS.values()] == [None] * 4


def test_records_that_lack_a_part_are_passed_over():
    targets = frozenset({"sketch"})
    accuracies = best_at(0)
    del accuracies[0]["sketch", "test"]
    assert train_validation([make_run(targets, 0, accuracies)], targets).step == 1
    accuracies = best_at(0)
    accuracies[1] = {**accuracies[1], ("cartoon", "val"): 0.0}
    chosen = train_validation([make_run(targets, 0, accuracies)], targets)
    assert (chosen.step, chosen.validation) == (1, 0.25)  # the only one with both domains


def test_without_validation_a_single_run_gives_its_last_step():
    targets = frozenset({"sketch"})
    runs = [make_run(targets, d, [{("sketch", "test"): s / 10} for s in range(3)]) for d in (0, 1)]
    chosen = train_validation(runs[:1], targets)
    assert (chosen.step, chosen.validation, chosen.accuracy) == (2, None, 0.2)
    assert train_validation(runs, targets) is None
    assert oracle(runs, targets) is None
    assert (
        train_validation([*runs, make_run(targets, 2, best_at(1))], targets).run.choice == "draw 2"
    )
