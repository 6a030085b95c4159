"""`steppe bench optim`: what an optimizer costs beyond its gradients.

The arithmetic between gradients moves memory and does little else, so its floor is the time of
copying as many elements as a perfectly fused version must read and write: 23 per parameter for FAD
(5 after g0, 7 after g1, 6 after g2, 5 after g3), which is a copy of 11.5 parameters' worth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytorch_optimizer
import torch
import torchvision
from rich.table import Table
from torch import Tensor, nn

from steppe.optim import FAD, SAM, FlatnessOptimizer

from .record import environment
from .still import Still

FAD_COPIES = 11.5
"""Copies of all parameters that move what FAD must move, read and write counted."""


def shapes(backbone: str = "resnet50", classes: int = 7) -> list[torch.Size]:
    """The shapes of a backbone's parameters (161 tensors for ResNet-50)."""
    with torch.device("meta"):
        model = torchvision.models.get_model(backbone, weights=None, num_classes=classes)
    return [p.shape for p in model.parameters()]


class Gradients:
    """A closure that hands out gradients and keeps account of what this takes.

    Each is in fresh memory that nothing else refers to, as autograd's are.
    """

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.calls = 0
        self.seconds = 0.0
        self._values = [torch.randn_like(p) for p in params]

    def __call__(self) -> Tensor:
        """Sets new gradients, and counts the call and its time."""
        start = time.perf_counter()
        for p, value in zip(self.params, self._values, strict=True):
            p.grad = value.clone()
        torch._foreach_mul_(self._values, -0.9375)  # no two gradients of a step alike
        torch._foreach_add_(self._values, 0.001)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return torch.zeros(())


Meter = Callable[[], float]
"""Measures once, in milliseconds."""


def _cpu_meter(run: Callable[[], object], gradients: Gradients) -> Meter:
    def measure() -> float:
        gradients.seconds = 0.0
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start - gradients.seconds)

    return measure


def _gpu_meter(run: Callable[[], object], gradients: Gradients) -> Meter:
    """The device's time in a CUDA graph, less that of a graph that only makes the gradients."""
    run()
    gradients.calls = 0
    run()
    calls = gradients.calls

    def supply() -> None:
        for _ in range(calls):
            gradients()

    if not calls:  # a single kernel: as a node of a graph, a copy is slower than launched
        return lambda: _gpu_ms(run)
    whole, part = _captured(run), _captured(supply)
    return lambda: _gpu_ms(whole) - _gpu_ms(part)


def arithmetic(device: torch.device, rounds: int = 15) -> dict[str, Any]:
    """Milliseconds between gradients, and their ratios, measured side by side in each round."""
    params = [nn.Parameter(torch.randn(s, device=device)) for s in shapes()]
    n = sum(p.numel() for p in params)
    # One long copy, not several of the same memory, of which a cache would keep a part.
    source, target = (torch.ones(int(FAD_COPIES * n), device=device) for _ in range(2))
    gradients = Gradients(params)
    runs: dict[str, Callable[[], object]] = {
        "floor": lambda: target.copy_(source),
        "fad": _ours(FAD(Still(params)), gradients),
        "sam": _ours(SAM(Still(params)), gradients),
        **{
            f"pytorch_optimizer sam, foreach={foreach}": _theirs(
                pytorch_optimizer.SAM(params, Still, foreach=foreach), gradients
            )
            for foreach in (False, True)
        },
    }
    if device.type == "cuda":
        runs["fad, compiled stages"] = _ours(FAD(Still(params), compile=True), gradients)
    meter = _gpu_meter if device.type == "cuda" else _cpu_meter
    meters = {name: meter(run, gradients) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(-3, rounds):  # the first three warm up
        for name, measure in meters.items():
            elapsed = measure()
            if round_ >= 0:
                times[name].append(elapsed)

    best = (t for name, t in times.items() if name.startswith("pytorch_optimizer"))
    ratios = {
        "fad / floor": _ratio(times["fad"], times["floor"]),
        "sam / pytorch_optimizer's sam": _ratio(times["sam"], list(map(min, *best))),
    }
    if (name := "fad, compiled stages") in times:
        ratios[f"{name} / floor"] = _ratio(times[name], times["floor"])
    return {
        "parameters": n,
        "tensors": len(params),
        "rounds": rounds,
        "ms": {name: _summary(t) for name, t in times.items()},
        "ratios": ratios,
    }


def _ours(opt: FlatnessOptimizer, gradients: Gradients) -> Callable[[], object]:
    return lambda: opt.step(gradients)


def _theirs(opt: Any, gradients: Gradients) -> Callable[[], object]:
    def step() -> None:
        gradients()  # their step expects the first gradient to be there
        opt.step(gradients)
        opt.zero_grad()

    return step


def _summary(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "quartile 1": round(low, 4), "quartile 3": round(high, 4)}


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    return _summary([a / b for a, b in zip(ours, theirs, strict=True)])


def whole_step(
    device: torch.device, backbone: str = "resnet50", batch: int = 96, repeats: int = 20
) -> dict[str, Any]:
    """FAD's whole step over one forward and backward pass, eager and in a CUDA graph.

    fp16 autocast, channels-last, batch-norm statistics frozen, SGD with momentum as the base; the
    loss scale is a constant, because a graph cannot decide to skip a step.
    """
    torch.manual_seed(0)
    model = torchvision.models.get_model(backbone, weights=None, num_classes=7)
    model = model.to(device, memory_format=torch.channels_last).eval()
    x = torch.randn(batch, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(7, (batch,), device=device)
    params = list(model.parameters())
    opt = FAD(torch.optim.SGD(params, lr=1e-4, momentum=0.9), model=model)
    scale = 1024.0

    def closure() -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        (loss * scale).backward()
        return loss

    def one_pass() -> None:
        for p in params:
            p.grad = None
        closure()

    def step() -> None:
        for phase in opt.phases():
            with phase:
                closure()
        torch._foreach_div_([p.grad for p in params], scale)
        opt.step()

    result: dict[str, Any] = {"backbone": backbone, "batch": batch, "repeats": repeats}
    for mode in ("eager", "graph"):
        runs: dict[str, Callable[[], None]] = {"pass": one_pass, "fad": step}
        times: dict[str, list[float]] = {name: [] for name in runs}
        ready = {name: _captured(run) if mode == "graph" else run for name, run in runs.items()}
        for round_ in range(-5, repeats):
            for name, run in ready.items():
                elapsed = _gpu_ms(run)
                if round_ >= 0:
                    times[name].append(elapsed)
        result[mode] = {
            "pass ms": _summary(times["pass"]),
            "fad step ms": _summary(times["fad"]),
            "fad step / pass": _ratio(times["fad"], times["pass"]),
        }
        del ready
    result["peak memory GiB"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    return result


def _captured(run: Callable[[], object]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _gpu_ms(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def tables(result: dict[str, Any]) -> list[Table]:
    """The result for the terminal."""
    part = result["arithmetic"]
    times = Table(
        title=f"Between gradients, {part['tensors']} tensors, {part['parameters']:,} parameters"
    )
    for heading in ("what", "ms", "quartiles"):
        times.add_column(heading, justify="left" if heading == "what" else "right")
    for name, value in part["ms"].items():
        label = f"copy of {FAD_COPIES} N elements" if name == "floor" else name
        times.add_row(label, *_cells(value))
    ratios = Table(title="Ratios, side by side in each round")
    for heading in ("what", "ratio", "quartiles"):
        ratios.add_column(heading, justify="left" if heading == "what" else "right")
    for name, value in part["ratios"].items():
        ratios.add_row(name, *_cells(value))
    if (step := result.get("whole step")) is not None:
        for mode in ("eager", "graph"):
            for name, value in step[mode].items():
                label = f"{step['backbone']}, batch {step['batch']}, {mode}: {name}"
                (ratios if "/" in name else times).add_row(label, *_cells(value))
    return [times, ratios]


def _cells(value: dict[str, float]) -> tuple[str, str]:
    return f"{value['median']:.3g}", f"{value['quartile 1']:.3g} to {value['quartile 3']:.3g}"


def measure(device: torch.device, rounds: int, *, with_step: bool = True) -> dict[str, Any]:
    """Everything `steppe bench optim` reports, as plain values."""
    result = {"environment": environment(device), "arithmetic": arithmetic(device, rounds)}
    if device.type == "cuda" and with_step:
        result["whole step"] = whole_step(device)
    return result
