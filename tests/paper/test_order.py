"""From an experiment to the runs of a sweep."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from steppe.domains import dataset_spec
from steppe.errors import UserError
from steppe.optim import optimizer_spec
from steppe.paper import EXPERIMENTS, SCALES, make_order
from steppe.paper.order import (
    Case,
    Order,
    cases,
    choose_rates,
    default_rates,
    grids,
    tuning_grids,
)
from steppe.reports import Row, load_runs
from steppe.sweeps import Grid, jobs
from tests.reports.trees import config, record, write_run

TARGETS = 4
DOODLES = len(dataset_spec("Doodles").domains)
PACS = "PACS"


def count(some: list[Grid]) -> int:
    targets = [len(grid.targets.split(",")) for grid in some]
    return sum(n * grid.trials * max(1, grid.draws) for n, grid in zip(targets, some, strict=True))


def planned(order: Order) -> list[Grid]:
    return grids(order, default_rates(order))


FULL = {
    # optimizers x targets of all datasets x trials x draws; NICO++ holds two domains out at a time
    "figure-1": 9 * (4 + 6) * 3 * 20,
    "table1": 9 * (4 + 4 + 4 + 4 + 6 + 3) * 3 * 20,
    "table2": (5 * 4 + 7) * (4 + 4 + 4 + 4 + 6) * 3 * 20,
    "table3": 3 * 7 * (4 + 4 + 4 + 3) * 3 * 20,
    "figure-ratio": (5 + 4) * (4 + 3) * 3 * 20,
    "figure-hessian": 6 * 1 * 3 * 20,
    "figure-iterations": 3 * 7 * (4 + 3) * 3 * 20,
    "convergence": 5 * 4 * 3 * 20,
    "ablation": (2 + 7 + 11 + 7) * 4 * 3,
    "sensitivity": 9 * 4 * 3 * 20,
    "demo": 5 * DOODLES * 3,
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_full_grid(name: str) -> None:
    order = make_order(name, "full")
    assert order.datasets == EXPERIMENTS[name].datasets
    assert not tuning_grids(order)
    assert count(planned(order)) == FULL[name]


def test_steps_are_the_papers() -> None:
    order = make_order("table1", "full")
    steps = {grid.datasets[0]: grid.options["steps"] for grid in planned(order)}
    own = {"DomainNet": 15_001, "NICO++": 10_001}
    assert steps == {name: own.get(name, 5_001) for name in order.datasets}
    assert all("checkpoint_every" not in grid.options for grid in planned(order))
    longer = {grid.options["steps"] for grid in planned(make_order("table3", "full"))}
    assert longer == {5_001, 10_001, 15_001}


def test_the_hessian_is_of_sketch_held_out() -> None:
    (only,) = {grid.targets for grid in planned(make_order("figure-hessian", "small"))}
    assert only == "sketch"


def test_ratios_and_ablation_set_what_they_are_about() -> None:
    ratio = Counter(
        o
        for grid in planned(make_order("figure-ratio", "full"))
        for o in grid.overrides
        if "ratio" in o
    )
    assert set(ratio) == {f"optimizer.ratio={r}" for r in ("0.05", "0.1", "0.5", "1")}
    found = {o for grid in planned(make_order("ablation", "full")) for o in grid.overrides}
    for name in ("rho", "alpha", "beta"):
        searched = optimizer_spec("fad").space("fad")[name].distribution
        for value in (0.0, *searched.values):  # type: ignore[attr-defined]
            assert f"optimizer.{name}={value:g}" in found


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("scale", SCALES)
def test_every_run_has_a_valid_config_and_a_name_of_its_own(name: str, scale: str) -> None:
    order = make_order(name, scale, changes={"trials": 1})
    some = [*tuning_grids(order), *planned(order)]
    one_draw = [Grid(**{**vars(grid), "draws": min(grid.draws, 1)}) for grid in some]
    names = [run for grid in one_draw[:: max(1, len(one_draw) // 40)] for run, _ in jobs(grid)]
    assert len(names) == len(set(names))


PRODUCTS, PASSES = 164, 297
"""That a measurement of curvature at this scale took at most, for the spectrum and for flatness."""


def test_small_takes_at_most_an_hour_of_a_gpu() -> None:
    """By the pass that was measured on an H200, and 6 s for a run's start and evaluations."""
    step = json.loads(Path("benchmarks/step-h200.json").read_text())
    one_pass = step["runs"]["fad"]["ms per forward and backward"]["median"] / 1e3
    strict = json.loads(Path("benchmarks/step-h200-strict.json").read_text())
    plain = strict["runs"]["fad, plain"]["ms per forward and backward"]["median"] / 1e3
    solver = json.loads(Path("benchmarks/curvature-h200.json").read_text())["solvers"][0]
    product = solver["seconds"]["median"] / solver["products"] / 64
    for name in EXPERIMENTS:
        order = make_order(name, "small")
        some = [*tuning_grids(order), *planned(order)]
        seconds = sum(
            grid.trials
            * max(1, grid.draws)
            * (6 + grid.options["steps"] * one_pass * _passes(grid))
            for grid in some
        )
        if EXPERIMENTS[name].curvature:
            images = order.scale.curvature["images"]
            models = sum(grid.trials for grid in planned(order))
            seconds += models * (
                PRODUCTS * images * product + PASSES * plain
            )  # plain: fp32, 96 images
        assert seconds < 3600, (name, seconds)


def _passes(grid: Grid) -> float:
    ratio = next((float(o.split("=")[1]) for o in grid.overrides if ".ratio=" in o), 1.0)
    return 1 + ratio * (optimizer_spec(grid.optimizers[0]).passes - 1)


def test_factors() -> None:
    def order(name: str = "table1", factors: tuple[float, ...] = (1.0, 3.0), **given: Any) -> Order:
        changes = {"factors": factors, "draws": given.pop("draws", 0)}
        return make_order(name, "small", optimizers=["fad"], changes=changes, **given)

    assert {grid.tag for grid in tuning_grids(order())} == {"tune0.001", "tune0.003"}
    alone = order(factors=(10.0,))
    assert not tuning_grids(alone)
    assert {rate.lr for rate in default_rates(alone).values()} == {0.01}
    for wrong, match in (
        ({"draws": 2}, "they are sampled"),
        ({"overrides": ["optimizer.lr=0.1"]}, "optimizer.lr=0.1 is set"),
        ({"name": "ablation"}, "it does not tune them"),
    ):
        with pytest.raises(UserError, match=match):
            order(**wrong)


def test_what_is_asked_for() -> None:
    order = make_order(
        "table1", "small", datasets=["VLCS"], optimizers=["fad", "yogi"], changes={"trials": 2}
    )
    some = planned(order)
    assert {grid.datasets for grid in some} == {("VLCS",)}
    assert {grid.optimizers for grid in some} == {("fad",), ("yogi",)}
    assert {grid.trials for grid in some} == {2}
    with pytest.raises(UserError, match="'table4', did you mean"):
        make_order("table4", "small")
    with pytest.raises(UserError, match="optimizer of table2: 'sam'"):
        make_order("table2", "small", optimizers=["sam"])
    with pytest.raises(UserError, match="scale 'tiny'"):
        make_order("table1", "tiny")


def tuned(tmp_path: Path, validation: dict[str, dict[float, float]]) -> Path:
    """Runs of FAD by target and learning rate; the better they validate, the worse the target."""
    for target, by_rate in validation.items():
        for lr, value in by_rate.items():

            def accuracy(domain: str, part: str, value: float = value) -> float:
                return 1 - value if part in ("test", "oracle") else value

            chosen = {"name": "fad", "lr": lr}
            folder = tmp_path / f"{target}-{lr}"
            write_run(folder, config([target], optimizer=chosen), [record(0, [target], accuracy)])
    return tmp_path


def test_a_rate_is_chosen_by_its_own_training_domains(tmp_path: Path) -> None:
    order = make_order("table1", "small", optimizers=["fad"])
    validation = {
        "art_painting": {0.0003: 0.1, 0.001: 0.7, 0.003: 0.8, 0.01: 0.9},
        "cartoon": {0.0003: 0.2, 0.001: 0.9, 0.003: 0.8, 0.01: 0.1},
        "photo": {0.0003: 0.5, 0.001: 0.5, 0.003: 0.6, 0.01: 0.6},  # a tie: the smaller
        "sketch": {0.0003: 0.6, 0.001: 0.5, 0.003: 0.61, 0.01: 0.59},
    }
    found = choose_rates(order, load_runs(tuned(tmp_path, validation)).runs)
    fad = Row("ERM", "fad", "none")
    best = {"art_painting": 0.01, "cartoon": 0.001, "photo": 0.003, "sketch": 0.003}
    assert {case: rate.lr for case, rate in found.items()} == {
        Case(PACS, target, fad): lr for target, lr in best.items()
    }
    tried = found[Case(PACS, "cartoon", fad)].validation
    assert tried == pytest.approx({0.0003: 20.0, 0.001: 90.0, 0.003: 80.0, 0.01: 10.0})
    by_target = {grid.targets: grid.overrides for grid in grids(order, found)}
    assert by_target == {target: (f"optimizer.lr={lr:g}",) for target, lr in best.items()}


def test_a_case_waits_for_all_its_tries(tmp_path: Path) -> None:
    order = make_order("table1", "small", optimizers=["fad"])
    validation = {
        "sketch": {0.0003: 0.6, 0.001: 0.5, 0.003: 0.61, 0.01: 0.59},
        "photo": {0.0003: 0.5, 0.003: 0.5, 0.01: 0.6},
    }
    found = choose_rates(order, load_runs(tuned(tmp_path, validation)).runs)
    assert [case.targets for case in found] == ["sketch"]
    assert {grid.targets for grid in grids(order, found)} == {"sketch"}


def test_a_rate_that_is_given_is_not_tuned() -> None:
    order = make_order("table1", "small", overrides=["optimizer.lr=0.01"])
    assert not tuning_grids(order)
    assert {grid.overrides[-1] for grid in planned(order)} == {"optimizer.lr=0.01"}


def test_datasets_have_the_names_that_runs_have(tmp_path: Path) -> None:
    for domain in ("a", "b"):
        for label in ("x", "y"):
            (tmp_path / "mine" / domain / label).mkdir(parents=True)
    order = make_order("table1", "small", datasets=["pacs", f"{tmp_path}/mine/"])
    assert order.datasets == ("PACS", str(tmp_path / "mine"))


def test_tries_are_short_and_of_the_first_trial() -> None:
    order = make_order("table1", "small")
    some = tuning_grids(order)
    assert len(some) == len(cases(order)) * 4 == 5 * TARGETS * 4
    assert {grid.trials for grid in some} == {1}
    assert {grid.options["steps"] for grid in some} == {301}
    assert {grid.tag for grid in some if grid.optimizers == ("adam",)} == {
        "tune0.0005",
        "tune1.5e-05",
        "tune5e-05",
        "tune0.00015",
    }
