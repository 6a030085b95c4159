"""The engine under every flatness-aware optimizer: passes, phases, state; no method's formula.

A method's file says how its hyperparameters become coefficients and which points to visit. For a
step, this file asks for the phases and takes the base's step at the end, `excursion` does what each
pass needs before and after it, and the method's file what becomes of the gradient, in the words of
`walk`. `wrapper` has what does not change with the step: groups, state, copies.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # as torch.optim uses it: imports no compiler
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from . import distributed, frameworks, notices
from .excursion import Excursion, Phase
from .still import Models, StillState, rewinder
from .vectors import differ
from .walk import Held, Layout, Visit
from .wrapper import Wrapper

Batch = TypeVar("Batch")
Hyper = float | Callable[[int], float]
"""A hyperparameter: a number, or a schedule from the step (counted from 1) to a number."""


@dataclass(frozen=True)
class InverseSqrt:
    r"""The schedule of Theorem 3.2: $\rho_t = \rho_0 / \sqrt{t}$ for $t = 1, 2, \dots$

    A dataclass rather than a closure, so that an optimizer holding one can be pickled.

    Examples:
        >>> InverseSqrt(0.1)(4)
        0.05
    """

    rho_0: float

    def __call__(self, step: int) -> float:
        return self.rho_0 / math.sqrt(step)


USAGE = """\
{method}.step() needs a closure, because it evaluates the loss {passes}:

    def closure():
        loss = loss_fn(model(x), y)
        loss.backward({graph})
        return loss

    opt.step(closure)

In a loop that owns backward, step() without a closure follows the phases:

    for phase in opt.phases():
        with phase:
            loss_fn(model(x), y).backward({graph})
    opt.step()

steppe.integrations has this for Lightning, Hugging Face's Trainer and Accelerate."""


class FlatnessOptimizer(Wrapper):
    """Wraps an optimizer instance and feeds it a direction gathered from several gradients.

    `param_groups`, `state` and `defaults` are those of the base, always: schedulers, edits of `lr`
    and logging see one object. Step hooks fire once per step, when the direction is in `.grad`.

    Args:
        base: any `torch.optim.Optimizer` whose `step` needs no closure.
        hyper: the method's hyperparameters by name. Each may be overridden per parameter group
            under the same name, or as ``<method>_<name>`` where the base uses the name itself
            (RMSprop's ``alpha``).
        model: the module being trained, or several. Later passes then leave everything it holds
            that is not being optimized here as the first pass did (batch-norm statistics, a
            momentum encoder, a discriminator), and ``perturbation="local"`` can use DDP's
            `no_sync`.
        ratio: the share of steps, in (0, 1], that pay for flatness; the others are base steps.
        perturbation: under DDP, ``"global"`` perturbs along the all-reduced gradient, ``"local"``
            lets each process perturb along its own (m-sharpness) and reduces the direction once.
        max_norm: clips the norm of the direction before the base step.
        xi: the small constant added to every norm.
        compile: run each stage of arithmetic through `torch.compile`, which fuses it.
        generators: random generators of your own that the loss draws from (`torch.Generator`,
            `numpy.random.Generator`). Each pass then sees the same draws from them; the global ones
            need not be named.
    """

    def __init__(
        self,
        base: Optimizer,
        hyper: Mapping[str, Hyper],
        *,
        model: Models = None,
        ratio: float = 1.0,
        perturbation: str = "global",
        max_norm: float | None = None,
        xi: float = 1e-12,
        compile: bool = False,
        generators: Any = (),
    ) -> None:
        super().__init__(base)
        if not 0.0 < ratio <= 1.0:
            raise ValueError(f"ratio must be in (0, 1], got {ratio}")
        if perturbation not in ("global", "local"):
            raise ValueError(f"perturbation must be 'global' or 'local', got {perturbation!r}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        if not xi > 0:
            raise ValueError(f"xi keeps a zero gradient from dividing by zero: > 0, got {xi}")
        self.model = model
        self.ratio = ratio
        self.perturbation = perturbation
        self.max_norm = max_norm
        self.xi = xi
        self.compile = compile
        self.generators = tuple(generators) if isinstance(generators, Iterable) else (generators,)
        for generator in self.generators:
            rewinder(generator)  # refuses what is not one
        self._check_parameters()
        if perturbation == "local":
            distributed.check_local(self.models, self.parameters())
        self._share(hyper)  # last: a wrapper that is refused leaves the base as it was

    def _reset(self) -> None:
        self._ready = False
        """Whether the direction is in ``.grad`` and waits for the base's step."""
        self._looked = False
        self._open: Excursion | None = None
        self._still = StillState((), ())
        self._compiled: dict[Callable[..., Held], Callable[..., Held]] = {}
        self._layout = Layout()

    @property
    def model(self) -> nn.Module | tuple[nn.Module, ...] | None:
        """The module being trained, or several; set it to change it."""
        return self.models if len(self.models) > 1 else next(iter(self.models), None)

    @model.setter
    def model(self, model: Models) -> None:
        found = () if model is None else (model,) if isinstance(model, nn.Module) else tuple(model)
        for one in found:
            if not isinstance(one, nn.Module):
                raise TypeError(
                    f"model must be an nn.Module or several of them, got {type(one).__name__}"
                )
        self.models = found

    def coefficients(self, hyper: Mapping[str, float]) -> Mapping[str, float]:
        """The numbers its stages use, from one group's hyperparameters."""
        return hyper

    @abstractmethod
    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        """The points this step visits, given every group's coefficients."""

    @_disable_dynamo
    def step(
        self, closure: Callable[..., Any] | None = None, scaler: GradScaler | None = None
    ) -> Any:
        """Takes one step and returns the loss at the unperturbed weights.

        Inside a function that is compiled as a whole it runs eagerly, as the steps of torch's
        optimizers with a closure do; a model that is compiled itself stays compiled. A step in
        which no parameter gets a gradient changes nothing.

        Args:
            closure: computes the loss, calls backward on it (scaled, if `scaler` is given) and
                returns it. Gradients are cleared before each call. May be left out only after
                the phases of `phases`.
            scaler: the `torch.amp.GradScaler` whose `scale` the closure applies. The direction is
                unscaled once; if it is not finite, the weights stay as they are and the scaler
                backs off at its next `update`. Call ``scaler.update()`` after the step as usual;
                if you do not, the next step does.
        """
        guard = frameworks.guard(self)
        if guard is not None:
            closure = guard.closure(self, closure)
        if closure is None:
            return self._base_step()
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        stepped = self.base if skips_by_itself(self.base) else self
        if scaler is not None:
            state = scaler._per_optimizer_states.get(id(stepped), {})
            if state.get("stage") is OptState.STEPPED:  # and the loop has not called update() since
                scaler.update()
        loss = None
        for phase in self.phases(scaler):
            with phase, torch.enable_grad():
                result = closure() if phase.loss == "main" else closure(phase.loss)
                if phase.index == 0 and phase.total > 1 and not self._looked:
                    method, known = type(self).__name__, bool(self.models)
                    self._looked = notices.look(result, method, phase.total, model_given=known)
            if phase.index == 0:  # a copy: a replayed CUDA graph writes each loss to one place
                loss = result.detach().clone() if isinstance(result, Tensor) else result
        if scaler is None or all(p.grad is None for p in self.parameters()):
            self._base_step()
        elif stepped is self:
            scaler.step(self)  # unscales, checks, and calls step() if the direction is finite
            self._ready = False
        else:
            self._base_step(scaler)
        return loss

    @property
    def due(self) -> bool:
        """Whether the next step pays for flatness, by `ratio`."""
        # A whole number must not be missed by rounding: 100 * 0.29 is 28.999999999999996.
        owed = [math.floor(t * self.ratio + 1e-9) for t in (self.steps, self.steps + 1)]
        return owed[1] > owed[0]

    def phases(self, scaler: GradScaler | None = None) -> Iterator[Phase]:
        """The passes of one step, for loops that own `backward`.

        Run forward and backward once inside each phase. Leaving the last one restores the weights
        and puts the direction in `.grad`; then `scaler.unscale_`, clipping and `step()` (or
        ``scaler.step(opt)``) are those of ordinary PyTorch. An exception, or leaving the loop
        early, restores the weights.

        Args:
            scaler: if given, `xi` is scaled like the gradients; the rest is yours.
        """
        owner = self._owner()
        behind: Any = getattr(self, "optimizer", None)
        if behind is not None and behind is owner:  # Lightning's handle has our methods, not state
            yield from behind.phases(scaler)
            return
        frameworks.guard(self)
        self._ready = False
        if self._open is not None:  # left early, and its generator is still held somewhere
            self._open.close()
        if owner is not self:
            raise RuntimeError(
                f"The base of this {type(self).__name__} was wrapped again, by "
                f"{owner or 'another optimizer'}: "
                "their hyperparameters share its groups. Give each its own base."
            )
        excursion = self._open = Excursion(self, scaler)
        try:
            for index in range(len(excursion.visits)):
                if index == len(excursion.visits):  # nothing got a gradient: fewer are needed
                    break
                phase = Phase(excursion, index)
                yield phase
                if not phase.done:
                    raise RuntimeError(
                        f"Phase {index} of {phase.total} was skipped or failed: run forward and "
                        "backward inside 'with phase:', and start again with opt.phases() after "
                        "an error."
                    )
            self._ready = self._open is excursion  # not if another step has overtaken this one
        finally:
            excursion.close()
            if self._open is excursion:
                self._open = None

    def _stage(self, visit: Visit) -> Callable[..., Held]:
        """What becomes of a visit's gradient, compiled if it is to be."""
        if not self.compile:
            return visit.then
        if visit.then not in self._compiled:
            self._compiled[visit.then] = torch.compile(visit.then)
        return self._compiled[visit.then]

    def _kept_still(self, params: list[Any]) -> StillState:
        """What keeps the models' state still; it knows what earlier steps have seen to change."""
        known = self._still
        if self.models or known.models:
            trained = [p for p in params if p.requires_grad]  # the others are state
            if known.models != self.models or differ(known.optimized, trained):
                known = self._still = StillState(self.models, trained)
        known.generators = self.generators
        return known

    def passes(
        self,
        batches: Iterable[Batch],
        scaler: GradScaler | None = None,
        *,
        no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> Iterator[tuple[Phase, Batch]]:
        """The passes of one step over several micro-batches, for loops that accumulate.

        Run forward and backward once for every pair, and divide the loss by the number of
        micro-batches as usual. Every pass needs all of them, so fetch them before. Then clip and
        step as after `phases`. Under DDP, gradients are reduced with the last micro-batch only.

        Args:
            batches: the micro-batches of the step.
            scaler: as for `phases`.
            no_sync: what keeps gradients from being reduced; by default the model's own `no_sync`.

        Examples:
            >>> from steppe.optim import SAM
            >>> model = nn.Linear(3, 1)
            >>> opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
            >>> batches = torch.randn(4, 8, 3)
            >>> for phase, x in opt.passes(batches):
            ...     loss = model(x).square().mean() / len(batches)
            ...     loss.backward()
            >>> _ = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            >>> opt.step()
        """
        batches = list(batches)  # an iterator would be empty in the second pass
        if not batches:
            raise ValueError("passes needs at least one micro-batch, got none")
        keep = no_sync or (lambda: distributed.no_sync(self.models))
        for phase in self.phases(scaler):
            with phase:
                for number, batch in enumerate(batches, start=1):
                    with nullcontext() if number == len(batches) else keep():
                        yield phase, batch

    def abandon(self) -> None:
        """Forgets a step that was recorded and never ran, without touching the weights.

        For whoever captures steps in a CUDA graph: nothing has moved, and where a capture failed,
        what would put the weights back holds no weights.
        """
        if self._open is not None:
            self._open.walk = None
            self._open.close()
        self._open = None
        self._ready = False

    @torch.no_grad()
    def _base_step(self, scaler: GradScaler | None = None) -> None:
        """Gives the base the direction; `scaler` is for a base whose kernels unscale it."""
        if not self._ready:
            passes = "more than once" if not self.needs_graph else "and its Hessian"
            graph = "create_graph=True" if self.needs_graph else ""
            raise RuntimeError(USAGE.format(method=type(self).__name__, passes=passes, graph=graph))
        if self.max_norm is not None:
            if scaler is not None:
                scaler.unscale_(self.base)
            nn.utils.clip_grad_norm_(self.parameters(), self.max_norm)
        if skips_by_itself(self.base):
            give_momentum(self.base)
        if scaler is None:
            self.base.step()
        else:
            scaler.step(self.base)  # the host does not learn whether it was skipped
        self._ready = False
        self.steps += 1


def skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer's kernels unscale gradients, and do nothing if one is not finite.

    The host then never needs to know. Not under dampening: its first step is unlike the others,
    and whether a step was the first, only the host could say.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not any(
        group.get("dampening", 0) for group in optimizer.param_groups
    )


def give_momentum(base: Optimizer) -> None:
    """Starts the momentum of a fused SGD at zero, which is what a first step takes it for.

    Torch would make its buffers of whatever is in memory, and a first step that is skipped leaves
    them so.
    """
    for group in base.param_groups:
        if not group.get("momentum", 0):
            continue
        for p in group["params"]:
            if p.grad is not None and base.state[p].get("momentum_buffer") is None:
                base.state[p]["momentum_buffer"] = torch.zeros_like(p)
