"""Overhead of an optimizer between gradients, compared with a memory copy and another SAM.

The arithmetic between gradients is memory-bound. Its lower bound is the time to copy as many
elements as a perfectly fused version reads and writes: 23 per parameter for FAD (5 after g0, 7
after g1, 6 after g2, 5 after g3), or 11.5 copies of all parameters.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_optimizer
import torch
import torchvision
from harness import DeviceOptions, Result, Still, command, option, ratio, spread, take_turns
from torch import Tensor, nn

from steppe.optim import FAD, SAM

FAD_COPIES = 11.5  # of all parameters; each copy is a read and a write
COMPILED = "fad, compiled stages"


@dataclass(frozen=True, kw_only=True)
class Options(DeviceOptions):
    rounds: int = option(15, "Measurements per contender.", min=1)


def shapes() -> list[torch.Size]:
    with torch.device("meta"):
        model = torchvision.models.resnet50(num_classes=7)
    return [p.shape for p in model.parameters()]


class Gradients:
    """A closure that sets gradients in new memory, like autograd, and times itself."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params, self.calls, self.seconds = params, 0, 0.0
        self._values = [torch.randn_like(p) for p in params]

    def __call__(self) -> Tensor:
        start = time.perf_counter()
        for p, value in zip(self.params, self._values, strict=True):
            p.grad = value.clone()
        torch._foreach_mul_(self._values, -0.9375)  # all gradients of a step differ
        torch._foreach_add_(self._values, 0.001)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return torch.zeros(())


def _cpu_ms(run: Callable[[], object], gradients: Gradients) -> float:
    gradients.seconds = 0.0
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start - gradients.seconds)


def _gpu_meter(run: Callable[[], object], gradients: Gradients) -> Callable[[], float]:
    """Measure device time in a CUDA graph, minus that of a graph that only sets gradients."""
    run()
    gradients.calls = 0
    run()
    if not (calls := gradients.calls):  # the copy is a single kernel, and slower inside a graph
        return partial(_gpu_ms, run)
    whole, part = _captured(run), _captured(lambda: [gradients() for _ in range(calls)])
    return lambda: _gpu_ms(whole) - _gpu_ms(part)


def measure(options: Options) -> Result:
    device = options.where
    params = [nn.Parameter(torch.randn(s, device=device)) for s in shapes()]
    n = sum(p.numel() for p in params)
    # One long copy, because a cache would keep part of a shorter one.
    source, target = (torch.ones(int(FAD_COPIES * n), device=device) for _ in range(2))
    gradients = Gradients(params)
    runs: dict[str, Callable[[], object]] = {
        "floor": lambda: target.copy_(source),
        "fad": partial(FAD(Still(params)).step, gradients),
        "sam": partial(SAM(Still(params)).step, gradients),
    }
    theirs = {f"pytorch_optimizer sam, foreach={each}": each for each in (False, True)}
    for name, foreach in theirs.items():
        runs[name] = _theirs(pytorch_optimizer.SAM(params, Still, foreach=foreach), gradients)
    if device.type == "cuda":
        runs[COMPILED] = partial(FAD(Still(params), compile=True).step, gradients)
    meter = _gpu_meter if device.type == "cuda" else partial(partial, _cpu_ms)
    meters = {name: meter(run, gradients) for name, run in runs.items()}
    times = take_turns(meters, options.rounds, "between gradients", warm_up=3)
    best = list(map(min, *(times[name] for name in theirs)))
    ratios = {
        "fad / floor": ratio(times["fad"], times["floor"]),
        "sam / pytorch_optimizer's sam": ratio(times["sam"], best),
    }
    if COMPILED in times:
        ratios[f"{COMPILED} / floor"] = ratio(times[COMPILED], times["floor"])
    return {
        "parameters": n,
        "tensors": len(params),
        "rounds": options.rounds,
        "ms": {name: spread(t) for name, t in times.items()},
        "ratios": ratios,
    }


def _theirs(opt: Any, gradients: Gradients) -> Callable[[], object]:
    def step() -> None:
        gradients()  # their step expects the first gradient in place
        opt.step(gradients)
        opt.zero_grad()

    return step


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


main = command(Options, measure)
