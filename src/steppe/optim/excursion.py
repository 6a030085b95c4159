"""Phases: what happens around each pass of a step.

An excursion is one step's passes in order. Each is a `Phase` to the loop outside, and a `Visit` of
the recipe inside: the phase clears gradients and rewinds randomness, the pass is the caller's
forward and backward, and the visit's stage then does the arithmetic on the `Walk`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from . import distributed
from .graph import building_graph
from .still import StillState, is_capturing
from .vectors import Vector, are_ours, differ
from .walk import Held, Span, Visit, Walk


class Phase(AbstractContextManager["Phase"]):
    """One pass of a step, for loops that own `backward`: ``with phase: ...forward, backward...``

    Attributes:
        index: 0 for the pass at the unperturbed weights, then 1, 2, ...
        total: how many phases this step has.
        loss: the name of the loss to differentiate, ``"main"`` for all methods that ship.
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
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._excursion.leave(self.index, failed=kind is not None)
        self.done = kind is None


@dataclass(eq=False)
class Excursion:
    """The passes of one step, from clearing the gradients to delivering the direction.

    It owns the points, the buffers and the way back, and is told everything else.

    Attributes:
        method: its name, for errors.
        params: all parameters of the optimizer, in the order of their groups.
        visits: the points of this step.
        spans: divides the parameters that take part by their groups' coefficients.
        xi: the small constant added to norms, scaled like the gradients.
        memory: what the recipe keeps from step to step, by parameter.
        still: keeps what passes share as the first one left it; None if there is only one.
        local: the models whose gradients only the direction's average is to reduce, if this
            process perturbs by itself; None if every pass reduces.
        graph: whether stages differentiate through the pass.
    """

    method: str
    params: list[Any]
    visits: Sequence[Visit]
    spans: Callable[[list[Any]], list[Span]]
    xi: float | Tensor
    memory: dict[Tensor, dict[str, Tensor]]
    still: StillState | None
    local: Sequence[nn.Module] | None
    graph: bool
    walk: Walk | None = field(init=False, default=None)
    next: int | None = field(init=False, default=0)
    """The phase to come; None when the excursion is over."""

    def __post_init__(self) -> None:
        self._held: Held = ()
        self._spare: dict[Tensor, Tensor] = {}
        self._sharded = False
        self._contexts = ExitStack()

    def enter(self, index: int) -> None:
        """Gets ready for a pass: gradients cleared, random states as they were for the first."""
        if index != self.next:
            raise RuntimeError(
                f"Phase {index} cannot be entered: it is over, or the step was abandoned after an "
                "error. Enter each phase once (micro-batches go inside it), and start again with "
                "opt.phases() after an error."
            )
        if index == 0:
            device = distributed.one_device(self.params)
            # A graph must not keep writing to memory from outside it, which others will get.
            self._clear(recycle=self.still is not None and not is_capturing(device))
            if self.still is not None:
                self.still.begin(device)
        elif self.still is not None:
            self.still.again()
        with ExitStack() as stack:  # undone if one of them fails, kept for `leave` otherwise
            if self.graph:
                stack.enter_context(building_graph())
            if self.local is not None:
                stack.enter_context(distributed.no_sync(self.local))
                if index == 0:  # no pass of ours reduces gradients, which is when DDP would do this
                    distributed.broadcast_buffers_next(self.local)
            self._contexts = stack.pop_all()

    @torch.no_grad()
    def leave(self, index: int, *, failed: bool) -> None:
        """Runs the stage after a pass, or goes home if the pass or the stage failed."""
        self._contexts.close()
        # An autocast region around the step keeps casts of weights that are about to move.
        torch.clear_autocast_cache()
        try:
            if failed:
                self.close()
                return
            if index != self.next:
                raise RuntimeError(f"Phase {index} was overtaken: another step began inside it.")
            self.next = index + 1
            present = self._present()
            if index == 0 and not present:  # nothing to climb: the step is over, as in torch
                self.visits = self.visits[:1]
                self._deliver([], [])
                return
            gradient = self._gradient(index, present)
            assert self.walk is not None
            self._held = self.visits[index].then(self.walk, gradient, *self._held)
            last = index + 1 == len(self.visits)
            # After the stage, which may differentiate through the pass, and that saved the buffers.
            if self.still is not None:
                if index == 0:
                    self.still.take()
                else:
                    self.still.put_back()
                if last:
                    self.still.end()
            if last:
                self.walk.restore()
                self._deliver(self.walk.params, *self._held)
                self.walk = None
            else:
                self._clear()
        except BaseException:
            self.close()
            raise

    @torch.no_grad()
    def close(self) -> None:
        """Ends the excursion: the weights go back if they are away, every buffer is let go of."""
        self.next = None
        if self.walk is not None:
            self.walk.restore()
            if self.still is not None:
                self.still.put_back()
        if self.still is not None:
            self.still.forget()
        self.walk = None
        self._held = ()
        self._spare = {}

    def _clear(self, recycle: bool = False) -> None:
        """Drops all gradients, keeping the memory of the old ones for the backup if asked to.

        The last step's direction would be freed here anyway, and on a CPU touching fresh pages
        costs many times what writing to them does.
        """
        present = self._present()
        if recycle:
            grads = [p.grad for p in present]
            if are_ours(grads, present):
                self._spare = dict(zip(present, grads, strict=True))
        for p in present:
            p.grad = None

    def _present(self) -> list[Any]:
        return [p for p in self.params if p.grad is not None]

    def _gradient(self, index: int, present: list[Any]) -> Vector:
        """This pass's gradient as a vector, with the walk over its parameters set up."""
        if not present:
            raise RuntimeError(
                f"Pass {index} left no gradient, though pass 0 did: every call of the closure must "
                f"call backward on a loss that depends on the parameters of {self.method}."
            )
        if self.walk is None:
            self.walk = self._depart(present)
        elif differ(present, self.walk.params):
            self._meet(self.walk, present)
        grads: list[Any] = [p.grad for p in self.walk.params]
        if any(g.layout != torch.strided for g in grads):
            raise RuntimeError(
                f"{self.method} does not take sparse gradients: use sparse=False in nn.Embedding, "
                "or give those parameters an optimizer of their own."
            )
        return self._shards(grads)

    def _depart(self, params: list[Any]) -> Walk:
        """Starts the walk from the weights, once the first pass says which parameters take part."""
        self._sharded = any(map(distributed.is_sharded, params))
        spare = [self._spare[p] for p in params if p in self._spare]
        self._spare = {}
        return Walk(
            params,
            self._shards(params),
            self.spans(params),
            xi=self.xi,
            spare=spare if len(spare) == len(params) else None,
            adopt=not self._sharded,
            groups=distributed.shard_groups(params) if self._sharded else (),
            memory=self.memory,
        )

    def _meet(self, walk: Walk, present: list[Any]) -> None:
        """Copes with a pass whose gradients are of other parameters than those known so far.

        A missing gradient is zero. Routing may change from point to point.
        """
        either = {*walk.params, *present}
        params = [p for p in self.params if p in either]
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if len(params) > len(walk.params):
            self._held = walk.grow(params, self._shards(params), self.spans(params), self._held)

    def _shards(self, tensors: list[Any]) -> Vector:
        return [distributed.local(t) for t in tensors] if self._sharded else tensors

    def _deliver(self, params: list[Any], direction: Vector) -> None:
        """Puts the direction in ``.grad``; under `local`, the mean over processes of theirs."""
        if self.local is not None:
            everything = [p for p in self.params if p.requires_grad]
            mine = dict(zip(params, direction, strict=True))
            params, direction = distributed.average(everything, mine, self.local)
        for p, d in zip(params, direction, strict=True):
            if self._sharded:
                distributed.local(p.grad).copy_(d)
            else:
                p.grad = d.detach() if d.requires_grad else d  # a graph must not outlive the step
