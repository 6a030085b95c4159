"""The curvature of a run: the right loss, images, weights and numbers, and a file that is whole."""

import io
import json
import logging
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from steppe import console
from steppe.console import Console, Meter
from steppe.curvature import Progress
from steppe.domains import load
from steppe.domains.batches import Sampling
from steppe.domains.splits import seed_hash, split_indices
from steppe.errors import RunError, UserError
from steppe.measure import Measured, Settings, images, load_measurements, measuring, stored
from steppe.measure.phases import Phases
from steppe.measure.stored import VOLATILE, measurement_file, measurement_name
from steppe.training import RunDirectory, backbones, checkpoint, load_model, make_config, train
from steppe.training.setup import open_data

DIGITS = {
    "dataset": "RotatedDigits",
    "targets": ["75"],
    "sources": ["0", "30"],
    "trial_seed": 1,
    "optimizer": {"name": "sgd", "lr": 0.05},
    "steps": 12,
    "checkpoint_every": 4,
    "batch_size": 8,
    "device": "cpu",
}
QUICK: dict[str, Any] = {
    "top": 1,
    "images": 12,
    "tol": 0.1,
    "trace_rtol": 1.0,
    "batch_size": 256,
}


def measure_run(run: Path, meter: Meter | None = None, device: str = "cpu", **settings: Any) -> Any:
    return measuring.measure_run(run, Settings(**settings), device=device, meter=meter)


def tiny_cnn(channels: int, image_size: int) -> nn.Sequential:
    """So few parameters that the Hessian can be written out."""
    conv = nn.Conv2d(channels, 2, 3, stride=3, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(2), nn.Softplus(), nn.Flatten())


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backbones, "_small_cnn", tiny_cnn)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curvature") / "run"
    train(make_config(DIGITS), folder)
    return folder


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ascents of few steps, where their values do not matter."""
    few = partial(measuring.flatness, restarts=1, steps=2)
    monkeypatch.setattr(measuring, "flatness", few)


@pytest.fixture
def run(trained: Path, tmp_path: Path, hasty: None) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="module")
def measured(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(trained, tmp_path_factory.mktemp("measured") / "run"))
    measure_run(folder, **QUICK)
    return folder


class Dense:
    """The loss of some images, differentiated in full, in float64."""

    def __init__(self, run: Path, images: dict[str, Any], which: Any = "last") -> None:
        domains = {domain.name: domain for domain in load("RotatedDigits").domains}
        pixels = [domains[n].images.pixels[chosen] for n, chosen in images.items()]
        labels = [domains[n].labels[chosen] for n, chosen in images.items()]
        x = torch.from_numpy(np.concatenate(pixels)).permute(0, 3, 1, 2)
        y = torch.from_numpy(np.concatenate(labels))
        model = load_model(run, which).double()
        shapes = {name: p.shape for name, p in model.named_parameters()}

        def loss(theta: torch.Tensor) -> torch.Tensor:
            pieces = theta.split([shape.numel() for shape in shapes.values()])
            named = {n: p.view(shapes[n]) for n, p in zip(shapes, pieces, strict=True)}
            logits = functional_call(model, named, (x,))
            return -logits.log_softmax(1)[torch.arange(len(y)), y].mean()

        self.loss = loss
        self.theta = torch.cat([p.detach().flatten() for p in model.parameters()])

    def gradient(self) -> torch.Tensor:
        return torch.autograd.functional.jacobian(self.loss, self.theta)

    def hessian(self) -> torch.Tensor:
        return torch.autograd.functional.hessian(self.loss, self.theta)


def split_by_hand(name: str, trial_seed: int = 1) -> Any:
    """DomainBed's training part of a domain of RotatedDigits."""
    domains = load("RotatedDigits").domains
    at = [domain.name for domain in domains].index(name)
    return split_indices(len(domains[at]), 0.2, seed_hash(trial_seed, at))[0]


def test_values_are_those_of_the_dense_hessian(trained: Path, tmp_path: Path) -> None:
    """All of the training split of the sources, in float64: rounding is all that may differ."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    found = measure_run(
        run, top=6, images=0, precision="float64", tol=1e-9, rho=0.1, batch_size=100
    )
    oracle = Dense(run, {name: split_by_hand(name) for name in ("0", "30")})
    hessian, gradient = oracle.hessian(), oracle.gradient()
    values = torch.linalg.eigvalsh(hessian).flip(0)
    assert found.parameters == len(values) == 112
    assert found.eigenvalues.converged
    torch.testing.assert_close(
        torch.tensor(found.eigenvalues.values, dtype=torch.float64), values[:6], rtol=1e-8, atol=0
    )
    assert 0 < max(found.eigenvalues.residuals) <= 1e-9 * values[0]
    assert found.lambda_max == found.eigenvalues.values[0]
    assert found.loss == pytest.approx(float(oracle.loss(oracle.theta)), rel=1e-12)
    assert found.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-10)
    trace = found.trace
    assert trace.converged
    assert 0 < trace.stderr <= 0.02 * trace.value
    assert abs(trace.value - float(hessian.trace())) < 4 * trace.stderr
    assert trace.low < trace.value < trace.high
    # SAM's step, and the two definitions that hold whatever an ascent finds.
    flat = found.flatness
    ahead = oracle.theta + 0.1 * gradient / gradient.norm()
    risen = float(oracle.loss(ahead) - oracle.loss(oracle.theta))
    assert flat.zeroth_one_step == pytest.approx(risen, rel=1e-8)
    assert flat.zeroth >= flat.zeroth_one_step > 0
    assert flat.first >= flat.first_one_step > 0
    assert flat.first >= 0.1 * float(gradient.norm())
    assert (flat.rho, flat.alpha) == (0.1, 0.5)
    assert flat.fad == pytest.approx(0.5 * (flat.zeroth + flat.first))
    assert flat.lambda_max == pytest.approx(flat.fad / (0.01 * 0.75))
    assert found.density is None
    assert load_measurements(run) == {"train": found}


def test_all_eigenvalues_give_the_trace_exactly(run: Path) -> None:
    found = measure_run(run, **{**QUICK, "top": 112}, precision="float64", density=True)
    assert found.trace.value == pytest.approx(sum(found.eigenvalues.values), rel=1e-12)
    assert (found.trace.stderr, found.trace.low) == (0.0, found.trace.high)
    density = found.density
    assert density is not None
    # A density: its integral is 1, and its mean that of the eigenvalues, up to the four probes.
    assert min(density.values) >= 0
    assert np.trapezoid(density.values, density.grid) == pytest.approx(1, abs=0.01)
    mean = np.trapezoid(np.multiply(density.values, density.grid), density.grid)
    assert mean == pytest.approx(found.trace.value / 112, rel=0.3)


def test_the_training_images_are_those_trained_on(run: Path, monkeypatch, tmp_path) -> None:
    seen: dict[str, set[int]] = {"0": set(), "30": set()}
    draw = Sampling.draw

    def watched(self: Sampling, split: Any, step: int) -> Any:
        chosen, draws = draw(self, split, step)
        seen[split.domain.name].update(chosen.tolist())
        return chosen, draws

    monkeypatch.setattr(Sampling, "draw", watched)
    train(make_config(DIGITS), tmp_path / "again")
    drawn, is_training = chosen_images(run, 0)
    assert is_training
    for one in drawn:
        pool = set(one.chosen.tolist())
        assert len(seen[one.domain.name]) > 50
        assert seen[one.domain.name] <= pool
        assert sorted(one.chosen) == sorted(split_by_hand(one.domain.name))
    facts = json.loads((run / "data.json").read_text())["images"]
    assert [one.sample.of for one in drawn] == [facts[n]["train"] for n in ("0", "30")]


def chosen_images(run: Path, count: int = 12, seed: int = 0) -> Any:
    dataset, splits = open_data(RunDirectory(run).config())
    return images.draw(dataset, splits, None, count, seed)


def test_images_are_drawn_evenly_by_the_seed_and_not_by_their_labels(run: Path) -> None:
    one, two, other = (chosen_images(run, n, seed)[0] for n, seed in ((13, 0), (40, 0), (13, 1)))
    assert [len(d.chosen) for d in one] == [6, 7]
    for few, many, others in zip(one, two, other, strict=True):
        assert few.chosen.tolist() == many.chosen[: len(few.chosen)].tolist()
        assert few.chosen.tolist() != others.chosen.tolist()
        assert len(set(many.chosen.tolist())) == 20
    # Seven of ten classes at random: not the first ones of a file, sorted by class.
    dataset, splits = open_data(RunDirectory(run).config())
    for domain in dataset.domains:
        domain.labels.sort()
    again = images.draw(dataset, splits, None, 13, 0)[0]
    assert [d.chosen.tolist() for d in again] == [d.chosen.tolist() for d in one]


@pytest.mark.parametrize(
    ("names", "which", "file", "samples"),
    [
        (["30", "0"], "last", "train", [("0", "train", 240), ("30", "train", 240)]),
        (["30"], "best", "30@best", [("30", "train", 240)]),
        (["75"], "last", "75", [("75", "all", 299)]),
        (["75", "0"], "last", "0+75", [("0", "train", 240), ("75", "all", 299)]),
        (["45"], "last", "45", [("45", "all", 299)]),  # neither source nor target
    ],
)
def test_domains_and_files(run: Path, names, which, file, samples) -> None:
    found = measure_run(run, **{**QUICK, "images": 0}, domains=names, which=which)
    assert [(s.domain, s.part, s.images) for s in found.domains] == samples
    assert all(sample.of == sample.images for sample in found.domains)
    assert [path.name for path in (run / "curvature").iterdir()] == [f"{file}.json"]
    assert found.images == sum(count for *_, count in samples)
    seen = {n: split_by_hand(n) if p == "train" else np.arange(k) for n, p, k in samples}
    oracle = Dense(run, seen, which)
    assert found.loss == pytest.approx(float(oracle.loss(oracle.theta)), rel=1e-5)
    assert found.weights.which == which
    assert load_measurements(run) == {file: found}


def test_names_never_meet() -> None:
    sets = [None, ["train"], ["train", "a"], ["a", "b"], ["a+b"], ["a/b"], ["..", "a"], ["a@best"]]
    names = [measurement_name(domains, which) for domains in sets for which in ("last", "best")]
    names += [measurement_name([c * 300], "best") for c in "xy"]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) < 200 for name in names)


def test_the_same_seed_gives_the_same_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written() -> dict[str, Any]:
        values = json.loads(measurement_file(run, "train").read_text())
        assert all(values.pop(key) for key in VOLATILE)
        return values

    options = {**QUICK, "images": 40, "batch_size": 16}
    measure_run(run, **options)
    first = written()
    # Too many to hold: read anew in every pass, the same.
    monkeypatch.setattr(measuring, "HELD", 0)
    measure_run(run, **options)
    assert written() == first
    measure_run(run, **options, seed=1)
    assert written()["loss"] != first["loss"]


@pytest.mark.parametrize("averaging", ["sma", "swad"])
def test_averaged_runs_are_measured_at_their_average(tmp_path: Path, averaging, hasty) -> None:
    options = {"sma": {"start": 2}, "swad": {"every": 2, "n_converge": 2, "n_tolerance": 2}}
    train(make_config({**DIGITS, "averaging": {"name": averaging, **options[averaging]}}), tmp_path)
    found = measure_run(tmp_path, **{**QUICK, "images": 0}, precision="float64")
    oracle = Dense(tmp_path, {name: split_by_hand(name) for name in ("0", "30")})
    assert found.loss == pytest.approx(float(oracle.loss(oracle.theta)), rel=1e-12)
    assert found.weights.averaged
    # What the run would go on from is something else.
    raw = checkpoint.load_last(tmp_path / "checkpoint")
    assert raw is not None
    weights = raw.model["network.classifier.weight"]
    assert not torch.equal(weights, load_model(tmp_path).algorithm.network.classifier.weight)


def test_an_adversarys_parameters_are_not_counted(tmp_path: Path, hasty: None) -> None:
    train(make_config({**DIGITS, "steps": 3, "algorithm": "DANN"}), tmp_path)
    assert sum(p.numel() for p in load_model(tmp_path).parameters()) > 112
    assert measure_run(tmp_path, **QUICK).parameters == 112


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"name": "adam"}, (0.05, 0.5)),
        ({"name": "sam", "rho": 0.2}, (0.2, 0.5)),
        ({"name": "sam", "rho": 0.2, "adaptive": True}, (0.05, 0.5)),  # relative to the weights
        ({"name": "asam", "rho": 0.2}, (0.05, 0.5)),
        ({"name": "gam", "rho": 0.3, "alpha": 2.0}, (0.3, 0.5)),  # a weight, not Eq. 3's share
        ({"name": "fad", "rho": 0.4, "alpha": 0.7}, (0.4, 0.7)),
    ],
)
def test_the_radius_is_the_optimizers_own(run: Path, optimizer, expected) -> None:
    config = make_config({**DIGITS, "optimizer": optimizer})
    (run / "config.json").write_text(config.to_json())
    flat = measure_run(run, **QUICK).flatness
    assert (flat.rho, flat.alpha) == expected
    flat = measure_run(run, **QUICK, rho=0.01, alpha=0.25).flatness
    assert (flat.rho, flat.alpha) == (0.01, 0.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domains": ["76"]}, "unknown domain .* '76'. Known: 0, 15, 30, .*trained on: 0, 30"),
        ({"domains": ["75", "75"]}, "'75' is listed twice"),
        ({"domains": []}, "no domain given"),
        ({"top": 0}, "top must be >= 1, got 0"),
        ({"top": 113}, "top=113 is more than the model's 112 parameters"),
        ({"images": -1}, "images must be >= 0, got -1"),
        ({"images": 1}, "images=1 is too few for 2 domains"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"precision": "half"}, "unknown precision 'half'"),
        ({"precision": "tf32"}, "precision=tf32 needs a GPU: on a CPU, use float32"),
        ({"which": "first"}, "which='first'"),
        ({"rho": 0.0}, "rho must be positive and finite, got 0.0"),
        ({"alpha": 1.5}, "alpha must be from 0 to 1, got 1.5"),
        ({"tol": 0.0}, "tol must be > 0, got 0.0"),
        ({"trace_rtol": -1.0}, "trace_rtol must be > 0, got -1.0"),
        ({"device": "abacus"}, "'abacus' cannot be used"),
    ],
)
def test_bad_input(run: Path, monkeypatch, options: dict[str, Any], message: str) -> None:
    monkeypatch.setattr(measuring, "top_eigenvalues", lambda *_: pytest.fail("too late"))
    with pytest.raises(UserError, match=message):
        measure_run(run, **{**QUICK, **options})
    assert load_measurements(run) == {}


@pytest.mark.gpu
def test_tf32_finds_what_float32_finds(run: Path) -> None:
    options = {**QUICK, "top": 5, "tol": 1e-3, "device": "cuda"}
    exact = measure_run(run, **options)
    found = measure_run(run, **options, precision="tf32")
    assert (found.precision, found.eigenvalues.converged) == ("float32", True)
    allowed = 2e-3 * exact.lambda_max
    pairs = zip(found.eigenvalues.values, exact.eigenvalues.values, strict=True)
    assert all(abs(ours - theirs) <= allowed for ours, theirs in pairs)


def test_other_images_than_those_trained_on_are_refused(run: Path) -> None:
    facts = json.loads((run / "data.json").read_text())
    (run / "data.json").write_text(json.dumps({**facts, "fingerprint": "another"}))
    with pytest.raises(UserError, match="not those that .* was trained on"):
        measure_run(run, **QUICK)


def test_unfinished_runs(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "steppe"):
        measure_run(run, **QUICK)
        assert not caplog.messages
        (run / "state").write_text("running\n")
        assert measure_run(run, **QUICK).weights.step == 11
    (message,) = caplog.messages
    assert "not finished (running): measuring its weights after step 11" in message
    shutil.rmtree(run / "checkpoint")
    with pytest.raises(UserError, match="no checkpoint yet"):
        measure_run(run, **QUICK)


def test_what_has_not_converged_is_told(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "steppe"), pytest.MonkeyPatch.context() as patch:
        solve = measuring.top_eigenvalues
        patch.setattr(
            measuring, "top_eigenvalues", lambda *a, **k: solve(*a, **k, max_products=3, verify=0)
        )
        found = measure_run(run, **{**QUICK, "top": 3, "tol": 1e-12})
    assert not found.eigenvalues.converged
    assert "not all eigenvalues converged after 3 products" in caplog.text
    assert not load_measurements(run)["train"].eigenvalues.converged


def _changed(text: str, **changes: Any) -> str:
    """A measurement with other eigenvalues."""
    values = json.loads(text)
    return json.dumps({**values, "eigenvalues": {**values["eigenvalues"], **changes}})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "train.json is damaged"),
        (lambda text: "[]", "train.json is damaged"),
        (lambda text: text.replace('"loss":', '"lost":'), "train.json is damaged"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "newer steppe.*format 2"),
        (lambda text: b"\xff\xfe", "train.json is damaged"),
        (lambda text: "[" * 100_000, "train.json is damaged"),
        (lambda text: text.replace('"name": "train"', '"name": "75"'), "it belongs to 75"),
        (lambda text: text.replace('"version": 1', '"version": 0'), "unknown format 0"),
        (lambda text: text.replace('"version": 1', '"version": "1"'), "train.json is damaged"),
        (lambda text: _changed(text, values=[1.0, 2.0]), "not in descending order"),
        (lambda text: _changed(text, values=[2.0, float("nan")]), "damaged"),
        (lambda text: _changed(text, residuals=[]), "has a residual"),
        (lambda text: _changed(text, values=["2.0", "1.0"]), "train.json is damaged"),
    ],
)
def test_damaged_files_are_named(measured: Path, damage: Any, message: str) -> None:
    path = measurement_file(measured, "train")
    text = path.read_text()
    damaged = damage(text)
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    with pytest.raises(UserError, match=message):
        load_measurements(measured)
    path.write_text(text)
    assert set(load_measurements(measured)) == {"train"}


def test_a_damaged_measurement_is_made_again(run: Path) -> None:
    path = measurement_file(run, "train")
    path.parent.mkdir()
    path.write_text("[]")
    measure_run(run, **QUICK)
    assert set(load_measurements(run)) == {"train"}


def test_an_interrupt_or_a_full_disk_leaves_what_was_there(run: Path, monkeypatch) -> None:
    before = measure_run(run, **QUICK)

    class Interrupting(Watched):
        def update(self, done: float, *, title: str | None = None, **more: Any) -> None:
            if title == "flatness":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_run(run, **QUICK, seed=1, meter=Interrupting())

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(stored, "replace", full)
    with pytest.raises(RunError, match="train.json could not be written: No space left"):
        measure_run(run, **QUICK, seed=1)
    assert [path.name for path in (run / "curvature").iterdir()] == ["train.json"]
    assert load_measurements(run) == {"train": before}


def test_a_folder_that_cannot_be_written_is_found_out_first(run: Path, monkeypatch) -> None:
    (run / "curvature").write_text("in the way")
    monkeypatch.setattr(measuring, "top_eigenvalues", lambda *_: pytest.fail("too late"))
    with pytest.raises(UserError, match="is not writable"):
        measure_run(run, **QUICK)


KILLED = """
import os, signal, sys
from steppe.training import backbones
from tests.measure.test_measuring import QUICK, measure_run, tiny_cnn

backbones._small_cnn = tiny_cnn
os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
measure_run(sys.argv[1], **QUICK, seed=1)
"""


def test_kill_9_leaves_the_run_usable_and_no_half_file(run: Path) -> None:
    before = measure_run(run, **QUICK)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(run)], cwd=Path(__file__).parents[2], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(list((run / "curvature").iterdir())) == 2  # it was in the middle of writing
    assert load_measurements(run) == {"train": before}
    after = measure_run(run, **QUICK, seed=1)
    assert load_measurements(run) == {"train": after}
    records = train(make_config(DIGITS), run, resume=True)
    assert records[-1]["step"] == 11


class Watched(Meter):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__("curvature", 1.0, console=None, unit="share")
        self.told: list[tuple[str, float]] = []

    def update(self, done: float, *, title: str | None = None, **more: Any) -> None:
        self.told.append((str(title), done))
        super().update(done, title=title, **more)


def test_progress_tells_every_phase_and_never_falls(run: Path) -> None:
    meter = Watched()
    measure_run(run, **QUICK, density=True, meter=meter)
    assert list(dict.fromkeys(phase for phase, _ in meter.told)) == [
        "images",
        "eigenvalues",
        "trace",
        "density",
        "flatness",
    ]
    shares = [share for _, share in meter.told]
    assert shares == sorted(shares)
    assert 0 == shares[0] < shares[-1] <= 1


def test_the_time_left_is_that_of_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    out = io.StringIO()
    with Meter("it", 1.0, console=Console(file=out), unit="share") as meter:
        counted = Phases({"a": 1.0, "b": 3.0}, meter)
        report = counted.begin("a")
        now += 10
        report(Progress(0.9, 0, "quiet"))  # a line is due after half a minute
        report = counted.begin("b")
        now += 31
        report(Progress(1 / 3, 0, "half way"))
        now += 31
        report(Progress(0.0, 0, "back"))
    assert out.getvalue().splitlines() == [
        "a: 0% done",
        "b: 25% done, 0:00:30 left",
        "b: 50% done, half way, 0:00:41 left",
        "b: 50% done, back, 0:01:12 left",
    ]


def test_a_bar_on_a_terminal() -> None:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=120)
    with Meter("it", 1.0, console=terminal, unit="share") as meter:
        Phases({"trace": 1.0}, meter).begin("trace")(Progress(0.5, 0, "trace 3 ± 1"))
        assert meter._bar is not None
        meter._bar.refresh()
    assert "50% done, trace 3 ± 1, 0:00:00 left" in out.getvalue()


def test_a_record_holds_plain_finite_numbers(run: Path) -> None:
    found = measure_run(run, **QUICK)
    assert isinstance(found, Measured)

    def numbers(value: Any) -> Iterator[float]:
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, dict | list):
                yield from numbers(item)
            elif isinstance(item, float):
                yield item

    assert all(map(math.isfinite, numbers(json.loads(json.dumps(found.to_json())))))
    assert found.products >= 11  # at least one of Lanczos', and ten of the trace


def test_a_run_of_a_sweep_and_what_is_replaced(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A finished run of a sweep lies in a folder of its own, below that of its events.
    shutil.copytree(run, tmp_path / "job" / "result")
    with caplog.at_level(logging.INFO, "steppe"):
        found = measure_run(tmp_path / "job", **QUICK)
        assert "replaces" not in caplog.text
        assert load_measurements(tmp_path / "job" / "result")["train"] == found
        measure_run(tmp_path / "job", **{**QUICK, "images": 8})
    assert f"replacing the measurement of {found.date}: 1 eigenvalues, 12 images" in caplog.text
