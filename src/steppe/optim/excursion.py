"""One step's passes. The training loop sees each as a `Phase`, the method as a `Visit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import GradScaler

from . import distributed
from .graph import building_graph
from .still import is_capturing
from .vectors import Vector, are_ours, differ
from .walk import Held, Visit, Walk

if TYPE_CHECKING:
    from .engine import FlatnessOptimizer


class Phase(AbstractContextManager["Phase"]):
    """One pass of a step, for loops that own `backward`: ``with phase: ...forward, backward...``

    Attributes:
        index: 0 for the first pass, then 1, 2, ... Except in MSAM and ``RWP(alpha=1)``, the first
            is at the unperturbed weights.
        total: how many phases this step has.
        loss: the name of the loss to differentiate: ``"main"``, unless the method asks for another.
    """

    def __init__(self, excursion: Excursion, index: int) -> None:
        self.index = index
        self.total = len(excursion.visits)
        self.loss = excursion.visits[index].loss
        self.done = False
        self._excursion = excursion

    @_disable_dynamo
    def __enter__(self) -> Phase:
        self._excursion.enter(self.index)
        return self

    @_disable_dynamo
    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._excursion.leave(self.index, failed=kind is not None)
        self.done = kind is None


class Excursion:
    """One step of an optimizer: its visits, its buffers and the way back."""

    def __init__(self, opt: FlatnessOptimizer, scaler: GradScaler | None) -> None:
        self._opt, self._method = opt, type(opt).__name__
        self._params = opt.parameters()
        coefficients, visits = opt.planned()
        self.visits: Sequence[Visit] = visits
        self._spans = partial(opt._layout.spans, opt.param_groups, coefficients, opt.perturbed)
        self._scale = 1.0 if scaler is None else _scale(scaler, self._params)
        self._watched = scaler is not None and scaler.is_enabled()
        several = len(self.visits) > 1 or opt.needs_graph
        self._still = opt._kept_still(self._params) if several else None
        self._local: Sequence[nn.Module] | None = None
        """The models under ``perturbation="local"``, where only the direction is reduced."""
        # DDP may reduce a step of one pass, unless it looks for unused parameters: what it found in
        # a pass without reduction would break the next reduction.
        if opt.perturbation == "local" and (several or distributed.finds_unused(opt.models)):
            distributed.check_local(opt.models, self._params)
            self._local = opt.models
        self.walk: Walk | None = None
        self.next: int | None = 0
        """The next phase; None when the step is over."""
        self._inside = False
        self._held: Held = ()
        self._reached: set[Tensor] | None = None
        """The parameters that got a gradient, if the walk began without knowing them."""
        self._spare: tuple[list[Any], Vector] = ([], [])
        """Parameters, and the memory of the gradients that they had before the step."""
        self._sharded = False
        self._contexts = ExitStack()

    @torch.no_grad()
    def enter(self, index: int) -> None:
        """Prepare a pass: clear gradients and rewind random states."""
        if index != self.next or self._inside:
            raise RuntimeError(
                f"Phase {index} cannot be entered: it is already entered or over, or its step "
                "failed. Enter each phase once, with all micro-batches inside it, and call "
                "opt.phases() again after an error. Inside opt.passes, do not write 'with phase:'."
            )
        if index == 0:
            device = distributed.one_device(self._params)
            # A CUDA graph must not reuse memory from outside: others will get that memory.
            self._clear(recycle=self._still is not None and not is_capturing(device))
            if self._still is not None:
                self._still.begin(device)
        elif self._still is not None:
            self._still.again()
        with ExitStack() as stack:  # unwinds if a context fails; otherwise `leave` closes it
            if self._opt.needs_graph:
                stack.enter_context(building_graph())
            if self._local is not None:
                stack.enter_context(distributed.no_sync(self._local))
                if index == 0:  # DDP does this after reducing gradients, which no pass here does
                    distributed.broadcast_buffers_next(self._local)
            if index == 0 and (before := self.visits[0].before) is not None:
                self._leave_early(before)
            self._contexts = stack.pop_all()
        self._inside = True

    def _leave_early(self, before: Callable[[Walk], None]) -> None:
        """Move all trainable weights before the first pass: no gradient shows which take part."""
        trained = [p for p in self._params if p.requires_grad]
        if not trained:
            return
        self.walk, self._reached = self._depart(trained), set()
        try:
            (_compiled(before) if self._opt.compile else before)(self.walk)
        except BaseException:
            self.close()
            raise
        torch.clear_autocast_cache()

    @torch.no_grad()
    def leave(self, index: int, *, failed: bool) -> None:
        """Run the stage after a pass; if either failed, restore the weights."""
        self._inside = False
        self._contexts.close()
        # An autocast region around the step caches casts of weights that are about to move.
        torch.clear_autocast_cache()
        try:
            if failed:
                self.close()
                return
            if index != self.next:
                raise RuntimeError(
                    f"Another step began inside phase {index}. Finish all phases of a step before "
                    "starting the next one."
                )
            self.next = index + 1
            present = self._present()
            if index == 0 and not present:  # no gradients: an empty step, as in torch
                self.visits = self.visits[:1]
                if self.walk is not None:
                    self.walk.restore()
                    self.walk = None
                self._deliver([], [])
                return
            gradient = self._gradient(index, present)
            assert self.walk is not None
            then = self.visits[index].then
            stage = _compiled(then) if self._opt.compile else then
            self._held = stage(self.walk, gradient, *self._held)
            last = index + 1 == len(self.visits)
            # After the stage: it may differentiate through the pass, which saved the buffers.
            if self._still is not None:
                if index == 0:
                    self._still.take()
                else:
                    self._still.put_back()
                if last:
                    self._still.end()
            if last:
                self.walk.restore()
                self._deliver(self.walk.params, *self._held)
                self._opt._staged, self.walk = self.walk, None
            else:
                self._clear()
        except BaseException:
            self.close()
            raise

    @torch.no_grad()
    def close(self) -> None:
        """End the step: restore the weights if they were moved, and free every buffer."""
        self.next = None
        if self.walk is not None:
            self.walk.restore()
            if self._still is not None:
                self._still.put_back()
        if self._still is not None:
            self._still.forget()
        self.walk = None
        self._held = ()
        self._spare = ([], [])

    def _clear(self, recycle: bool = False) -> None:
        """Drop all gradients; `recycle` keeps their memory for the backup of the weights.

        On a CPU, touching fresh pages costs many times more than writing to old ones.
        """
        if recycle:
            present = self._present()
            grads = [p.grad for p in present]
            if are_ours(grads, present):
                self._spare = (present, grads)
        for p in self._params:
            p.grad = None

    def _present(self) -> list[Any]:
        return [p for p in self._params if p.grad is not None]

    def _gradient(self, index: int, present: list[Any]) -> Vector:
        """This pass's gradient as a vector; sets up the walk over its parameters."""
        if not present:
            raise RuntimeError(
                f"Pass 0 produced gradients, but pass {index} did not. Every call of the closure "
                f"must call backward on a loss that depends on the parameters of {self._method}."
            )
        if self._reached is not None:
            self._reached.update(present)
        if self.walk is None:
            self.walk = self._depart(present)
        elif differ(present, self.walk.params):
            self._meet(self.walk, present)
        grads: list[Any] = [p.grad for p in self.walk.params]
        if any(g.layout != torch.strided for g in grads):
            raise RuntimeError(
                f"{self._method} does not support sparse gradients: use sparse=False in "
                "nn.Embedding, or give those parameters their own optimizer."
            )
        return self._shards(grads)

    def _depart(self, params: list[Any]) -> Walk:
        """Start the walk, now that the first pass shows which parameters take part."""
        self._sharded = any(map(distributed.is_sharded, params))
        known, spare = self._spare
        self._spare = ([], [])
        return Walk(
            params,
            self._shards(params),
            self._spans(params),
            xi=self._opt.xi * self._scale,
            scale=self._scale,
            spare=None if differ(known, params) else spare,
            adopt=not self._sharded,
            groups=distributed.shard_groups(params) if self._sharded else (),
            memory=self._opt._memory,
            state=self._opt.base.state,
            seed=(self._opt.seed, self._opt.steps) if self._opt.draws else None,
        )

    def _meet(self, walk: Walk, present: list[Any]) -> None:
        """Handle a pass that gave gradients to different parameters than earlier passes.

        Routing may change from point to point. A missing gradient is zero.
        """
        either = {*walk.params, *present}
        params = [p for p in self._params if p in either]
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if len(params) > len(walk.params):
            self._held = walk.grow(params, self._shards(params), self._spans(params), self._held)

    def _shards(self, tensors: list[Any]) -> Vector:
        return [distributed.local(t) for t in tensors] if self._sharded else tensors

    def _deliver(self, params: list[Any], direction: Vector, *kept: Vector) -> None:
        """Put the direction in ``.grad``; under `local`, the means over processes."""
        self._opt._kept = tuple(self._shared(dict(zip(params, k, strict=True))) for k in kept)
        if self.walk is not None and kept and self._opt._kept[0].keys() - params:
            # Another process used more parameters: `after` must move those here, too.
            used = [p for p in self._params if p in self._opt._kept[0]]
            self.walk.grow(used, self._shards(used), self._spans(used), ())
        if self.walk is not None:
            self.walk.staged = {n: self._shared(v) for n, v in self.walk.staged.items()}
        if self._watched and self.walk is not None:
            staged = [list(vector.values()) for vector in self.walk.staged.values()]
            self._expose_overflow(direction, [*kept, *staged])
        mine = dict(zip(params, direction, strict=True))
        if self._reached is not None:
            for p in mine.keys() - self._reached:
                del mine[p]
                p.grad = None
        for p, d in self._shared(mine).items():
            if self._sharded:
                distributed.local(p.grad).copy_(d)
            else:
                p.grad = d.detach() if d.requires_grad else d  # a graph must not outlive the step

    def _expose_overflow(self, direction: Vector, others: Sequence[Vector]) -> None:
        """Make the direction NaN if anything else that the step uses or keeps overflowed.

        A GradScaler checks only the direction.
        """
        assert self.walk is not None
        shown = next((d for d in direction if d.numel()), None)
        for vector in others:
            overflow = 0.0 * self.walk.norm(vector)
            if shown is not None:
                shown.add_(overflow)

    def _shared(self, mine: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Values that all processes agree on: under `local`, the mean over processes."""
        if self._local is None:
            return mine
        everything = [p for p in self._params if p.requires_grad]
        return dict(zip(*distributed.average(everything, mine, self._local), strict=True))


_compiled = cache(torch.compile)


def _scale(scaler: GradScaler, params: Sequence[Tensor]) -> float | Tensor:
    """The loss scale. Unlike `get_scale`, it stays on the accelerator."""
    scale = scaler.scale(torch.ones((), device=distributed.one_device(params)))
    return scale.item() if scale.device.type == "cpu" else scale
