"""Experiments run from beginning to end, on built-in data."""

import json
import shlex
import tarfile
import time
from itertools import product
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from steppe import paper
from steppe.cli import app
from steppe.errors import Diverged, UserError
from steppe.paper import EXPERIMENTS, Order, make_order, plan, reproduce, run, write_results
from steppe.paper.results import to_json
from steppe.paper.tables import rates_table
from steppe.reports import Row
from steppe.reports.render import to_markdown
from steppe.sweeps import Job, Sweep, growing, look, read_plan, work
from steppe.training.trainer import Trainer
from tests import processes
from tests.limits import seconds


def carry_out(sweep: Sweep) -> bool:
    work(sweep.path, "cpu", 1, 60.0, None)
    return True


def on_digits(*optimizers: str, experiment: str = "table1", overrides=(), **changes) -> Order:
    """An experiment on built-in digits, small, that tunes with runs as long as its own."""
    return make_order(
        experiment,
        "small",
        datasets=["RotatedDigits"],
        optimizers=optimizers,
        changes={"tuning": 1.0, "trials": 1, **changes},
        options={"device": "cpu"},
        overrides=overrides,
    )


def test_rates_are_tuned_first(tmp_path: Path) -> None:
    """A rate that learns nothing is tried beside one that learns: validation tells."""
    changes = {"factors": (1e-6, 1.0), "share": 0.2, "only": 1, "trials": 2}
    order = on_digits("sgd", "adam", overrides=["optimizer.weight_decay=0"], **changes)
    sweep, rates = plan(order, tmp_path)
    assert rates is None
    assert len(sweep.names) == 2 * 2
    assert all(axes["tag"].startswith("tune") for axes in sweep.axes.values())
    found = reproduce(order, tmp_path, carry_out)
    for case, rate in found.rates.items():
        assert rate.lr == {"sgd": 0.001, "adam": 5e-5}[case.method.optimizer]
        assert len(rate.validation) == 2
    main = [n for n, axes in read_plan(tmp_path).axes.items() if not axes["tag"]]
    assert len(main) == 2 * 2
    (variant,) = found.variants
    assert set(variant.selected.rows()) == {Row("ERM", "sgd", "none"), Row("ERM", "adam", "none")}
    assert {run.hparams["lr"] for run in variant.selected.runs} == {0.001, 5e-5}


def test_workers_go_on_when_a_rate_is_known(tmp_path: Path, monkeypatch) -> None:
    """What has its learning rate is run beside what still tunes, by workers that are there."""
    order = on_digits("sgd", factors=(0.5, 1.0), share=0.02, only=3)
    monkeypatch.setattr(growing, "LOOK_SECONDS", 0.05)
    done = []

    def in_two_goes(sweep: Sweep) -> None:
        if not done:
            work(sweep.path, "cpu", limit=2)  # all that the first place tries
            give_up = time.monotonic() + seconds(600)
            while len(read_plan(sweep.path).names) == 6 and time.monotonic() < give_up:
                time.sleep(0.05)
        carry_out(sweep)
        done.append(look(sweep).counts["done"])

    found = reproduce(order, tmp_path, in_two_goes, command="as typed")
    assert not found.problems
    assert done[0] >= 6 + 1
    assert done[-1] == 9
    sweep = read_plan(tmp_path)
    assert len(sweep.facts["grids"]) == 9
    assert sweep.facts["commands"] == ["as typed"]


def test_a_rate_that_diverges_is_not_chosen(tmp_path: Path) -> None:
    order = on_digits("sgd", factors=(1.0, 1e12), share=0.01, only=1)
    found = reproduce(order, tmp_path / "one", carry_out)
    ((_, rate),) = found.rates.items()
    assert rate.lr == 0.001
    assert rate.validation[1e9] is None
    assert "1e+09: diverged" in to_markdown(rates_table(found))
    assert to_json(found)["learning rates"][0]["validation"]["1e+09"] is None
    assert len(found.variants) == 1

    (tried,) = [n for n in read_plan(tmp_path / "one").names if n.endswith("tune1e+09")]
    events = Job(read_plan(tmp_path / "one").folder(tried)).events()
    assert [event.kind for event in events] == ["claim", "failed"]  # again would be the same
    reproduce(order, tmp_path / "one", None)  # nothing is left to be carried out


def test_a_method_that_only_diverges_keeps_no_other_from_results(tmp_path, monkeypatch) -> None:
    order = on_digits("sgd", "adam", factors=(1.0, 3.0), share=0.01, only=1)
    step = Trainer.step

    def diverging(self, batches):
        if self.config.optimizer.name == "sgd":
            raise Diverged("the loss became nan")
        return step(self, batches)

    monkeypatch.setattr(Trainer, "step", diverging)
    found = reproduce(order, tmp_path, carry_out)
    assert {row.optimizer for _, selected in found.variants for row in selected.rows()} == {"adam"}
    assert found.problems == (
        "sgd on RotatedDigits, target 0: diverged with every learning rate tried; "
        "use --factors to try others",
    )


def test_a_single_model_is_not_compared(tmp_path: Path, monkeypatch) -> None:
    order = on_digits("sgd", experiment="figure-hessian", factors=(1.0, 3.0), share=0.01, only=1)
    measured = []
    monkeypatch.setattr(run, "measure_run", lambda path, *given, **more: measured.append(path))
    found = reproduce(order, tmp_path, carry_out)
    assert len(measured) == 1
    assert found.curvature is None
    assert len(found.variants) == 1


def test_another_failure_is_no_divergence(tmp_path: Path, monkeypatch) -> None:
    order = on_digits("sgd", factors=(0.5, 1.0), share=0.01, only=1)
    step = Trainer.step

    def failing(self, batches):
        if self.config.optimizer.lr == 0.001:
            raise ValueError("the fan stopped")
        return step(self, batches)

    monkeypatch.setattr(Trainer, "step", failing)
    found = reproduce(order, tmp_path, carry_out)
    assert not found.variants
    assert "some learning-rate tuning runs have no result: 1 failed" in found.problems[0]


def test_a_folder_of_images(tmp_path: Path) -> None:
    for domain, label, number in product("ab", "xy", range(8)):
        folder = tmp_path / "mine" / domain / label
        folder.mkdir(parents=True, exist_ok=True)
        colour = (255 * (label == "x"), 100 * (domain == "a"), 9 * number)
        Image.new("RGB", (32, 32), colour).save(folder / f"{number}.png")
    order = make_order(
        "convergence",
        "smoke",
        datasets=[f"{tmp_path}/mine/"],
        optimizers=["sgd", "fad"],
        options={"image_size": 32, "backbone": "resnet18", "weights": "none", "batch_size": 4},
    )
    found = reproduce(order, tmp_path / "out", carry_out)
    assert not found.problems
    write_results(found, tmp_path / "out", {})
    stored = json.loads((tmp_path / "out/results.json").read_text())
    assert {cell["dataset"] for cell in stored["results"]} == {"mine"}
    assert str(tmp_path) not in json.dumps(stored["results"])
    assert stored["backbone"] == ["resnet18"]


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert all(name in typed("reproduce").stdout for name in EXPERIMENTS)
    empty = ("--factors", "")  # as from a variable that is not set: the scale's
    planned = typed("reproduce", "table1", "--plan", "--datasets", "RotatedDigits", *empty)
    assert "reproduce/table1-small: 120 runs planned" in planned.stdout
    with pytest.raises(UserError, match="did you mean 'table"):
        typed("reproduce", "table7")
    where = ("--root", str(tmp_path / "data"))
    smoke = ("reproduce", "convergence", "--scale", "smoke", "--workers", "1", *where)
    done = processes.Steppe(*smoke, folder=tmp_path)
    assert done.wait() == 0, done.stderr
    written = (tmp_path / "reproduce/convergence-smoke/results.md").read_text()
    assert "steppe reproduce convergence --scale smoke" in written
    assert str(tmp_path) not in written
    assert "fad" in done.stdout
    assert (tmp_path / "reproduce/convergence-smoke/figure.svg").exists()


def test_images_are_looked_for_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = ("reproduce", "table1", "--factors", "1,3", "--root", "nowhere")
    with pytest.raises(UserError, match=f"'PACS' not found at {tmp_path}/nowhere/PACS"):
        typed(*missing)
    with pytest.raises(UserError, match="there/PACS: expected"):
        typed(*missing[:4], "--set", "root=there")
    assert not (tmp_path / "reproduce").exists()

    def reached(*_: object, **__: object) -> None:
        raise RuntimeError("run")

    monkeypatch.setattr(paper, "reproduce", reached)
    with pytest.raises(RuntimeError, match="run"):  # Ray's nodes may have them
        typed(*missing, "--launcher", "ray")
    planned = typed(*missing, "--plan")  # for machines that have them
    assert planned.exit_code == 0, planned.stderr
    assert "40 runs planned" in planned.stdout
    assert "workers need it: dataset 'PACS' not found" in planned.stderr


def test_a_sweep_that_is_done_is_shown_without_its_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open("docs/results/pacs/records.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    command = json.loads(Path("docs/results/pacs/results.json").read_text())["command now"]
    weights = "/weights/tf_efficientnet_lite0.safetensors"  # where they were
    given = [*shlex.split(command)[1:], "--root", "/data", "--weights", weights, "--out", "pacs"]
    monkeypatch.chdir(tmp_path)
    done = typed(*given)
    assert done.exit_code == 0, done.stderr
    assert "83.2 ± 0.3 (88.2)" in done.stdout
    assert (tmp_path / "pacs/results.json").exists()
