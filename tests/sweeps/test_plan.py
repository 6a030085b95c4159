"""Plans: DomainBed's runs with DomainBed's draws and seeds, each in a folder of its own."""

import itertools
import json
import time
from pathlib import Path

import pytest

from steppe.domains import dataset_spec, seed_hash
from steppe.errors import UserError
from steppe.sweeps import Grid, jobs, read_plan, target_sets, write_plan
from steppe.training import RunConfig, draw_hparams, read_config
from steppe.training.config import Named

SMALL = Grid(("RotatedDigits",), optimizers=("sgd", "fad"), trials=2, draws=2)


def axes_of(config: RunConfig) -> tuple[Named, ...]:
    return config.algorithm, config.optimizer, config.averaging


def test_one_run_for_every_combination() -> None:
    grid = Grid(
        ("PACS", "VLCS"),
        algorithms=("erm", "coral"),
        optimizers=("adam", "FAD"),
        averaging=("none", "SWAD"),
        trials=2,
        draws=3,
    )
    found = dict(jobs(grid))
    assert len(found) == 2 * 4 * 2 * 2 * 2 * 2 * 3
    wanted = set()
    for dataset in grid.datasets:
        domains = dataset_spec(dataset).domains
        axes = (domains, ("ERM", "CORAL"), ("adam", "fad"), ("none", "swad"), range(2), range(3))
        wanted |= {(dataset, *combination) for combination in itertools.product(*axes)}
    assert wanted == {
        (c.dataset, *c.targets, *(axis.name for axis in axes_of(c)), c.trial_seed, c.draw)
        for c in found.values()
    }
    assert "PACS-sketch-CORAL-fad-swad-trial1-draw2" in found


def test_draws_and_seeds_are_domainbeds() -> None:
    """Golden values of ERM on VLCS with hparams_seed 1 and trial_seed 0, from its own fixture."""
    found = dict(jobs(Grid(("VLCS",), trials=1, draws=2, space="domainbed")))
    config = found["VLCS-SUN09-ERM-adam-none-trial0-draw1"]
    assert config.batch_size == 39
    assert config.optimizer.options["lr"] == 2.7028930742148706e-05
    assert config.optimizer.options["weight_decay"] == 4.4832883881609976e-4
    assert config.dropout == 0.5
    assert config.seed == seed_hash("VLCS", "ERM", [2], 1, 0)
    assert (config.draw, config.space) == (1, "domainbed")
    default = found["VLCS-SUN09-ERM-adam-none-trial0-draw0"]
    assert (default.batch_size, default.dropout) == (32, 0.0)


def test_the_optimizer_axis_has_its_own_space_and_shares_seeds() -> None:
    found = dict(jobs(Grid(("PACS",), optimizers=("sgd", "fad"), trials=1, draws=4, space="fair")))
    for draw in range(4):
        sgd, fad = (
            found[f"PACS-photo-ERM-{name}-none-trial0-draw{draw}"] for name in ("sgd", "fad")
        )
        assert sgd.seed == fad.seed
        assert sgd.batch_size == fad.batch_size
        drawn = draw_hparams(dataset_spec("PACS"), "fad", "fair", draw, 0)["optimizer"]
        assert {key: fad.optimizer.options[key] for key in drawn if key != "name"} == {
            key: value for key, value in drawn.items() if key != "name"
        }


def test_pairs_are_domainbeds_and_go_beyond_two() -> None:
    spec = dataset_spec("PACS")
    assert [len(s) for s in target_sets(spec, "pairs")] == [1] * 4 + [2] * 6
    assert set(target_sets(spec, "pairs")[4:]) == set(itertools.combinations(spec.domains, 2))
    nico = target_sets(dataset_spec("NICO++"), "pairs")
    assert [len(s) for s in nico] == [2] * 3 + [3] * 12


def test_a_plan_is_written_and_read(tmp_path: Path) -> None:
    sweep = write_plan(SMALL, tmp_path / "sweep", command="steppe sweep plan ...")
    assert read_plan(tmp_path / "sweep") == sweep
    assert len(sweep.names) == 6 * 2 * 2 * 2
    for name, config in jobs(SMALL):
        assert read_config(sweep.folder(name) / "config.json") == config
    facts = json.loads((tmp_path / "sweep/sweep.json").read_text())
    assert facts["commands"] == ["steppe sweep plan ..."]
    with pytest.raises(UserError, match="holds a sweep already: add --extend"):
        write_plan(SMALL, tmp_path / "sweep")
    more = Grid(("RotatedDigits",), optimizers=("sgd", "adam"), trials=2, draws=2)
    longer = write_plan(more, tmp_path / "sweep", extend=True)
    assert longer.names[: len(sweep.names)] == sweep.names
    assert len(longer.names) == len(sweep.names) + 24


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithms": ("ERMM",)}, "unknown algorithm 'ERMM'"),
        ({"optimizers": ("fat",)}, "unknown optimizer 'fat'"),
        ({"averaging": ()}, "an axis of the sweep is empty"),
        ({"algorithms": ("ERM", "erm")}, "'ERM' is given twice"),
        ({"datasets": ("PACZ",)}, "PACZ"),
        ({"space": "fare"}, "unknown search space 'fare'"),
        ({"overrides": ("stepz=3",)}, "unknown config key 'stepz'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(tmp_path, change, message) -> None:
    values = {"datasets": ("RotatedDigits",), "trials": 1, "draws": 1, **change}
    with pytest.raises(UserError, match=message):
        write_plan(Grid(**values), tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(UserError, match="not empty and holds no sweep"):
        write_plan(SMALL, tmp_path)
    with pytest.raises(UserError, match="is not a sweep: plan one"):
        read_plan(tmp_path)


def test_ten_thousand_runs_take_no_longer_each_than_a_thousand(tmp_path: Path) -> None:
    spent = []
    for draws, runs in ((1, 864), (12, 10_368)):
        grid = Grid(
            ("PACS", "VLCS", "OfficeHome", "TerraIncognita"),
            algorithms=("ERM", "CORAL", "Fishr"),
            optimizers=("adam", "sgd", "fad"),
            averaging=("none", "swad"),
            draws=draws,
        )
        began = time.process_time()
        assert len(write_plan(grid, tmp_path / f"{draws}").names) == runs
        spent.append(time.process_time() - began)
    assert spent[1] < 5 * 12 * spent[0]  # squared, it would be 144 times
