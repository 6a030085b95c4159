"""Accelerate's loop against the plain one of the training guide: the same weights, bit for bit."""

import os
import runpy
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, ParallelismConfig
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from steppe.errors import UserError
from steppe.integrations.accelerate import FlatnessPasses
from steppe.optim import FAD, GAM, SAM, Bfloat16Warning, GAMExact
from tests import processes

ROOT = Path(__file__).parents[2]
METHODS = {
    "fad": FAD,
    "sam": SAM,
    "gam": GAM,
    "every other step": lambda base, **options: FAD(base, ratio=0.5, **options),
    "plain": lambda base, **options: FAD(base, beta=0.0, **options),
}
BATCHES = 7
"""Not a multiple of the accumulation below: the last step of an epoch has a single micro-batch."""


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """Its state is one for the process: the first Accelerator's precision would stay."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def network(dtype=torch.float64):
    torch.manual_seed(0)
    layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
    return nn.Sequential(*layers).to(dtype)


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES * 4, 5, generator=generator, dtype=dtype)
    return DataLoader(TensorDataset(x, torch.arange(len(x)) % 3), batch_size=4, shuffle=True)


def sgd(model, lr=0.3):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def everything(model):
    """Weights and batch-norm statistics."""
    return torch.cat([t.detach().double().flatten() for t in model.state_dict().values()])


def parts(loader, n):
    """The micro-batches of each step."""
    batches = list(loader)
    return [batches[i : i + n] for i in range(0, len(batches), n)]


def plain(opt, model, loader, n=1, *, clip=None, autocast=nullcontext, scaler=None, epochs=2):
    """The loop of the training guide; accelerate divides by `n` even where a step has fewer."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    scaler = scaler or GradScaler("cpu", enabled=False)
    torch.manual_seed(2)
    for _ in range(epochs):
        for micro_batches in parts(loader, n):
            for phase in opt.phases(scaler if scaler.is_enabled() else None):
                with phase:
                    for x, y in micro_batches:
                        with autocast():
                            out = model(x)
                        scaler.scale(F.cross_entropy(out.to(x.dtype), y) / n).backward()
            if clip is not None:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            steps = opt.steps
            scaler.step(opt)
            scaler.update()
            if opt.steps > steps:
                scheduler.step()
    return everything(model)


def accelerated(accelerator, opt, model, loader, *, clip=None, epochs=2):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, opt, loader, scheduler)
    passes = FlatnessPasses(accelerator, model, optimizer)
    torch.manual_seed(2)
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                for _, (x, y) in passes.over(batch):
                    accelerator.backward(F.cross_entropy(model(x).to(x.dtype), y))
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return everything(model)


@pytest.mark.parametrize(
    ("n", "clip"), [(1, None), (3, 0.1)], ids=["plain", "accumulated, clipped"]
)
@pytest.mark.parametrize("name", METHODS)
def test_the_plain_loop(name, n, clip):
    model, other = network(), network()
    expected = plain(METHODS[name](sgd(model), model=model), model, data(), n, clip=clip)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=n)
    opt = METHODS[name](sgd(other))  # told of its model by FlatnessPasses
    assert torch.equal(accelerated(accelerator, opt, other, data(), clip=clip), expected)
    assert opt.steps == 2 * -(-BATCHES // n)


def test_bfloat16():
    model, other = network(torch.float32), network(torch.float32)
    expected = plain(
        FAD(sgd(model), model=model),
        model,
        data(torch.float32),
        3,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16),
    )
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    with pytest.warns(Bfloat16Warning):
        got = accelerated(accelerator, FAD(sgd(other)), other, data(torch.float32))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("clip", [None, 0.1], ids=["free", "clipped"])
@pytest.mark.parametrize("fused", [None, True], ids=["plain", "fused"])
def test_float16(clip, fused):
    """The first steps overflow; they are skipped, and the scheduler waits."""

    def setup():
        model = network(torch.float32)
        base = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, fused=fused)
        # A large xi shows that it is scaled like the gradients are.
        opt = FAD(base, model=model, xi=0.1)
        return model, opt, GradScaler("cpu", init_scale=2.0**22, backoff_factor=0.1)

    model, opt, scaler = setup()
    expected = plain(
        opt,
        model,
        data(torch.float32),
        2,
        clip=clip,
        scaler=scaler,
        autocast=lambda: torch.autocast("cpu", torch.float16),
    )
    assert 4 <= opt.steps < 8  # some were skipped
    model, opt, scaler = setup()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    # It asks for a GPU when told so in its arguments, though torch can do it without.
    accelerator.scaler, accelerator.native_amp = scaler, True
    accelerator.state._mixed_precision = "fp16"
    got = accelerated(accelerator, opt, model, data(torch.float32), clip=clip)
    assert torch.equal(got, expected)


def test_a_saved_state_continues_exactly(tmp_path):
    def start():
        model = network()
        opt = FAD(torch.optim.AdamW(model.parameters(), lr=0.05), rho=lambda t: 0.1 / t, ratio=0.7)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, opt)
        return accelerator, model, optimizer, FlatnessPasses(accelerator, model, optimizer)

    def run(accelerator, model, optimizer, passes, batches):
        for batch in batches:
            for _, (x, y) in passes.over(batch):
                accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()

    torch.manual_seed(3)
    batches = list(data())
    whole = start()
    run(*whole, batches[:3])
    whole[0].save_state(str(tmp_path))
    run(*whole, batches[3:])
    again = start()
    again[0].load_state(str(tmp_path))
    run(*again, batches[3:])
    assert torch.equal(everything(again[1]), everything(whole[1]))
    assert again[2].optimizer.steps == BATCHES


@pytest.mark.parametrize("fails", [False, True], ids=["break", "error"])
def test_leaving_the_passes_restores_the_weights(fails):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    model, optimizer = accelerator.prepare(model, FAD(sgd(model), rho=1.0))
    passes = FlatnessPasses(accelerator, model, optimizer)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    torch.manual_seed(3)
    first, second, *others = list(data())

    def step(batches, stop_at=None):
        for batch in batches:
            with accelerator.accumulate(model):
                for phase, (x, y) in passes.over(batch):
                    if phase.index == stop_at and fails:
                        raise KeyboardInterrupt
                    if phase.index == stop_at:
                        break
                    accelerator.backward(F.cross_entropy(model(x), y))

    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        step([first, second], stop_at=2)
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), before)
    with pytest.raises(RuntimeError, match="needs a closure"):
        optimizer.step()
    step(others[:2])  # without the batches that were given up
    optimizer.step()
    assert passes.optimizer.steps == 1


def test_a_graph_can_be_asked_for():
    """`accelerator.backward` is the caller's, so methods that differentiate gradients work too."""
    model, other = network(), network()
    torch.manual_seed(3)
    batches = list(data())
    opt = GAMExact(sgd(model), model=model)
    for x, y in batches:
        for phase in opt.phases():
            with phase:
                F.cross_entropy(model(x), y).backward(create_graph=True)
        opt.step()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    batches = list(data())
    other, optimizer = accelerator.prepare(other, GAMExact(sgd(other)))
    passes = FlatnessPasses(accelerator, other, optimizer)
    for batch in batches:
        for _, (x, y) in passes.over(batch):
            accelerator.backward(F.cross_entropy(other(x), y), create_graph=True)
        optimizer.step()
    assert torch.equal(everything(other), everything(model))


MODES = {
    "DeepSpeed": ("distributed_type", DistributedType.DEEPSPEED, "torchrun"),
    "Megatron-LM": ("distributed_type", DistributedType.MEGATRON_LM, "torchrun"),
    "XLA": ("distributed_type", DistributedType.XLA, "torchrun"),
    "FSDP": ("distributed_type", DistributedType.FSDP, "fully_shard\\(model\\)"),
    "split": ("parallelism_config", ParallelismConfig(tp_size=2), "torchrun"),
    "fp8": ("mixed_precision", "fp8", "mixed_precision='fp16'"),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_that_compute_something_else_are_refused(mode, monkeypatch):
    attribute, value, remedy = MODES[mode]
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(network(), FAD(sgd(network())))
    monkeypatch.setattr(Accelerator, attribute, value)
    with pytest.raises(UserError, match=f"(?s){mode}.*{remedy}"):
        FlatnessPasses(accelerator, model, optimizer)


def test_other_optimizers_are_refused():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network())
    with pytest.raises(UserError, match="got SGD"):
        FlatnessPasses(accelerator, model, accelerator.prepare(sgd(model)))
    with pytest.raises(UserError, match="This FAD is not prepared"):
        FlatnessPasses(accelerator, model, FAD(sgd(model)))


def test_the_example_is_a_plain_loop():
    """Exactly: the framework adds no arithmetic of its own in float32."""
    example = runpy.run_path(str(ROOT / "examples" / "accelerate_loop.py"))
    got = example["main"](epochs=1, cpu=True, seed=4)

    torch.manual_seed(4)
    domains = [example["tensors"](d) for d in example["load"]("RotatedDigits").domains[:-1]]
    x, y = (torch.cat(each) for each in zip(*domains, strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True)
    model = example["small_cnn"]()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    opt = FAD(base, rho=0.05, alpha=0.5, beta=0.5, model=model)
    steps = parts(loader, 2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=len(steps))
    for micro_batches in steps:
        for phase in opt.phases():
            with phase:
                for images, labels in micro_batches:
                    (F.cross_entropy(model(images), labels) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        scheduler.step()
    assert torch.equal(everything(got), everything(model))


WORLD = 2


def joint(rank=None):
    """Two micro-batches a step, of which each process has its half."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 2, WORLD, 4, 5, generator=generator, dtype=torch.float64)
    y = torch.arange(x[..., 0].numel()).reshape(x.shape[:-1]) % 3
    if rank is None:
        return x.flatten(2, 3), y.flatten(2, 3)
    return x[:, :, rank], y[:, :, rank]


def linear():
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def share(rank, accelerator, perturbation):
    """This process's weights, and how often DDP reduced."""
    model = linear()
    model, optimizer = accelerator.prepare(model, FAD(sgd(model)))
    passes = FlatnessPasses(accelerator, model, optimizer)
    passes.optimizer.perturbation = perturbation  # possible now that it knows the DDP module
    reductions = []

    def count(_, bucket):
        reductions.append(bucket.index())
        future = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True).get_future()
        return future.then(lambda f: f.value()[0])

    model.register_comm_hook(None, count)
    for xs, ys in zip(*joint(rank), strict=True):
        for batch in zip(xs, ys, strict=True):
            with accelerator.accumulate(model):
                for _, (x, y) in passes.over(batch):
                    accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
    return everything(model), len(reductions)


def work(rank: int, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GLOO_SOCKET_IFNAME="lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}/store", WORLD)  # there is no port to agree on
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    results = {kind: share(rank, accelerator, kind) for kind in ("global", "local")}
    torch.save(results, f"{path}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one_on_the_joint_batch(tmp_path):
    """Up to the order of a sum; one reduction per pass, with its last micro-batch."""
    processes.ranks(work, WORLD, str(tmp_path))
    model = linear()
    opt = FAD(sgd(model), model=model)
    for xs, ys in zip(*joint(), strict=True):
        for phase in opt.phases():
            with phase:
                for x, y in zip(xs, ys, strict=True):
                    (F.cross_entropy(model(x), y) / 2).backward()
        opt.step()
    for rank in range(WORLD):
        results = torch.load(tmp_path / f"{rank}.pt")
        got, reductions = results["global"]
        torch.testing.assert_close(got, everything(model), rtol=0, atol=1e-12)
        assert reductions == 3 * 4
        other, reductions = results["local"]
        assert reductions == 0  # the direction is averaged instead
        assert 1e-6 < (other - got).abs().max() < 1e-1
        assert torch.equal(other, torch.load(tmp_path / "0.pt")["local"][0])
