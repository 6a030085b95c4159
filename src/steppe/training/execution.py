"""The engine: runs the passes of a step as fast as the device allows.

It has three gears. *Eager* runs layer by layer. *Compiled* runs the backbone, forward and backward,
through `torch.compile`. *Captured* records all passes of an update, the optimizer's arithmetic
included, as one CUDA graph and replays it. If a run rules out a gear, the engine uses a lower one
and logs the reason. Results are the same up to the rounding of fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steppe.algorithms import Losses, Network
from steppe.algorithms.network import Compiled
from steppe.domains.batches import Batch
from steppe.domains.store.replay import Replay
from steppe.optim import FlatnessOptimizer
from steppe.optim.engine import skips_by_itself
from steppe.optim.schedules import scheduled

from . import randomness
from .update import Passes, base_of

T = TypeVar("T")

WARM_UP = 3
"""Updates before capture, which create the optimizer's state and the kernels' workspaces."""
MOST_GRAPHS = 4
"""Kinds of update captured per objective, each with its own memory."""
COMPILED_FROM = 64
"""Image height and width from which compiling pays off."""
RECOMPILATIONS = 64
"""Recompilations per function; one process may train many backbones. At torch's own limit, 8, torch
silently falls back to eager code."""


@dataclass(frozen=True)
class Gears:
    """The gears that a run may use, with one line per excluded gear that says why."""

    compiled: bool
    captured: bool
    reasons: tuple[str, ...] = ()


def choose_gears(
    engine: str,
    device: torch.device,
    image_size: int,
    *,
    needs_graph: bool,
    world: int,
    differentiates: bool = False,
) -> Gears:
    """Choose the gears for a run.

    `needs_graph` means that the optimizer differentiates the gradient, `differentiates` that the
    algorithm takes gradients inside its loss.

    Examples:
        >>> choose_gears("auto", torch.device("cpu"), 224, needs_graph=False, world=1).compiled
        False
    """
    if engine == "off" or (engine == "auto" and device.type != "cuda"):
        return Gears(compiled=False, captured=False)
    if needs_graph:
        why = "not compiled: the optimizer differentiates twice, which compiled code cannot do"
        return Gears(compiled=False, captured=False, reasons=(why,))
    not_compiled = not_captured = ""
    if engine == "auto" and image_size < COMPILED_FROM:
        not_compiled = f"images of {image_size} pixels are too small to benefit"
    elif differentiates:
        not_compiled = "the algorithm takes gradients inside its loss"
    if device.type != "cuda":
        not_captured = f"a {device.type.upper()} has no CUDA graphs"
    elif world > 1:
        not_captured = "every pass averages gradients across processes"
    wanted = {"compiled": not_compiled, "captured": not_captured}
    if engine == "compile":
        del wanted["captured"]
    reasons = (f"not {gear}: {why}" for gear, why in wanted.items() if why)
    return Gears(not not_compiled, engine != "compile" and not not_captured, tuple(reasons))


class Engine:
    """Runs updates and predictions in the highest gear that works.

    Args:
        gears: the gears that the run allows.
        passes: the passes of the algorithm in training.
        network: the network inside it.
        batch: images per pass, if code may be compiled for that number only; sums over a dynamic
            batch take twice as long (default: compile for any number).
        deterministic: choose kernels without timing them.
        say: called with each line about a gear that is not used.
    """

    def __init__(
        self,
        gears: Gears,
        passes: Passes,
        network: Network,
        *,
        batch: int | None = None,
        deterministic: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._passes, self._network, self._say = passes, network, say
        self.compiled, self.captured = gears.compiled, gears.captured
        self.reasons: list[str] = []
        """One line per unused gear."""
        for reason in gears.reasons:
            self._note(reason)
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: dict[Hashable, int] = {}
        self._pool: Any = None
        self._preparation: _Preparation | None = None
        if self.compiled:
            import torch._dynamo.config as dynamo

            dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILATIONS)
            network.compiled = Compiled(batch, **({"deterministic": True} if deterministic else {}))

    @property
    def gear(self) -> str:
        names = {"compiled": self.compiled, "captured in CUDA graphs": self.captured}
        return " and ".join(name for name, on in names.items() if on) or "eager"

    def prepare(
        self, prepare: Callable[[Sequence[Batch]], list[Any]], batches: Sequence[Batch]
    ) -> list[Any]:
        """Prepare a step, captured if possible; the next step may overwrite the result.

        Args:
            prepare: the same function in every step, which draws nothing and never asks the host.
            batches: those of the step, one per domain.
        """
        if not self.captured:
            return prepare(batches)
        if self._preparation is None:
            self._preparation = _Preparation(prepare, batches)
        return self._preparation(batches)

    def optimize(
        self, optimizer: Optimizer, objective: str, prepared: Sequence[Any]
    ) -> list[Losses]:
        """Take one step, and return the losses at the weights before it, one per part."""
        if not self.captured:
            return self._launch(optimizer, objective, prepared)
        key = (objective, _kind(prepared), _settings(optimizer))
        if key in self._graphs:
            return self._replay(self._graphs[key], optimizer, prepared)
        if sum(known[0] == objective for known in self._seen) > MOST_GRAPHS:  # type: ignore[index]
            self._stop_capturing(
                "updates differ too often: batch sizes, hyperparameters or Python numbers in the "
                "loss change from step to step"
            )
            return self._launch(optimizer, objective, prepared)
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= WARM_UP:
            return self._warm_up(optimizer, objective, prepared)
        graph = self._capture(optimizer, objective, prepared)
        if graph is None:
            return self._launch(optimizer, objective, prepared)
        self._graphs[key] = graph
        return self._replay(graph, optimizer, prepared)

    def forget(self) -> None:
        """Drop the captured graphs, because an optimizer's state was replaced."""
        self._graphs.clear()
        self._seen.clear()
        self._pool = None

    def guarded(self, compute: Callable[[], T]) -> T:
        """Call a function; if compilation fails, call it again in eager mode."""
        if not self.compiled:
            return compute()
        from torch._dynamo.exc import TorchDynamoException

        try:
            return compute()
        except TorchDynamoException as error:
            self.compiled = False
            self._network.compiled = None
            self._note(f"not compiled: {_first_line(error)}")
        return compute()

    def _launch(
        self, optimizer: Optimizer, objective: str, prepared: Sequence[Any]
    ) -> list[Losses]:
        return self.guarded(lambda: self._passes.optimize(optimizer, objective, prepared))

    def _warm_up(
        self, optimizer: Optimizer, objective: str, prepared: Sequence[Any]
    ) -> list[Losses]:
        before = _random_states(prepared[0].images.device)
        losses = self._launch(optimizer, objective, prepared)
        if _random_states(prepared[0].images.device) != before:
            self._stop_capturing(
                "the loss draws random numbers (such as dropout in the backbone), which all passes "
                "of a step must share"
            )
        return losses

    def _capture(
        self, optimizer: Optimizer, objective: str, prepared: Sequence[Any]
    ) -> _Graph | None:
        whole = skips_by_itself(base_of(optimizer))
        if isinstance(optimizer, FlatnessOptimizer) and not whole:
            self._stop_capturing("the base optimizer is not fused, so its step needs the host")
            return None
        if getattr(optimizer, "draws", False):
            self._stop_capturing("the optimizer draws noise, which a replayed graph would repeat")
            return None
        standing = self._preparation is not None and prepared is self._preparation.standing
        static = prepared if standing else [_mapped(p, lambda t: t.clone()) for p in prepared]
        steps = optimizer.steps if isinstance(optimizer, FlatnessOptimizer) else 0
        module, scaler = self._passes.module, self._passes.scaler
        module.zero_grad()  # the graph must allocate gradients in its own memory
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        run = self._passes.optimize if whole else self._passes.differentiate
        device = static[0].images.device
        try:
            # "thread_local" lets the threads that copy images keep allocating. The outer stream
            # context restores the current stream after a failed capture.
            with (
                torch.cuda.device(device),
                torch.cuda.stream(torch.cuda.current_stream(device)),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                losses = run(optimizer, objective, static)
        except RuntimeError as error:
            _release_generator(device)
            module.zero_grad()
            if scaler is not None:  # it may be in the middle of the abandoned step
                scaler._per_optimizer_states.clear()
            self._stop_capturing(_first_line(error))
            return None
        finally:
            if isinstance(optimizer, FlatnessOptimizer):  # capturing runs no kernel
                optimizer.abandon()
                optimizer.steps = steps
        gradients = [(p, p.grad) for p in module.parameters() if p.grad is not None]
        module.zero_grad()
        return _Graph(graph, static, losses, gradients, whole)

    def _replay(self, graph: _Graph, optimizer: Optimizer, prepared: Sequence[Any]) -> list[Losses]:
        _copy(graph.prepared, prepared)
        graph.graph.replay()
        if isinstance(optimizer, FlatnessOptimizer):
            optimizer.steps += 1
        if not graph.whole:
            for p, gradient in graph.gradients:
                p.grad = gradient
            self._passes.apply(optimizer)
            self._passes.module.zero_grad()
        # Copied, because another graph may reuse the memory.
        return [_mapped(losses, Tensor.clone) for losses in graph.losses]

    def _stop_capturing(self, why: str) -> None:
        self.captured = False
        self._preparation = None
        self.forget()
        self._note(f"not captured: {why}")

    def _note(self, line: str) -> None:
        self.reasons.append(line)
        self._say(line)


@dataclass(frozen=True)
class _Graph:
    """One captured update, with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    prepared: Sequence[Any]
    losses: list[Losses]
    gradients: list[tuple[nn.Parameter, Tensor]]
    """Kept alive, so that their memory is not reused."""
    whole: bool
    """Whether it includes the optimizer's step."""


class _Preparation:
    """The preparation of steps whose batches are all alike; others are prepared one by one."""

    def __init__(
        self, prepare: Callable[[Sequence[Batch]], list[Any]], batches: Sequence[Batch]
    ) -> None:
        self._prepare, self._kind = prepare, _kind(batches)
        self._batches = _mapped(batches, Tensor.clone)
        self._replay = Replay(lambda: prepare(self._batches))
        self.standing: list[Any] | None = None
        """What every replay writes to."""

    def __call__(self, batches: Sequence[Batch]) -> list[Any]:
        if _kind(batches) != self._kind:
            return self._prepare(batches)
        _copy(self._batches, batches)
        prepared = self._replay()
        if self._replay.captured:
            self.standing = prepared
        return prepared


def _settings(optimizer: Optimizer) -> Hashable:
    """Everything about an optimizer that a captured graph holds as constants.

    An optimizer that is not captured may change them freely; some count their steps there.
    """
    if not skips_by_itself(base_of(optimizer)):
        return id(optimizer)
    step = optimizer.steps + 1 if isinstance(optimizer, FlatnessOptimizer) else 0
    visits = optimizer.planned()[1] if isinstance(optimizer, FlatnessOptimizer) else None
    groups = tuple(
        (name, _hashable(scheduled(value, step, group)))
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params" and not isinstance(value, Tensor)
    )
    return id(optimizer), visits, groups


def _hashable(value: Any) -> Hashable:
    plain = value is None or isinstance(value, bool | int | float | str)
    return value if plain else repr(value)


def _kind(tree: Any) -> Hashable:
    """A hashable form of a tree: shapes of tensors, other values as they are."""
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype)
    if (inside := _inside(tree)) is not None:
        return tuple((key, _kind(value)) for key, value in inside)
    plain = tree is None or isinstance(tree, bool | int | float | str)
    return repr(tree) if plain else id(tree)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Tensors of a tree, in a fixed order."""
    if isinstance(tree, Tensor):
        yield tree
    for _, value in _inside(tree) or ():
        yield from _tensors(value)


def _copy(ours: Any, given: Any) -> None:
    """Copy a tree's tensors into those of another, which may be itself."""
    if given is not ours:
        torch._foreach_copy_([*_tensors(ours)], [*_tensors(given)])


def _inside(tree: Any) -> list[tuple[Any, Any]] | None:
    """Children of a tree, by name; None for a leaf."""
    if is_dataclass(tree):
        return [(field.name, getattr(tree, field.name)) for field in fields(tree)]
    if isinstance(tree, Mapping):
        return list(tree.items())
    return list(enumerate(tree)) if isinstance(tree, list | tuple) else None


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        changed = {f.name: _mapped(getattr(tree, f.name), change) for f in fields(tree)}
        return replace(cast(Any, tree), **changed)
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [_mapped(value, change) for value in tree]
        named = isinstance(tree, tuple) and hasattr(tree, "_fields")
        return type(tree)(*values) if named else type(tree)(values)
    return tree


def _random_states(device: torch.device) -> list[Any]:
    kept = randomness.get_state(device)
    name, numbers, *rest = kept["numpy"]
    tensors = (kept["torch"], kept["cuda"])
    return [kept["python"], name, numbers.tolist(), rest, *(t.tolist() for t in tensors)]


def _release_generator(device: torch.device) -> None:
    """Reset the device's generator, which a failed capture leaves unusable for later draws."""
    generator = torch.cuda.default_generators[device.index]
    released = torch.Generator(device)
    released.set_state(generator.get_state())
    generator.graphsafe_set_state(released)


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "inner_exception", error)  # torch.compile wraps the compiler's error
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)
