"""What only a GPU can show. Run with `pytest -m gpu`; skipped where there is no CUDA."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from steppe.optim import FAD, vectors
from tests.optim import reference
from tests.optim.problems import METHODS, PROBLEMS, Problem, sgd, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

FIRST_ORDER = ["fad", "sam", "asam", "gam", "gam-release"]


def on_gpu(name: str) -> Problem:
    problem = PROBLEMS[name]()
    problem.model.cuda()
    problem.x, problem.y = problem.x.cuda(), problem.y.cuda()
    return problem


@pytest.mark.parametrize("problem_name", PROBLEMS)
@pytest.mark.parametrize("name", METHODS)
def test_agrees_with_the_equations(name, problem_name):
    method, problem = METHODS[name], on_gpu(problem_name)
    opt = method(sgd(problem.model.parameters()), model=problem.model)
    expected = problem.weights()
    update = reference.SGD(0.1, momentum=0.9, weight_decay=1e-2)
    for t in range(20):
        torch.manual_seed(t)
        opt.step(problem.closure(opt))
        direction = method.direction(lambda point, t=t: problem.gradient(point, seed=t), expected)
        expected = update(expected, direction)
        torch.testing.assert_close(problem.weights(), expected, rtol=0, atol=1e-10)


def workload(name: str, fused: bool | None = None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(),
        nn.Linear(8 * 36, 5),
    ).cuda()  # fmt: skip
    x, y = torch.randn(16, 3, 8, 8, device="cuda"), torch.randint(5, (16,), device="cuda")
    opt = METHODS[name](sgd(model.parameters(), fused=fused), model=model, **options)

    def closure(scaler=None):
        loss = nn.functional.cross_entropy(model(x), y)
        (scaler.scale(loss) if scaler else loss).backward(create_graph=opt.needs_graph)
        return loss

    return model, opt, closure


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_no_synchronization_without_a_scaler(name, max_norm):
    _, opt, closure = workload(name, max_norm=max_norm)
    opt.step(closure)
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.step(closure)
        opt.step(closure)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert opt.steps == 3


@pytest.mark.parametrize("name", METHODS)
def test_one_synchronization_with_a_scaler(name):
    _, opt, closure = workload(name)
    scaler = GradScaler("cuda")
    opt.step(lambda: closure(scaler), scaler=scaler)
    scaler.update()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            opt.step(lambda: closure(scaler), scaler=scaler)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in seen if "synchronizing" in str(w.message)]) == 1


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_no_synchronization_with_a_scaler_and_a_fused_base(name):
    _, opt, closure = workload(name, fused=True)
    scaler = GradScaler("cuda")
    opt.step(lambda: closure(scaler), scaler=scaler)
    scaler.update()
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.step(lambda: closure(scaler), scaler=scaler)
        scaler.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_on_the_device(dtype):
    """Added by the kernel of fused SGD where that can, and by others where it cannot."""
    xs, ys = ([torch.randn(s, device="cuda", dtype=dtype) for s in ((5, 7), (3,))] for _ in "xy")
    scale = torch.tensor(-0.3, device="cuda", dtype=dtype)
    expected = [x + scale * y for x, y in zip(xs, ys, strict=True)]
    kept = [y.clone() for y in ys]
    vectors.add_(xs, ys, scale)
    for x, e in zip(xs, expected, strict=True):
        torch.testing.assert_close(x, e)
    assert all(map(torch.equal, ys, kept)), "not spent unless allowed"


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_a_whole_step_in_a_cuda_graph(name):
    """Capture one step and replay it: the same weights as eager steps, on moving data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()
    twin = copy.deepcopy(model)
    static = torch.randn(16, 6, device="cuda")
    y = torch.randint(4, (16,), device="cuda")
    batches = [torch.randn(16, 6, device="cuda") for _ in range(6)]

    def stepper(net, x):
        opt = METHODS[name](sgd(net.parameters()), model=net)

        def step():
            def closure():
                loss = nn.functional.cross_entropy(net(x()), y)
                loss.backward()
                return loss

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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_step()
    # What the steps before it let go of goes to others; a replay must not write there.
    with torch.cuda.stream(stream):
        others = [torch.full_like(p, 7.0) for p in model.parameters() for _ in range(8)]
    torch.cuda.synchronize()
    for batch in batches:
        static.copy_(batch)
        graph.replay()
        current[0] = batch
        eager_step()
    assert all((o == 7.0).all() for o in others)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "buffers"), [("fad", 2), ("sam", 1), ("gam", 2)])
def test_peak_memory_of_a_step(name, buffers):
    """Bytes between passes beyond parameters, gradients and momentum; and none after the step."""
    n = 2**24
    weight = nn.Parameter(torch.randn(n, device="cuda"))
    opt = METHODS[name](sgd([weight]))

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


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch 2.11 itself
def test_compiled_stages_on_the_device():
    model, opt, closure = workload("fad")
    twin, opt2, closure2 = workload("fad", compile=True)
    for t in range(3):
        torch.manual_seed(t)
        opt.step(closure)
        torch.manual_seed(t)
        opt2.step(closure2)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_fp16_with_a_scaler_backs_off_and_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    x, y = torch.randn(128, 8, device="cuda"), torch.randint(4, (128,), device="cuda")
    opt = FAD(sgd(model.parameters()), model=model)
    scaler = GradScaler("cuda", init_scale=2.0**30)  # overflows at first
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        with torch.autocast("cuda", dtype=torch.float16):
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


def test_train_on_gpu_equals_cpu():
    gpu, cpu = on_gpu("mlp"), PROBLEMS["mlp"]()
    for problem in (gpu, cpu):
        train(problem, FAD(sgd(problem.groups()), model=problem.model), 5)
    torch.testing.assert_close(gpu.weights().cpu(), cpu.weights(), rtol=0, atol=1e-10)
