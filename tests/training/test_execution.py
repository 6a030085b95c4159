"""The engine changes how fast a run is, and nothing else: not what is learned, and it says what it
does without."""

from pathlib import Path
from typing import Any

import pytest
import torch

from steppe.algorithms import algorithm_names, algorithm_spec
from steppe.domains.batches import Batch
from steppe.optim import LookSAM, optimizer_names
from steppe.training import RunDirectory, execution, make_config, train
from steppe.training.execution import MOST_GRAPHS, WARM_UP, _Preparation, _settings, choose_gears
from steppe.training.precision import resolve
from steppe.training.processes import Processes
from steppe.training.trainer import Trainer
from steppe.training.update import take_up
from tests.replays import PretendedReplay

from .axes import OPTIONS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DIGITS = {
    "dataset": "RotatedDigits",
    "sources": ["0", "30", "45"],
    "targets": ["75"],
    "batch_size": 8,
    "steps": 50,
    "checkpoint_every": 50,
    "dropout": 0.0,
}
TOLERANCE = {"fp32": 2e-3, "tf32": 0.05, "fp16": 0.05, "bf16": 0.3}
"""How far apart two runs of 50 steps may end, over how far they went. Rounding differs in the last
bit of a precision, and training multiplies it."""


CHAOTIC = 0.2
"""For ARM: it makes 0.03 of a change of its first weights by 1e-7, within a dozen steps."""
ORDERED_ANEW = {"MLDG", "MASF", "Fish", "MixStyle", "pAdaIN"}
"""They order domains, or choose layers, anew in every step, so nothing can be captured."""
SECOND_ORDER = {"adahessian", "gam-exact"}
NOISY = {"rwp", "gga-l"}
ON_THE_HOST = {"yogi", "adabelief", "genie"}
"""Their own step needs the host, so only the passes are captured."""


def trainer(tmp_path: Path, **options: Any) -> Trainer:
    config = make_config({**DIGITS, **options})
    device = torch.device(config.device if config.device != "auto" else "cpu")
    number_format = resolve(config.precision, device, config.optimizer)
    return Trainer(config, RunDirectory(tmp_path), Processes(device), number_format)


def trained(tmp_path: Path, steps: int, **options: Any) -> tuple[Trainer, torch.Tensor]:
    """A trainer after some steps, and how far its weights have moved."""
    run = trainer(tmp_path, **options)
    start = torch.cat([p.detach().flatten().clone() for p in run.algorithm.parameters()])
    for batches in run.store.training(run.sampling, 0, steps):
        run.step(batches)
    end = torch.cat([p.detach().flatten() for p in run.algorithm.parameters()])
    return run, (end - start).double().cpu()


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


def test_steps_that_visit_other_points_are_captured_apart() -> None:
    """LookSAM's first of three steps is SAM's; nothing else that a graph holds differs."""
    w = torch.nn.Parameter(torch.ones(3))
    opt = LookSAM(torch.optim.SGD([w], lr=0.1, momentum=0.9, fused=True), k=3)
    keys = []
    for _ in range(6):
        keys.append(_settings(opt))
        opt.step(lambda: (w**4).sum().backward())
    assert keys[0] == keys[3] != keys[1] == keys[2] == keys[4] == keys[5]


@pytest.mark.parametrize(
    ("engine", "device", "size", "needs_graph", "world", "compiled", "captured", "why"),
    [
        ("auto", CPU, 224, False, 1, False, False, ""),
        ("off", CUDA, 224, False, 1, False, False, ""),
        ("auto", CUDA, 224, False, 1, True, True, ""),
        ("auto", CUDA, 28, False, 1, False, True, "too small"),
        ("graph", CUDA, 28, False, 1, True, True, ""),
        ("compile", CUDA, 224, False, 1, True, False, ""),
        ("compile", CPU, 8, False, 1, True, False, ""),
        ("graph", CPU, 8, False, 1, True, False, "a CPU has no CUDA graphs"),
        ("auto", CUDA, 224, True, 1, False, False, "differentiates twice"),
        ("auto", CUDA, 224, False, 2, True, False, "across processes"),
        ("auto", torch.device("mps"), 224, False, 1, False, False, ""),
    ],
)
def test_gears(
    engine: str,
    device: torch.device,
    size: int,
    needs_graph: bool,
    world: int,
    compiled: bool,
    captured: bool,
    why: str,
) -> None:
    found = choose_gears(engine, device, size, needs_graph=needs_graph, world=world)
    assert (found.compiled, found.captured) == (compiled, captured)
    assert bool(found.reasons) == bool(why)
    assert all(why in reason for reason in found.reasons)


@pytest.mark.parametrize("optimizer", ["fad", "adam"])
def test_compiled_code_learns_the_same(tmp_path: Path, optimizer: str) -> None:
    _, plain = trained(tmp_path / "plain", 50, optimizer=optimizer, device="cpu", engine="off")
    run, compiled = trained(tmp_path, 50, optimizer=optimizer, device="cpu", engine="compile")
    assert run.engine.gear == "compiled"
    assert not run.engine.reasons
    assert apart(plain, compiled) < TOLERANCE["fp32"]


@pytest.mark.parametrize(("draw", "batch_sizes"), [(3, (6, 8, 17)), (None, (8, 8))])
def test_two_compilations_serve_every_batch_size_and_run(
    tmp_path: Path, draw: int | None, batch_sizes: tuple[int, ...]
) -> None:
    """All sizes that a search draws share one; a run by itself has one for its own size."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    options = {"draw": draw, "device": "cpu", "engine": "compile"}
    for batch_size in batch_sizes:  # from 16 images on: a CPU has other convolutions for fewer
        run, _ = trained(tmp_path, 2, batch_size=batch_size, **options)
        assert run.algorithm.network.compiled is not None
        assert run.algorithm.network.compiled.batch == (None if draw else 3 * batch_size)
        with run._evaluation_mode(), torch.no_grad():
            for images in (64, 33, 1):
                run._predict(torch.zeros(images, 1, 8, 8, dtype=torch.uint8))
    assert counters["stats"]["unique_graphs"] == 2, "one for training and one for evaluation"


def test_an_evaluation_before_training_does_not_change_it(tmp_path: Path) -> None:
    """As in a run that is resumed in the middle of one: the code that trains is the same."""
    from torch._dynamo.utils import counters

    moved = []
    for first in (False, True):
        torch._dynamo.reset()
        counters.clear()
        run = trainer(tmp_path, optimizer="sgd", device="cpu", engine="compile")
        if first:
            with run._evaluation_mode(), torch.no_grad():
                run._predict(torch.zeros(33, 1, 8, 8, dtype=torch.uint8))
        start = [p.detach().clone() for p in run.algorithm.parameters()]
        for batches in run.store.training(run.sampling, 0, 10):
            run.step(batches)
        ends = zip(run.algorithm.parameters(), start, strict=True)
        moved.append(torch.cat([(p.detach() - s).flatten() for p, s in ends]))
    assert torch.equal(*moved)


# Torch's compiler looks at it where the images have a gradient, as ARM's have.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("algorithm", algorithm_names())
def test_every_algorithm_with_compiled_code(tmp_path: Path, algorithm: str) -> None:
    own = {key: value for key, value in OPTIONS.get(algorithm, {}).items() if key != "dropout"}
    options = {"algorithm": {"name": algorithm, **own}, "optimizer": "sgd", "device": "cpu"}
    _, plain = trained(tmp_path, 2, engine="off", **options)
    run, compiled = trained(tmp_path, 2, engine="compile", **options)
    assert apart(plain, compiled) < (CHAOTIC if algorithm == "ARM" else TOLERANCE["fp32"])
    assert run.engine.compiled != algorithm_spec(algorithm).cls.differentiates, run.engine.reasons


def test_a_state_from_another_device(tmp_path: Path) -> None:
    """How kernels are launched, and how memory is laid out, are the new optimizer's."""
    saved = torch.optim.Adam([p := torch.nn.Parameter(torch.randn(2, 3, 4, 4))], fused=True)
    p.data = p.data.contiguous(memory_format=torch.channels_last)
    p.grad = torch.randn_like(p)
    saved.step()
    fresh = torch.optim.Adam([q := torch.nn.Parameter(torch.randn(2, 3, 4, 4))], lr=0.5)
    take_up(fresh, saved.state_dict())
    assert not fresh.param_groups[0]["fused"]
    assert fresh.param_groups[0]["lr"] == 1e-3, "what is computed is the saved one's"
    assert fresh.state[q]["exp_avg"].stride() == q.stride() != p.stride()
    assert torch.equal(fresh.state[q]["exp_avg"], saved.state[p]["exp_avg"])


def test_goes_on_without_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no compiler here")

    torch._dynamo.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
    with caplog.at_level("INFO", logger="steppe"):
        run, moved = trained(tmp_path, 5, optimizer="fad", device="cpu", engine="compile")
    torch._dynamo.reset()
    _, plain = trained(tmp_path, 5, optimizer="fad", device="cpu", engine="off")
    assert torch.equal(moved, plain), "the step that failed left no trace"
    assert run.engine.gear == "eager"
    assert len(run.engine.reasons) == 1
    assert "no compiler here" in run.engine.reasons[0]
    assert caplog.text.count("not compiled") == 1


def test_one_that_differentiates_twice_is_not_compiled(tmp_path: Path) -> None:
    run = trainer(tmp_path, optimizer="adahessian", device="cpu", engine="compile")
    assert run.engine.gear == "eager"
    assert "differentiates twice" in run.engine.reasons[0]


def test_the_log_tells_the_gear(tmp_path: Path) -> None:
    train(make_config({**DIGITS, "steps": 2, "device": "cpu", "engine": "graph"}), tmp_path)
    text = (tmp_path / "log.txt").read_text()
    assert "fp32, cpu, compiled" in text
    assert "not captured: a CPU has no CUDA graphs" in text
    assert "on the host, transformed by Pillow" in text


def test_a_run_from_before_there_was_an_engine(tmp_path: Path) -> None:
    config = make_config({**DIGITS, "version": 2})
    assert config.engine == "off"
    assert make_config(DIGITS).engine == "auto"


def test_a_captured_preparation_is_that_of_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "Replay", PretendedReplay)
    run = trainer(tmp_path, accumulate=2)
    batches = list(run.store.training(run.sampling, 0, 5))
    preparation = _Preparation(run._prepare, batches[0])
    places = set()
    for step in batches:
        own = [Batch(images.clone(), labels.clone()) for images, labels in step]
        for found, expected in zip(preparation(step), run._prepare(own), strict=True):
            assert torch.equal(found.images, expected.images)
            assert torch.equal(found.labels, expected.labels)
            assert found.sizes == expected.sizes
        if preparation.standing is not None:
            places.add(preparation.standing[0].images.data_ptr())
        for mine, before in zip(step, own, strict=True):
            assert torch.equal(mine.images, before.images), "the batches are left alone"
    assert len(places) == 1
    fewer = [Batch(images[:4], labels[:4]) for images, labels in batches[0]]
    assert preparation(fewer)[0].sizes == (2, 2, 2)


@pytest.mark.parametrize(
    ("options", "draws"),
    [
        ({}, False),
        ({"algorithm": "RSC"}, False),
        ({"algorithm": "Mixup"}, True),
        ({"algorithm": "DANN"}, True),
        ({"dropout": 0.1}, True),
    ],
)
def test_what_draws_is_prepared_step_by_step(
    tmp_path: Path, options: dict[str, Any], draws: bool
) -> None:
    assert trainer(tmp_path, **options)._draws == draws


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("optimizer", ["fad", "sam", "adam", "yogi"])
@pytest.mark.filterwarnings("ignore::steppe.optim.Bfloat16Warning")
def test_captured_updates_learn_the_same(tmp_path: Path, optimizer: str, precision: str) -> None:
    options = {"optimizer": optimizer, "device": "cuda", "precision": precision}
    _, plain = trained(tmp_path, 50, engine="off", **options)
    run, fast = trained(tmp_path, 50, engine="graph", **options)
    assert run.engine.captured
    assert not run.engine.reasons
    (graph,) = run.engine._graphs.values()
    assert graph.whole == (optimizer != "yogi"), "Yogi counts its steps on the host"
    # Yogi's second moment goes up or down by a sign: in fp16 its eager runs end 0.73 from fp32's.
    loose = (optimizer, precision) == ("yogi", "fp16")
    assert apart(plain, fast) < (CHAOTIC if loose else TOLERANCE[precision])


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", optimizer_names())
def test_every_optimizer_is_captured_or_says_why_not(tmp_path: Path, optimizer: str) -> None:
    options = {"optimizer": optimizer, "device": "cuda", "precision": "fp32"}
    _, plain = trained(tmp_path, 20, engine="off", **options)
    run, fast = trained(tmp_path, 20, engine="auto", **options)
    assert apart(plain, fast) < TOLERANCE["fp32"]
    reasons = "; ".join(run.engine.reasons)
    if optimizer in SECOND_ORDER:
        assert "differentiates twice" in reasons
    elif optimizer in NOISY:
        assert "not captured: the optimizer draws noise" in reasons
    else:
        assert "not captured" not in reasons
        graphs = run.engine._graphs.values()
        assert len(graphs) == (2 if optimizer == "looksam" else 1)
        assert {graph.whole for graph in graphs} == {optimizer not in ON_THE_HOST}


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", algorithm_names())
@pytest.mark.parametrize("optimizer", ["fad", "adam"])
def test_every_algorithm_under_the_engine(tmp_path: Path, algorithm: str, optimizer: str) -> None:
    """Without dropout, whatever gear it ends in."""
    own = {key: value for key, value in OPTIONS.get(algorithm, {}).items() if key != "dropout"}
    if "anneal_steps" in own:
        own["anneal_steps"] = 2 * WARM_UP + 1  # when there is something captured to forget
    options = {
        "algorithm": {"name": algorithm, **own},
        "optimizer": {"name": optimizer, "lr": 1e-3},
        "device": "cuda",
        "precision": "fp32",
    }
    _, plain = trained(tmp_path, 12, engine="off", **options)
    run, fast = trained(tmp_path, 12, engine="auto", **options)
    assert apart(plain, fast) < (CHAOTIC if algorithm == "ARM" else TOLERANCE["fp32"])
    if algorithm not in ORDERED_ANEW:
        assert run.engine.captured, run.engine.reasons


@pytest.mark.gpu
def test_a_ratio_has_two_kinds_of_step(tmp_path: Path) -> None:
    options = {"optimizer": {"name": "fad", "ratio": 0.5}, "device": "cuda", "precision": "fp32"}
    _, plain = trained(tmp_path, 50, engine="off", **options)
    run, fast = trained(tmp_path, 50, engine="auto", **options)
    assert len(run.engine._graphs) == 2
    assert apart(plain, fast) < TOLERANCE["fp32"]


@pytest.mark.gpu
def test_a_new_learning_rate_is_not_the_captured_one(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, WARM_UP + 2, optimizer="fad", device="cuda", precision="fp32")
    assert len(run.engine._graphs) == 1
    for group in run.optimizers["main"].param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in run.algorithm.parameters()]
    for batches in run.store.training(run.sampling, 0, WARM_UP + 2):
        run.step(batches)
    assert len(run.engine._graphs) == 2
    assert all(map(torch.equal, before, run.algorithm.parameters()))


@pytest.mark.gpu
def test_hyper_parameters_that_never_stay(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, WARM_UP + 2, optimizer="fad", device="cuda", precision="fp32")
    batches = next(run.store.training(run.sampling, 0, 1))
    for i in range(MOST_GRAPHS + 2):
        for group in run.optimizers["main"].param_groups:
            group["lr"] = 1e-3 + 1e-4 * i
        run.step(batches)
    assert not run.engine.captured
    assert "differ too often" in run.engine.reasons[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "fad"])
def test_an_overflow_skips_the_captured_step(tmp_path: Path, optimizer: str) -> None:
    run, _ = trained(tmp_path, 10, optimizer=optimizer, device="cuda", precision="fp16")
    assert run.engine.captured
    assert run.scaler is not None
    before = [p.detach().clone() for p in run.algorithm.parameters()]
    scale = run.scaler.get_scale()
    run.scaler._scale.fill_(2.0**60)  # type: ignore[union-attr]
    batches = next(run.store.training(run.sampling, 0, 1))
    run.step(batches)
    assert all(map(torch.equal, before, run.algorithm.parameters()))
    assert run.scaler.get_scale() == 2.0**59, "and it backed off"
    run.scaler._scale.fill_(scale)  # type: ignore[union-attr]
    run.step(batches)
    assert not all(map(torch.equal, before, run.algorithm.parameters()))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["fad", "sgd"])
def test_a_first_step_that_is_skipped_leaves_no_momentum(tmp_path: Path, optimizer: str) -> None:
    run = trainer(tmp_path, optimizer=optimizer, device="cuda", precision="fp16")
    assert run.scaler is not None
    run.scaler.scale(torch.ones((), device="cuda"))
    run.scaler._scale.fill_(2.0**60)  # type: ignore[union-attr]
    run.step(next(run.store.training(run.sampling, 0, 1)))
    found = [s["momentum_buffer"] for s in run.optimizers["main"].state.values()]
    assert found
    assert all(not buffer.any() for buffer in found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{"dampening": 0.5}, {"foreach": True}, {"fused": False}],
    ids=["dampening", "foreach", "not fused"],
)
def test_a_base_that_needs_the_host(tmp_path: Path, options: dict[str, Any]) -> None:
    chosen = {"optimizer": {"name": "fad", **options}, "device": "cuda", "precision": "fp16"}
    run, _ = trained(tmp_path, WARM_UP + 3, **chosen)
    assert "needs the host" in run.engine.reasons[-1]


@pytest.mark.gpu
def test_one_that_counts_its_steps_in_its_groups(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_optimizer")
    run, _ = trained(tmp_path, WARM_UP + 4, optimizer="adabelief", device="cuda", precision="fp32")
    assert len(run.engine._graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["fad", "adam", "yogi"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_that_asks_the_host(tmp_path: Path, optimizer: str, precision: str) -> None:
    """A capture that fails leaves no trace: the run goes on as it would have without."""
    options = {"optimizer": optimizer, "device": "cuda", "precision": precision, "dropout": 0.1}
    moved = []
    for engine in ("off", "auto"):
        run = trainer(tmp_path, engine=engine, **options)
        forward = run.algorithm.forward

        def asking(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            losses = forward(*args, **kwargs)
            assert losses.total.item() > 0
            return losses

        run.algorithm.forward = asking  # type: ignore[method-assign]
        start = [p.detach().clone() for p in run.algorithm.parameters()]
        for batches in run.store.training(run.sampling, 0, WARM_UP + 4):
            run.step(batches)
        ends = zip(run.algorithm.parameters(), start, strict=True)
        moved.append(torch.cat([(p.detach() - s).flatten() for p, s in ends]).double())
    assert not run.engine.captured
    assert "not captured: " in run.engine.reasons[-1]
    assert apart(*moved) < TOLERANCE[precision]


@pytest.mark.gpu
def test_random_numbers_inside_the_backbone(tmp_path: Path) -> None:
    run = trainer(tmp_path, optimizer="fad", device="cuda", precision="fp32")
    run.algorithm.network.featurizer.append(torch.nn.Dropout(0.5))
    for batches in run.store.training(run.sampling, 0, 5):
        run.step(batches)
    assert not run.engine.captured
    assert "random numbers" in run.engine.reasons[-1]
