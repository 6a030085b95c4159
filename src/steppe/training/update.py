"""One update: forward and backward over a batch's parts, as often as the optimizer needs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from steppe.algorithms import Losses
from steppe.averaging import unfrozen
from steppe.curvature.convolution import FastConvolutions
from steppe.domains.batches import Batch
from steppe.optim import FlatnessOptimizer, distributed
from steppe.optim.engine import give_momentum, skips_by_itself
from steppe.optim.graph import twice_differentiable

from . import named
from .processes import Processes

_LAUNCH = ("foreach", "fused", "capturable")
"""Options of torch's optimizers that change how they compute, not what."""


@dataclass(frozen=True)
class Passes:
    """The forward and backward passes of an update.

    `prepared` is the result of the algorithm's `prepare` for each part of the batch, and
    `objective` names one of its losses. Methods return the losses at the weights before the update,
    one per part.
    """

    module: nn.Module
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    scaler: GradScaler | None = None

    def optimize(
        self, optimizer: Optimizer, objective: str, prepared: Sequence[Any]
    ) -> list[Losses]:
        """Take one step of any optimizer in the registry."""
        if not isinstance(optimizer, FlatnessOptimizer):
            losses = self.differentiate(optimizer, objective, prepared)
            self.apply(optimizer)
        else:
            losses = []
            closure = self._closure(optimizer, objective, prepared, losses)
            optimizer.step(closure, scaler=self.scaler)
            if self.scaler is not None:
                self.scaler.update()
        if getattr(optimizer, "needs_graph", False):
            self.module.zero_grad()  # other objectives' gradients would hold the graph
        return losses

    def differentiate(
        self, optimizer: Optimizer, objective: str, prepared: Sequence[Any]
    ) -> list[Losses]:
        """Compute the gradient, the first half of a step of a single-pass optimizer."""
        assert not isinstance(optimizer, FlatnessOptimizer), "it needs several gradients"
        losses: list[Losses] = []
        optimizer.zero_grad()
        self._closure(optimizer, objective, prepared, losses)()
        return losses

    def apply(self, optimizer: Optimizer) -> None:
        """Take the optimizer's step with the current gradients, the second half."""
        if skips_by_itself(optimizer):
            give_momentum(optimizer)
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.step(optimizer)
        self.scaler.update()

    def _closure(
        self,
        optimizer: Optimizer,
        objective: str,
        prepared: Sequence[Any],
        firsts: list[Losses],
    ) -> Callable[..., Tensor]:
        """One pass as a function; its first call appends its losses to `firsts`.

        Its argument names the loss to differentiate; it returns the main one. Only the objective
        ``"main"`` has others: domains differ in the loss of the classifier.
        """
        module, needs_graph = self.module, getattr(optimizer, "needs_graph", False)
        shared = module if isinstance(module, DistributedDataParallel) else None
        share = 1 / len(prepared)

        def evaluate(module: nn.Module, i: int) -> Losses:
            aux = firsts[i].aux if len(firsts) == len(prepared) else None
            losses: Losses = module(prepared[i], objective=objective, first=aux)
            return losses

        def closure(name: str = "main") -> Tensor:
            name = name if objective == "main" else "main"
            if (domain := named.domain(name)) is not None:
                return self._domain(optimizer, domain, prepared)
            with self.autocast():
                term = named.term(name, optimizer, module, prepared, evaluate)
            again = len(firsts) == len(prepared)
            losses_at_point = []
            for i, part in enumerate(prepared):
                # DDP averages gradients only once, with the last part.
                last = i + 1 == len(prepared)
                with nullcontext() if last or shared is None else shared.no_sync():
                    with self.autocast(), _twice(module) if needs_graph else nullcontext():
                        losses = evaluate(module, i)
                        loss = term(part, losses)
                        loss = loss if share == 1 else loss * share
                    self._differentiate(loss, needs_graph)
                if not again:
                    firsts.append(_detached(losses))
                losses_at_point.append(losses.total.detach())
            return torch.stack(losses_at_point).mean()

        return closure

    def _domain(self, optimizer: Optimizer, domain: int, prepared: Sequence[Any]) -> Tensor:
        """Differentiate one domain's loss, by a forward of its images alone, and return it."""
        algorithm = named.algorithm_of(self.module)
        losses = []
        for part in prepared:
            with self.autocast():
                loss = algorithm.risk(part, domain) / len(prepared)
            self._differentiate(loss)
            losses.append(loss.detach())
        # DDP reduces gradients only after its own forward, which takes all domains.
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        own = {p: p.grad for p in params if p.grad is not None}
        reduced = named.reduced(optimizer, self.module)
        for p, gradient in zip(*distributed.average(params, own, reduced), strict=True):
            p.grad = gradient
        return torch.stack(losses).sum()

    def _differentiate(self, loss: Tensor, create_graph: bool = False) -> None:
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        _backward(scaled, create_graph)


def base_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer that updates the weights."""
    return optimizer.base if isinstance(optimizer, FlatnessOptimizer) else optimizer


def forget(optimizer: Optimizer) -> None:
    """Reset an optimizer's state, such as moments, but keep its options."""
    base = base_of(optimizer)
    groups = [{**group} for group in base.state_dict()["param_groups"]]
    for group in groups:
        group.pop("step", None)  # pytorch_optimizer's step counter
    base.load_state_dict({"state": {}, "param_groups": groups})
    if isinstance(optimizer, FlatnessOptimizer):
        optimizer.forget()


def take_up(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer's saved state, but keep its own kernel options and memory layout.

    Those depend on the device, which may differ from the one that saved the state.
    """
    groups = [
        {**saved, **{name: own[name] for name in _LAUNCH if name in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for p, kept in optimizer.state.items():
        for name, value in kept.items():
            alike = isinstance(value, Tensor) and value.shape == p.shape
            if alike and value.stride() != p.stride():
                kept[name] = torch.empty_like(p, dtype=value.dtype).copy_(value)


def mean_state(firsts: Sequence[Mapping[str, Losses]], processes: Processes) -> dict[str, Losses]:
    """The argument of `commit`: the first part's losses, with the mean state of all parts.

    `firsts` has the losses of every objective, for each part of the batch. The mean is also over
    processes.
    """

    def mean(values: Sequence[Tensor]) -> Tensor:
        if not values[0].is_floating_point():  # a counter, equal everywhere
            return values[0]
        own = values[0].clone() if len(values) == 1 else torch.stack(list(values)).mean(0)
        return processes.sum(own) / processes.world if processes.world > 1 else own

    return {
        name: replace(
            losses,
            state={key: mean([part[name].state[key] for part in firsts]) for key in losses.state},
        )
        for name, losses in firsts[0].items()
    }


def share_statistics(algorithm: nn.Module, processes: Processes) -> None:
    """Average batch-norm statistics across processes."""
    if processes.world == 1:
        return
    found = (t for norm in unfrozen(algorithm) for t in (norm.running_mean, norm.running_var))
    shared = [t for t in found if t is not None]
    if shared:
        flat = torch.cat([t.flatten() for t in shared]) / processes.world
        means = processes.sum(flat).split([t.numel() for t in shared])
        for statistic, mean in zip(shared, means, strict=True):
            statistic.copy_(mean.view_as(statistic))


def cut(batches: Sequence[Batch], parts: int) -> list[list[Batch]]:
    """Split every domain's batch into equal parts.

    Examples:
        >>> batch = Batch(torch.zeros(6, 1, 2, 2), torch.arange(6))
        >>> [part[0].labels.tolist() for part in cut([batch], 2)]
        [[0, 1, 2], [3, 4, 5]]
    """
    pieces = [zip(b.images.chunk(parts), b.labels.chunk(parts), strict=True) for b in batches]
    return [[Batch(*piece) for piece in part] for part in zip(*pieces, strict=True)]


def _backward(loss: Tensor, create_graph: bool) -> None:
    with warnings.catch_warnings():
        # The warned-about leak does not occur: optimizers that need the graph drop the gradients.
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
        loss.backward(create_graph=create_graph)


@contextmanager
def _twice(module: nn.Module) -> Iterator[None]:
    """Prepare for differentiating a loss twice; autocast supports only torch's convolutions."""
    device = next(module.parameters()).device.type
    fast = nullcontext() if torch.is_autocast_enabled(device) else FastConvolutions()
    with twice_differentiable(), fast:
        yield


def _detached(losses: Losses) -> Losses:
    kept = (losses.parts, losses.aux, losses.state)
    parts, aux, state = ({name: value.detach() for name, value in d.items()} for d in kept)
    return Losses(losses.total.detach(), parts, aux, state)
