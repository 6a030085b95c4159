"""A step on a device: when its host waits, scalers, CUDA graphs and memory."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from steppe.optim import FAD, vectors
from tests.devices import counting_waits, never_waiting
from tests.optim.problems import EVERY, named, sgd

FIRST_ORDER = [name for name in EVERY if name != "gam-exact" and not EVERY[name].make.draws]


def workload(name: str, device: torch.device, fused: bool | None = None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(),
        nn.Linear(8 * 36, 5),
    ).to(device)  # fmt: skip
    x, y = torch.randn(16, 3, 8, 8, device=device), torch.randint(5, (16,), device=device)
    opt = EVERY[name](sgd(model.parameters(), fused=fused), model=model, **options)

    def closure(name="main", scaler=None):
        each = nn.functional.cross_entropy(model(x), y, reduction="none")
        loss = named(each, name)
        (scaler.scale(loss) if scaler else loss).backward(create_graph=opt.needs_graph)
        return each.mean()

    return opt, closure


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("name", EVERY)
def test_no_synchronization_without_a_scaler(name, max_norm, device):
    opt, closure = workload(name, device, max_norm=max_norm)
    opt.step(closure)
    with never_waiting(device):
        opt.step(closure)
        opt.step(closure)
    assert opt.steps == 3


@pytest.mark.parametrize("name", EVERY)
def test_one_synchronization_with_a_scaler(name, device):
    opt, closure = workload(name, device)
    scaler = GradScaler(device.type)
    opt.step(partial(closure, scaler=scaler), scaler=scaler)
    scaler.update()
    with counting_waits(device) as waits:
        opt.step(partial(closure, scaler=scaler), scaler=scaler)
    assert len(waits) == (device.type == "cuda")
    assert opt.steps == 2


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_no_synchronization_with_a_scaler_and_a_fused_base(name, device):
    opt, closure = workload(name, device, fused=True)
    scaler = GradScaler(device.type)
    opt.step(partial(closure, scaler=scaler), scaler=scaler)
    scaler.update()
    with never_waiting(device):
        opt.step(partial(closure, scaler=scaler), scaler=scaler)
        scaler.update()
    assert opt.steps == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_on_the_device(dtype, device):
    """Added by the kernel of fused SGD where that can, and by others where it cannot."""
    xs, ys = ([torch.randn(s, device=device, dtype=dtype) for s in ((5, 7), (3,))] for _ in "xy")
    scale = torch.tensor(-0.3, device=device, dtype=dtype)
    expected = [x + scale * y for x, y in zip(xs, ys, strict=True)]
    kept = [y.clone() for y in ys]
    vectors.add_(xs, ys, scale)
    for x, e in zip(xs, expected, strict=True):
        torch.testing.assert_close(x, e)
    assert all(map(torch.equal, ys, kept)), "not spent unless allowed"


@pytest.mark.gpu
@pytest.mark.parametrize("name", FIRST_ORDER)
def test_a_whole_step_in_a_cuda_graph(name):
    """Capture one step and replay it: the same weights as eager steps, on moving data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4)).cuda()
    twin = copy.deepcopy(model)
    static = torch.randn(16, 6, device="cuda")
    y = torch.randint(4, (16,), device="cuda")
    batches = [torch.randn(16, 6, device="cuda") for _ in range(6)]

    def stepper(net, x):
        opt = EVERY[name](sgd(net.parameters()), model=net)

        def step():
            def closure(name="main"):
                each = nn.functional.cross_entropy(net(x()), y, reduction="none")
                named(each, name).backward()
                return each.mean()

            opt.step(closure)

        return step

    captured_step = stepper(model, lambda: static)
    current = [static]
    eager_step = stepper(twin, lambda: current[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            captured_step()
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        eager_step()
    graph, steps = torch.cuda.CUDAGraph(), EVERY[name].every  # of all kinds that a method has
    with torch.cuda.graph(graph):
        for _ in range(steps):
            captured_step()
    # What the steps before it let go of goes to others; a replay must not write there.
    with torch.cuda.stream(stream):
        others = [torch.full_like(p, 7.0) for p in model.parameters() for _ in range(8)]
    torch.cuda.synchronize()
    for batch in batches:
        static.copy_(batch)
        graph.replay()
        current[0] = batch
        for _ in range(steps):
            eager_step()
    assert all((o == 7.0).all() for o in others)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu  # what a CPU allocates is counted in test_memory.py
@pytest.mark.parametrize(("name", "buffers"), [("fad", 2), ("sam", 1), ("gam", 2)])
def test_peak_memory_of_a_step(name, buffers):
    """Bytes between passes beyond parameters, gradients and momentum; and none after the step."""
    n = 2**24
    weight = nn.Parameter(torch.randn(n, device="cuda"))
    opt = EVERY[name](sgd([weight]))

    def run():
        peaks = []
        for phase in opt.phases():
            with phase:
                weight.grad = weight.detach() * 0.5
                torch.cuda.reset_peak_memory_stats()
            peaks.append(torch.cuda.max_memory_allocated())
        opt.step()
        return max(peaks)

    run()
    resting = torch.cuda.memory_allocated()  # parameter, momentum, direction in .grad
    peak = run()
    size = 4 * n
    assert peak - resting <= buffers * size + size // 100
    assert torch.cuda.memory_allocated() == resting


def test_fp16_with_a_scaler_backs_off_and_trains(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    x, y = torch.randn(128, 8, device=device), torch.randint(4, (128,), device=device)
    opt = FAD(sgd(model.parameters()), model=model)
    scaler = GradScaler(device.type, init_scale=2.0**30)  # overflows at first
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        with torch.autocast(device.type, dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        return loss

    first = opt.step(closure, scaler=scaler).item()
    scaler.update()
    assert opt.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    for _ in range(60):
        last = opt.step(closure, scaler=scaler).item()
        scaler.update()
    assert 0 < opt.steps < 61
    assert last < 0.9 * first
