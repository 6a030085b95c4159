"""Phases: what happens around each pass of a step.

An excursion is one step's passes in order. Each is a `Phase` to the loop outside, and a `Visit` of
the recipe inside: the phase clears gradients and rewinds randomness, the pass is the caller's
forward and backward, and the visit's stage then does the arithmetic on the `Walk`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import GradScaler

from . import distributed
from .graph import building_graph
from .ownership import are_ours
from .replay import is_capturing, record_randomness
from .still import differ
from .vectors import Vector
from .walk import Held, Span, Visit, Walk

if TYPE_CHECKING:
    from .engine import FlatnessOptimizer

PLAIN: tuple[Visit, ...] = (Visit(lambda walk, g0: (g0,)),)
"""The recipe of a step that does not pay for flatness: the gradient itself."""

CPU_BLOCK = 2**20
"""Bytes after which a span ends on a CPU. An accelerator wants few large launches instead."""


class Phase(AbstractContextManager["Phase"]):
    """One pass of a step, for loops that own `backward`: ``with phase: ...forward, backward...``

    Attributes:
        index: 0 for the pass at the unperturbed weights, then 1, 2, ...
        total: how many phases this step has.
        loss: the name of the loss to differentiate, ``"main"`` for all methods that ship.
    """

    def __init__(self, excursion: Excursion, index: int, visit: Visit) -> None:
        self.index = index
        self.total = len(excursion.visits)
        self.loss = visit.loss
        self.done = False
        self._excursion = excursion
        self._visit = visit

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
        self._excursion.leave(self.index, self._visit, failed=kind is not None)
        self.done = kind is None


class Excursion:
    """The passes of one step, from clearing the gradients to delivering the direction."""

    def __init__(self, opt: FlatnessOptimizer, scaler: GradScaler | None) -> None:
        self.opt = opt
        self.groups = opt.param_groups
        step = opt.steps + 1
        self.coefficients = [opt.coefficients(opt._values(g, step)) for g in self.groups]
        self.visits = opt.visits(self.coefficients) if opt.due else PLAIN
        self.several = len(self.visits) > 1 or opt.needs_graph
        self.own_perturbation = self.several and opt.perturbation == "local"
        if self.own_perturbation:
            opt._check_local()
        self.scaler = scaler
        self.still = opt._still() if self.several else None
        self.rewind: Callable[[], None] | None = None
        self.walk: Walk | None = None
        self.held: Held = ()
        self.contexts: ExitStack | None = None
        self.spare: dict[Tensor, Tensor] = {}
        self.sharded = False
        self.next: int | None = 0
        """The phase to come; None when the excursion is over."""

    def enter(self, index: int) -> None:
        """Gets ready for a pass: gradients cleared, random states as they were for the first."""
        if index != self.next:
            raise RuntimeError(
                f"Phase {index} cannot be entered: it is over, or the step was abandoned after an "
                "error. Enter each phase once (micro-batches go inside it), and start again with "
                "opt.phases() after an error."
            )
        if index == 0:
            device = check_one_device(self.opt.parameters())
            # A graph must not keep writing to memory from outside it, which others will get.
            capturing = is_capturing(device)
            self._clear(recycle=self.several and not capturing)
            if self.still is not None:
                self.rewind = record_randomness(device, self.opt.generators)
                self.still.begin(capturing)
        elif self.rewind is not None and self.still is not None:
            self.rewind()
            self.still.set_aside()
        with ExitStack() as stack:  # undone if one of them fails, kept for `leave` otherwise
            if self.opt.needs_graph:
                stack.enter_context(building_graph())
            if self.own_perturbation:
                stack.enter_context(distributed.no_sync(self.opt.models))
                if index == 0:  # no pass of ours reduces gradients, which is when DDP would do this
                    distributed.broadcast_buffers_next(self.opt.models)
            self.contexts = stack.pop_all()

    @torch.no_grad()
    def leave(self, index: int, visit: Visit, *, failed: bool) -> None:
        """Runs the stage after a pass, or goes home if the pass or the stage failed."""
        assert self.contexts is not None
        self.contexts.close()
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
                self._deliver_nothing()
                return
            gradient = self._gradient(index, present)
            assert self.walk is not None
            self.held = self._stage(visit.then)(self.walk, gradient, *self.held)
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
                self._deliver(*self.held)
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
        self.held = ()
        self.spare = {}

    def _stage(self, then: Callable[..., Held]) -> Callable[..., Held]:
        if not self.opt.compile:
            return then
        compiled = self.opt._compiled
        if then not in compiled:
            compiled[then] = torch.compile(then)
        return compiled[then]

    def _clear(self, recycle: bool = False) -> None:
        """Drops all gradients, keeping the memory of the old ones for the backup if asked to.

        The last step's direction would be freed here anyway, and on a CPU touching fresh pages
        costs many times what writing to them does.
        """
        present = self._present()
        if recycle:
            grads = [p.grad for p in present]
            if are_ours(grads, present):
                self.spare = dict(zip(present, grads, strict=True))
        for p in present:
            p.grad = None

    def _present(self) -> list[Any]:
        return [p for p in self.opt.parameters() if p.grad is not None]

    def _gradient(self, index: int, present: list[Any]) -> Vector:
        """This pass's gradient as a vector, with the walk over its parameters set up."""
        if not present:
            raise RuntimeError(
                f"Pass {index} left no gradient, though pass 0 did: every call of the closure must "
                f"call backward on a loss that depends on the parameters of "
                f"{type(self.opt).__name__}."
            )
        if self.walk is None:
            self.walk = self._depart(present)
        elif differ(present, self.walk.params):
            self._meet(present)
        grads: list[Any] = [p.grad for p in self.walk.params]
        if any(g.layout != torch.strided for g in grads):
            raise RuntimeError(
                f"{type(self.opt).__name__} does not take sparse gradients: use sparse=False in "
                "nn.Embedding, or give those parameters an optimizer of their own."
            )
        return [distributed.local(g) for g in grads] if self.sharded else grads

    def _meet(self, present: list[Any]) -> None:
        """Copes with a pass whose gradients are of other parameters than those known so far.

        A missing gradient is zero. Routing may change from point to point.
        """
        walk = self.walk
        assert walk is not None
        either = {*walk.params, *present}
        params = [p for p in self.opt.parameters() if p in either]
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if len(params) > len(walk.params):
            theta = self._shards(params)
            self.held = tuple(_extended(h, walk.params, params, theta) for h in self.held)
            walk.grow(params, theta, self._spans(params))

    def _shards(self, params: list[Any]) -> Vector:
        return [distributed.local(p) for p in params] if self.sharded else params

    def _spans(self, params: list[Any]) -> list[Span]:
        """Divides the list by coefficients and, on a CPU, into blocks that fit a cache.

        The same for most steps, and then not worked out again.
        """
        limit = CPU_BLOCK if params[0].device.type == "cpu" else math.inf
        known, coefficients, old_limit, spans = self.opt._layout
        if coefficients != self.coefficients or old_limit != limit or differ(known, params):
            spans = self._divide(params, limit)
            self.opt._layout = params, self.coefficients, limit, spans
        return spans

    def _divide(self, params: list[Any], limit: float) -> list[Span]:
        owner = {
            p: c for g, c in zip(self.groups, self.coefficients, strict=True) for p in g["params"]
        }
        spans: list[Span] = []
        filled = math.inf
        for i, p in enumerate(params):
            if filled < limit and spans[-1].coefficients == owner[p]:
                start = spans.pop().tensors.start
            else:
                start, filled = i, 0
            spans.append(Span(slice(start, i + 1), owner[p]))
            filled += p.nbytes
        return spans

    def _depart(self, params: list[Any]) -> Walk:
        """Starts the walk from the weights, once the first pass says which parameters take part."""
        opt = self.opt
        self.sharded = any(map(distributed.is_sharded, params))
        if self.sharded and opt.needs_graph:
            raise TypeError(
                f"{type(opt).__name__} differentiates gradients, which sharded parameters (FSDP2) "
                "do not allow. Use GAM, which needs only gradients."
            )
        theta = self._shards(params)
        xi: float | Tensor = opt.xi
        if self.scaler is not None:
            one = torch.ones((), device=theta[0].device)
            scale = self.scaler.scale(one)  # stays on the device, unlike get_scale()
            xi = opt.xi * (scale.item() if scale.device.type == "cpu" else scale)
        spare = [self.spare[p] for p in params if p in self.spare]
        self.spare = {}
        return Walk(
            params,
            theta,
            self._spans(params),
            xi=xi,
            spare=spare if len(spare) == len(params) else None,
            adopt=not self.sharded,
            groups=distributed.shard_groups(params) if self.sharded else (),
            memory=opt._memory,
        )

    def _deliver(self, direction: Vector) -> None:
        walk = self.walk
        assert walk is not None
        walk.restore()
        params: list[Any] = walk.params
        if self.own_perturbation:
            params, direction = self._averaged(params, direction)
        for p, d in zip(params, direction, strict=True):
            if self.sharded:
                distributed.local(p.grad).copy_(d)
            else:
                p.grad = d.detach() if d.requires_grad else d  # a graph must not outlive the step
        self.walk = None

    def _deliver_nothing(self) -> None:
        """Ends a step without gradients; other processes may still have some."""
        if self.own_perturbation:
            for p, d in zip(*self._averaged([], []), strict=True):
                p.grad = d

    def _averaged(self, params: list[Any], direction: Vector) -> tuple[list[Any], Vector]:
        """The mean over processes of what each perturbed by itself."""
        parallel = distributed.synchronizing(self.opt.models)
        if parallel is None:
            return params, direction
        everything = [p for p in self.opt.parameters() if p.requires_grad]
        mine = dict(zip(params, direction, strict=True))
        return distributed.average(everything, mine, parallel.process_group)


def check_one_device(params: Sequence[Tensor]) -> torch.device:
    """The device all parameters share, or an error that names the several."""
    devices = {p.device for p in params}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"Parameters are on several devices ({names}); a flatness-aware step needs one norm "
            "over all of them. Put the model on one device, or shard it with fully_shard."
        )
    return next(iter(devices), torch.device("cpu"))


def _extended(held: Vector, known: list[Tensor], params: list[Tensor], theta: Vector) -> Vector:
    """What is held, with zeros for the parameters that were not known before."""
    old = {id(p): h for p, h in zip(known, held, strict=True)}
    return [
        old[id(p)] if id(p) in old else torch.zeros_like(t)
        for p, t in zip(params, theta, strict=True)
    ]
