"""Overhead of every optimizer between gradients, compared with a memory copy and with peers.

The arithmetic between gradients is memory-bound. A method's lower bound is the time to copy as many
elements as a perfectly fused version reads and writes (`ELEMENTS`). Methods that draw noise are
timed with their draws, and the draws are also timed alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_optimizer
import torch
import torchvision
from harness import DeviceOptions, Result, Still, command, option, ratio, spread, take_turns
from torch import Tensor, nn
from torch.optim import Optimizer

from steppe.errors import UserError, unknown
from steppe.optim import noise, optimizer_spec

# Elements read or written per parameter and step: after the first gradient, after the second, ...
# A norm reads its vector once. Leaving reads the direction and the weights, and writes the backup
# and the weights. Coming back reads the backup and writes the weights.
LEAVE, BACK = 4, 2
ELEMENTS: dict[str, float] = {
    "sam": 1 + LEAVE + BACK,
    "sam-on": 1 + LEAVE + BACK,  # SAM's bound; it perturbs a few parameters only
    "asam": 2 + LEAVE + BACK,  # its norm also reads the weights
    "gsam": 1 + LEAVE + 2 + 3 + BACK,  # an inner product, a sum of two
    "sagm": 1 + LEAVE + 3 + BACK,
    "pgn": 1 + LEAVE + 3 + BACK,
    "wsam": 1 + LEAVE + 3 + BACK + 3,  # the difference, and its use after the step
    "f-sam": 4 + LEAVE + BACK,  # mean and difference, with its norm
    "vasso": 3 + LEAVE + BACK,
    "looksam": (1 + LEAVE + 2 + 3 + BACK + 4 * (1 + 3)) / 5,  # one step of five looks
    "msam": 1 + LEAVE + BACK,
    "gam": 1 + LEAVE + 6 + 6 + 3 + BACK,
    "c-flat": 1 + LEAVE + 7 + 6 + 3 + BACK,
    "fad": 1 + LEAVE + 7 + 6 + 3 + BACK,
    # Without their draws.
    "rwp": 1 + LEAVE + 3 + BACK,
    "gga-l": 3 * (1 + 3) + 1 + 3,  # three domains
    "genie": 5 + 4,  # both moments, then the weights
}
FLOOR = 23  # elements per parameter that the measured copy moves; others are fractions of it
DOMAINS = 3
STEPS = {"looksam": 5}  # per measurement, in `ms` too; 1 for the others
DRAWS = {"rwp": Tensor.normal_, "gga-l": Tensor.normal_, "genie": Tensor.uniform_}


@dataclass(frozen=True, kw_only=True)
class Options(DeviceOptions):
    rounds: int = option(15, "Measurements per contender.", min=1)
    optimizer: list[str] | None = option(None, "Repeatable (default: all).")


def network() -> nn.Module:
    model: nn.Module = torchvision.models.resnet50(num_classes=7)
    return model


class Gradients:
    """A closure that sets gradients in new memory, like autograd, and times itself."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params, self.calls, self.seconds = params, 0, 0.0
        self._values = [torch.randn_like(p) for p in params]

    def __call__(self, loss: str = "main") -> Tensor:
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
    names = options.optimizer or list(ELEMENTS)
    if options.where.type == "cuda":  # a generator cannot be made while a graph is captured
        names = [name for name in names if name not in DRAWS]
    for name in names:
        if name not in ELEMENTS:
            raise UserError(unknown("optimizer", name, ELEMENTS))
    device = options.where
    model = network().to(device)
    params = list(model.parameters())
    n = sum(p.numel() for p in params)
    # One long copy, because a cache would keep part of a shorter one.
    source, target = (torch.ones(FLOOR * n // 2, device=device) for _ in range(2))
    gradients = Gradients(params)
    runs: dict[str, Callable[[], object]] = {"floor": lambda: target.copy_(source)}
    for name in names:
        steps = STEPS.get(name, 1)
        runs[name] = _repeated(_ours(name, model).step, gradients, steps)
        if name in DRAWS:
            runs[f"{name}, draws alone"] = partial(_draw, DRAWS[name], params)
        if name in PEERS:
            for foreach, label in theirs(name).items():
                runs[label] = _repeated(PEERS[name](model, params, foreach), gradients, steps)
    meter = _gpu_meter if device.type == "cuda" else partial(partial, _cpu_ms)
    meters = {name: meter(run, gradients) for name, run in runs.items()}
    times = take_turns(meters, options.rounds, "between gradients", warm_up=3)
    ratios = {}
    for name in names:
        steps = STEPS.get(name, 1)
        floors = [t * ELEMENTS[name] / FLOOR * steps for t in times["floor"]]
        drawn = times.get(f"{name}, draws alone", [0.0] * options.rounds)
        own = [t - d for t, d in zip(times[name], drawn, strict=True)]
        ratios[f"{name} / floor"] = ratio(own, floors)
        if name in PEERS:
            best = list(map(min, *(times[label] for label in theirs(name).values())))
            ratios[f"{name} / pytorch_optimizer's"] = ratio(times[name], best)
    return {
        "parameters": n,
        "tensors": len(params),
        "rounds": options.rounds,
        "elements": {name: ELEMENTS[name] for name in names},
        "ms": {name: spread(ts) for name, ts in times.items()},
        "ratios": ratios,
    }


def theirs(name: str) -> dict[bool, str]:
    """The labels of a peer's two variants."""
    return {each: f"pytorch_optimizer's {name}, foreach={each}" for each in (False, True)}


def _ours(name: str, model: nn.Module) -> Optimizer:
    spec, params = optimizer_spec(name), list(model.parameters())
    if spec.base is None:
        return spec.build(params, lr=1e-6)
    base = Still(params, lr=1e-6, momentum=0.9)
    for p in params:
        base.state[p]["momentum_buffer"] = torch.randn_like(p)
    own: dict[str, dict[str, Any]] = {"gga-l": {"domains": DOMAINS}, "sam-on": {"model": model}}
    opt: Optimizer = spec.cls(base, **own.get(name, {}), **spec.fixed)
    return opt


def _draw(fill: Callable[..., object], params: Sequence[Tensor]) -> None:
    generator = noise.generator(params[0].device, 0)
    for p in params:
        fill(torch.empty_like(p), generator=generator)


def _repeated(step: Callable[..., object], gradients: Gradients, steps: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(steps):
            step(gradients)

    return run


def _after_first(opt: Any) -> Callable[[Gradients], None]:
    """The step of a peer that expects the first gradient in place."""

    def step(gradients: Gradients) -> None:
        gradients()
        opt.step(gradients)
        opt.zero_grad()

    return step


def _their_gsam(model: nn.Module, params: Any, foreach: bool) -> Callable[[Gradients], object]:
    constant = type("Constant", (), {"step": lambda self: 0.05})()  # its radius
    base = Still(params, lr=1e-6)
    opt: Any = pytorch_optimizer.GSAM(params, base, model, constant, foreach=foreach)
    return lambda gradients: opt.step(lambda: (None, gradients()))


def _their_wsam(model: nn.Module, params: Any, foreach: bool) -> Callable[[Gradients], object]:
    opt: Any = pytorch_optimizer.WSAM(model, params, Still, foreach=foreach, lr=1e-6)
    return lambda gradients: opt.step(gradients)


def _theirs(name: str, **options: Any) -> Callable[..., Callable[[Gradients], object]]:
    cls = getattr(pytorch_optimizer, name)
    return lambda model, params, foreach: _after_first(
        cls(params, Still, foreach=foreach, **options)
    )


PEERS: dict[str, Callable[..., Callable[[Gradients], object]]] = {
    "sam": _theirs("SAM"),
    "asam": _theirs("SAM", adaptive=True),
    "looksam": _theirs("LookSAM", k=5),
    "f-sam": _theirs("FriendlySAM"),
    "gsam": _their_gsam,
    "wsam": _their_wsam,
}


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
