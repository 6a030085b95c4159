"""Plans: DomainBed's runs with DomainBed's draws and seeds, each in a folder of its own."""

import itertools
import json
import resource
import shlex
import signal
import time
from pathlib import Path
from typing import Annotated

import pytest
import torch
from typer.testing import CliRunner

from steppe.cli import app
from steppe.domains import dataset_spec, seed_hash
from steppe.errors import RunError, UserError
from steppe.optim.registry import optimizers, register_optimizer
from steppe.options import Option
from steppe.sealed import KEY
from steppe.search import Hyperparameter, LogUniform, Uniform
from steppe.sweeps import Grid, cost, jobs, read_plan, target_sets, write_plan
from steppe.training import RunConfig, draw_hparams, read_config
from steppe.training.config import Named
from tests import processes

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
    assert target_sets(dataset_spec("ColoredMNIST"), "+90%") == [("+90%",)]
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
    with pytest.raises(UserError, match="already contains a sweep: pass --extend.* or delete it"):
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
        ({"averaging": ()}, "at least one dataset, algorithm.*empty"),
        ({"algorithms": ("ERM", "erm")}, "'ERM' is listed twice"),
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
    with pytest.raises(UserError, match="not empty and not a sweep"):
        write_plan(SMALL, tmp_path)
    with pytest.raises(UserError, match="is not a sweep: plan one"):
        read_plan(tmp_path)


def test_many_runs_take_no_longer_each_than_few(tmp_path: Path) -> None:
    spent = []
    for draws, runs in ((1, 216), (12, 2_592)):
        grid = Grid(
            ("PACS", "VLCS"),
            algorithms=("ERM", "CORAL", "Fishr"),
            optimizers=("adam", "sgd", "fad"),
            draws=draws,
        )
        began = time.process_time()
        assert len(write_plan(grid, tmp_path / f"{draws}").names) == runs
        spent.append(time.process_time() - began)
    assert spent[1] < 5 * 12 * spent[0]  # squared, it would be 144 times


def edited(path: Path, **changes: object) -> None:
    """Changes the plan as somebody with an editor would, or somebody who makes one by hand."""
    facts = json.loads((path / "sweep.json").read_text())
    del facts[KEY]
    (path / "sweep.json").write_text(json.dumps({**facts, **changes}))


RUN = {
    **dict.fromkeys(("dataset", "targets", "algorithm", "optimizer", "averaging"), "x"),
    "trial": 0,
    "draw": None,
    "steps": 1,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"runs": {name: RUN}}, "is not a valid run name")
            for name in ("../../mine", "..", "/tmp/mine", "", "a/b", "a\0b", "\ud800")
        ),
        ({"runs": [RUN]}, "'runs' of the plan is"),
        ({"runs": {"a": 3}}, "run a is 3"),
        ({"runs": {"a": {}}}, "run a has no 'dataset'"),
        ({"runs": {"a": {**RUN, "steps": "9"}}}, "'steps' of run a is '9'"),
        ({"retries": "1"}, "'retries' of the plan is '1'"),
        ({"commands": None}, "'commands' of the plan is None"),
        ({"version": "1"}, "version must be a number, got '1'"),
        ({"version": None}, "version must be a number, got None"),
        ({"version": 99}, "newer steppe"),
    ],
)
def test_a_plan_of_another_shape_is_one_line(tmp_path: Path, changes, message) -> None:
    write_plan(SMALL, tmp_path / "sweep")
    edited(tmp_path / "sweep", **changes)
    with pytest.raises(UserError, match=message) as told:
        read_plan(tmp_path / "sweep")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"version": ' + "[" * 100_000, "\x00", "1" * 9999]
)
def test_a_plan_that_is_none_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(UserError, match="sweep.json is"):
        read_plan(tmp_path)


def test_a_changed_plan_shows_and_the_error_says_how_to_keep_a_change(tmp_path: Path) -> None:
    sweep = write_plan(SMALL, tmp_path)
    file = tmp_path / "sweep.json"
    whole = file.read_text()
    file.write_text(whole.replace('"retries": 1', '"retries": 3'))
    with pytest.raises(
        UserError, match=f'does not match its checksum.*remove its last entry, "{KEY}"'
    ):
        read_plan(tmp_path)
    edited(tmp_path, retries=3)
    assert read_plan(tmp_path).retries == 3
    file.write_text(whole)
    assert read_plan(tmp_path) == sweep


@pytest.mark.parametrize("limit", [100, 3000], ids=["a config", "the plan"])
@pytest.mark.parametrize("extend", [False, True])
def test_a_failed_write_is_one_line_and_loses_nothing(tmp_path: Path, limit, extend) -> None:
    path = tmp_path / "sweep"
    before = write_plan(SMALL, path) if extend else None
    more = Grid(("RotatedDigits",), optimizers=("adam",), trials=2, draws=2)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        with pytest.raises(RunError, match="could not be written: File too large") as told:
            write_plan(more, path, extend=extend)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(told.value).startswith(f"{path}/")
    assert "\n" not in str(told.value)
    assert not list(path.glob(".*"))
    if before is not None:
        assert read_plan(path) == before
        assert "Everything written earlier is intact" in str(told.value)
    assert len(write_plan(more, path, extend=extend).names) == (72 if extend else 24)


def test_a_config_is_not_written_through_a_link(tmp_path: Path) -> None:
    name, _ = next(jobs(SMALL))
    mine = tmp_path / "mine"
    mine.write_text("keep")
    folder = tmp_path / "sweep/runs" / name
    folder.mkdir(parents=True)
    (folder / "config.json").symlink_to(mine)
    write_plan(SMALL, tmp_path / "sweep")
    assert mine.read_text() == "keep"


@pytest.mark.parametrize("draws", [0, 2])
def test_a_plugin_whose_own_values_do_not_fit_it_is_refused(draws: int) -> None:
    """Steppe's own spaces are tested to fit; nobody has tested a plugin's."""

    class Picky(torch.optim.SGD):
        def __init__(
            self,
            params,
            lr: float,
            k: Annotated[float, Option(Uniform(-2, -1))] = -1.0,
            weight_decay: float = 0.0,
        ) -> None:
            if k < 0:
                raise ValueError(f"k must be >= 0, got {k}")
            super().__init__(params, lr, weight_decay=weight_decay)

    register_optimizer("picky", passes=1, base=None, lr=Hyperparameter(0.1, LogUniform(-3, -1)))(
        Picky
    )
    try:
        with pytest.raises(UserError, match="'picky' rejects lr=.*: k must be >= 0, got -1"):
            list(jobs(Grid(("RotatedDigits",), optimizers=("picky",), trials=1, draws=draws)))
    finally:
        optimizers._table.pop("picky")


@pytest.mark.parametrize(
    ("device", "days", "hinted"),
    [("cpu", 1.1, True), ("cpu", 0.9, False), ("cuda:0", 9, False), (None, None, False)],
)
def test_a_sweep_too_large_for_a_cpu_gets_a_hint(device, days, hinted) -> None:
    seconds = None if days is None else days * 86400
    said = cost.hint(cost.Cost(1, 1, seconds, device, ()))
    assert (said is not None) == hinted


def test_the_hint_is_printed_and_its_options_make_a_plan_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"resnet50": 1.0, "small-cnn": 0.001}
    monkeypatch.setattr(cost, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(cost, "seconds_per_image", lambda config, *_: seconds[config.backbone])
    plan = ["sweep", "plan", "--datasets", "PACS", "--trials", "1", "--draws", "0"]
    large = CliRunner().invoke(app, [*plan, str(tmp_path / "large")]).stdout
    assert " ".join(cost.TRIAL) in large
    small = CliRunner().invoke(app, [*plan, str(tmp_path / "small"), *cost.TRIAL]).stdout
    assert "4 runs planned" in small
    assert "more than a day" not in small


def test_hints_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    path = tmp_path / "it's; my sweep\udcff"
    options = ["--datasets", "RotatedDigits", "--trials", "1", "--draws", "0", "--no-estimate"]
    planned = processes.Steppe("sweep", "plan", path, *options, folder=tmp_path)
    assert planned.wait() == 0, planned.stderr
    hint = planned.stdout.partition("start them with: ")[2]
    assert shlex.split(hint)[:3] == ["steppe", "sweep", "run"]
    assert shlex.split(hint)[3:] == [str(path).replace("\udcff", r"\udcff")]
    status = processes.Steppe("sweep", "status", path, folder=tmp_path)
    assert status.wait() == 0, status.stderr
    assert r"mysweep\udcff:6planned" in "".join(status.stdout.split())  # wherever it is wrapped
