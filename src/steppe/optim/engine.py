"""The engine under every flatness-aware optimizer: passes, phases, state; no method's formula.

A method subclasses `FlatnessOptimizer` and supplies two things: how its hyper-parameters become
coefficients (`coefficients`), and which points to visit (`visits`). Everything that makes a
several-pass step safe lives here and in the small modules beside it.
"""

from __future__ import annotations

import copy
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # as torch.optim uses it: imports no compiler
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from . import distributed, frameworks, notices
from .excursion import Excursion, Phase, check_one_device
from .replay import rewinder
from .still import Models, StillState, differ
from .walk import Held, Span, Visit
from .wrapper import Wrapper

Batch = TypeVar("Batch")
Hyper = float | Callable[[int], float]
"""A hyper-parameter: a number, or a schedule from the step (counted from 1) to a number."""

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


class FlatnessOptimizer(Wrapper, ABC):
    """Wraps an optimizer instance and feeds it a direction gathered from several gradients.

    `param_groups`, `state` and `defaults` are those of the base, always: schedulers, edits of `lr`
    and logging see one object. Step hooks fire once per step, when the direction is in `.grad`.

    Args:
        base: any `torch.optim.Optimizer` whose `step` needs no closure.
        hyper: the method's hyper-parameters by name. Each may be overridden per parameter group
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

    needs_graph: ClassVar[bool] = False
    """Whether the closure must call ``backward(create_graph=True)``."""

    _ready: bool
    _looked: bool
    _open: Excursion | None
    _kept_still: StillState | None

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
        generators: Iterable[Any] = (),
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
        several = isinstance(generators, Iterable)
        self.generators = tuple(generators) if several else (generators,)
        for generator in self.generators:
            rewinder(generator)  # refuses what is not one
        self.steps = 0
        """Steps taken so far; one that a GradScaler skips counts under a fused base alone, whose
        kernels skip it without telling the host."""
        self._memory: dict[Tensor, dict[str, Tensor]] = {}
        self._start_clean()
        self._check_parameters()
        if perturbation == "local":
            self._check_local()
        self._share(hyper)  # last: a wrapper that is refused leaves the base as it was
        self._own()

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

    def _still(self) -> StillState:
        """What keeps the models' state still; it knows what earlier steps have seen to change."""
        known = self._kept_still
        if known is not None and not self.models and not known.models:
            return known  # of nothing
        params = [p for p in self.parameters() if p.requires_grad]  # the others are state
        if known is None or known.models != self.models or differ(known.optimized, params):
            known = self._kept_still = StillState(self.models, params)
        return known

    def coefficients(self, hyper: Mapping[str, float]) -> Mapping[str, float]:
        """The numbers its stages use, from one group's hyper-parameters."""
        return hyper

    @abstractmethod
    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        """The points this step visits, given every group's coefficients."""

    @_disable_dynamo
    def step(
        self,
        closure: Callable[..., Any] | None = None,
        scaler: GradScaler | None = None,
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
            _update_if_due(scaler, stepped)
        loss = None
        for phase in self.phases(scaler):
            with phase, torch.enable_grad():
                result = closure() if phase.loss == "main" else closure(phase.loss)
                if phase.index == 0:
                    self._look_at(result, phase.total)
            if phase.index == 0:  # a copy: a replayed CUDA graph writes each loss to one place
                loss = result.detach().clone() if isinstance(result, Tensor) else result
        if scaler is None or all(p.grad is None for p in self.parameters()):
            self._base_step()
        elif stepped is self:
            scaler.step(self)  # unscales, checks, and calls step() if the direction is finite
            self._ready = False
        else:
            self._fused_step(scaler)
        return loss

    @property
    def due(self) -> bool:
        """Whether the next step pays for flatness, by `ratio`."""
        # A whole number must not be missed by rounding: 100 * 0.29 is 28.999999999999996.
        owed = [math.floor(t * self.ratio + 1e-9) for t in (self.steps, self.steps + 1)]
        return owed[1] > owed[0]

    @torch.no_grad()
    def _fused_step(self, scaler: GradScaler) -> None:
        give_momentum(self.base)
        if self.max_norm is not None:
            scaler.unscale_(self.base)
            nn.utils.clip_grad_norm_(self.parameters(), self.max_norm)
        scaler.step(self.base)  # the host does not learn whether it was skipped
        self._ready = False
        self.steps += 1

    def phases(self, scaler: GradScaler | None = None) -> Iterator[Phase]:
        """The passes of one step, for loops that own `backward`.

        Run forward and backward once inside each phase. Leaving the last one restores the weights
        and puts the direction in `.grad`; then `scaler.unscale_`, clipping and `step()` (or
        ``scaler.step(opt)``) are those of ordinary PyTorch. An exception, or leaving the loop
        early, restores the weights.

        Args:
            scaler: if given, `xi` is scaled like the gradients; the rest is yours.
        """
        owner = getattr(self.base, "_steppe_owner", None)
        if owner is not None and frameworks.is_handle(self, owner()):
            yield from owner().phases(scaler)
            return
        frameworks.guard(self)
        self._ready = False
        if self._open is not None:  # left early, and its generator is still held somewhere
            self._open.close()
        if owner is not None and owner() is not self:
            raise RuntimeError(
                f"The base of this {type(self).__name__} was wrapped again, by "
                f"{owner() or 'another optimizer'}: "
                "their hyper-parameters share its groups. Give each its own base."
            )
        excursion = self._open = Excursion(self, scaler)
        try:
            for index, visit in enumerate(excursion.visits):
                if index == len(excursion.visits):  # nothing got a gradient: fewer are needed
                    break
                phase = Phase(excursion, index, visit)
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
    def _base_step(self) -> None:
        if not self._ready:
            passes = "more than once" if not self.needs_graph else "and its Hessian"
            graph = "create_graph=True" if self.needs_graph else ""
            raise RuntimeError(USAGE.format(method=type(self).__name__, passes=passes, graph=graph))
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters(), self.max_norm)
        if skips_by_itself(self.base):
            give_momentum(self.base)
        self.base.step()
        self._ready = False
        self.steps += 1

    def _share(self, hyper: Mapping[str, Hyper]) -> None:
        """Writes the hyper-parameters into the base's groups, where overrides may already be."""
        given: Mapping[str, Any] = hyper  # a wrong type is reported below, in words
        self._hyper = {n: float(v) if isinstance(v, Real) else v for n, v in given.items()}
        method = type(self).__name__.lower()
        self._keys = {n: f"{method}_{n}" if n in self.base.defaults else n for n in hyper}
        # A base that was wrapped before still carries the earlier wrapper's values.
        stale = getattr(self.base, "_steppe_shared", {})
        shared = {key: self._hyper[name] for name, key in self._keys.items()}
        updates = [
            {k: v for k, v in shared.items() if k not in group or group[k] == stale.get(k)}
            for group in self.param_groups
        ]
        for group, update in zip(self.param_groups, updates, strict=True):
            self._values({**group, **update}, 1)
        for group, update in zip(self.param_groups, updates, strict=True):
            group.update(update)
        self.base._steppe_shared = shared  # type: ignore[attr-defined]

    def _look_at(self, loss: Any, passes: int) -> None:
        """Warns, in the first step of several passes, of what its loss shows."""
        if not self._looked and passes > 1:
            method, known = type(self).__name__, bool(self.models)
            self._looked = notices.look(loss, method, passes, model_given=known)

    def _values(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """One group's hyper-parameters at a step, schedules evaluated and checked."""
        if group.get("maximize"):
            raise ValueError(
                f"{type(self).__name__} climbs towards a larger loss, which is the wrong way under "
                "maximize=True: minimize the negated loss instead."
            )
        values = {}
        for name, key in self._keys.items():
            value = group.get(key, self._hyper[name])
            if isinstance(value, nn.Module):
                raise TypeError(f"{key} must be a number, got a module: pass it as model=model")
            value = value(step) if callable(value) else value
            if isinstance(value, Tensor):
                raise TypeError(
                    f"{key} must be a Python number or a function of the step, got a tensor: pass "
                    f"{key}.item(), or a function to change it as you train"
                )
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"{key} must be a finite number, got {value!r} at step {step}")
            values[name] = float(value)
        self.validate(values)
        return values

    def validate(self, hyper: Mapping[str, float]) -> None:
        """Raises ValueError for hyper-parameters that make no sense; none may be negative."""
        for name, value in hyper.items():
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")

    def _check_parameters(self) -> None:
        if any(p.is_complex() for p in self.parameters()):
            raise ValueError(
                f"{type(self).__name__} does not take complex parameters: pass "
                "torch.view_as_real of them."
            )
        check_one_device(self.parameters())

    def _check_local(self) -> None:
        if any(map(distributed.is_sharded, self.parameters())):
            raise ValueError(
                "perturbation='local' is not available for sharded parameters (FSDP2): each "
                "process holds only a part of every gradient. Use perturbation='global'."
            )
        if any(getattr(model, "static_graph", False) for model in self.models):
            raise ValueError(
                "perturbation='local' needs passes that reduce nothing, which DDP does not allow "
                "with static_graph=True. Leave static_graph off."
            )
        if distributed.processes() > 1 and distributed.synchronizing(self.models) is None:
            raise ValueError(
                "perturbation='local' needs the DistributedDataParallel module: pass model=ddp."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base; hyper-parameters it does not name get the shared values."""
        self.base.add_param_group(param_group)
        for name, key in self._keys.items():
            self.param_groups[-1].setdefault(key, self._hyper[name])
        try:
            self._check_parameters()
            self._values(self.param_groups[-1], self.steps + 1)
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """The base's state plus the step counter and what the recipe remembers; no weights.

        Schedules are code and stay out, as in torch's `LambdaLR`: the optimizer that loads the
        state brings its own.
        """
        saved = self.base.state_dict()
        for group in saved["param_groups"]:
            for key in self._keys.values():
                if callable(group.get(key)):
                    del group[key]
        params = self.parameters()
        memory = {i: dict(self._memory[p]) for i, p in enumerate(params) if p in self._memory}
        return {**saved, "steppe": {"step": self.steps, "memory": memory}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned, or a plain state of the base optimizer."""
        state_dict = dict(state_dict)
        own = state_dict.pop("steppe", {"step": 0, "memory": {}})
        before = [{k: g[k] for k in self._keys.values() if k in g} for g in self.param_groups]
        self.base.load_state_dict(state_dict)
        for group, previous in zip(self.param_groups, before, strict=True):
            for key, value in previous.items():
                group.setdefault(key, value)
        self.steps = own["step"]
        params = self.parameters()
        self._memory = {
            params[i]: {k: v.to(params[i].device, copy=True) for k, v in kept.items()}
            for i, kept in own["memory"].items()
        }

    def _start_clean(self) -> None:
        self._ready = False
        self._looked = False
        self._open = None
        self._kept_still = None
        self._compiled: dict[Callable[..., Held], Callable[..., Held]] = {}
        self._layout: tuple[list[Any], list[Mapping[str, float]], float, list[Span]]
        self._layout = ([], [], 0.0, [])

    def _own(self) -> None:
        self.base._steppe_owner = weakref.ref(self)  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        """Everything that lasts from step to step, the model included."""
        # `step` is set on the instance by schedulers, as a closure.
        transient = ("step", "_ready", "_looked", "_open", "_kept_still", "_compiled", "_layout")
        return {k: v for k, v in self.__dict__.items() if k not in transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy."""
        self.__dict__.update(state)
        self._start_clean()
        self._own()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatnessOptimizer:
        """A copy with parameters and a model of its own, which belong together.

        Copied with its model, in whatever order, it gets that copy.
        """
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    def __repr__(self) -> str:
        shown = {n: self.param_groups[0].get(k, self._hyper[n]) for n, k in self._keys.items()}
        hyper = ", ".join(f"{name}={value}" for name, value in shown.items())
        return f"{type(self).__name__}({hyper}, base={self.base!r})"


def _update_if_due(scaler: GradScaler, opt: Optimizer) -> None:
    """Calls `scaler.update()` if the loop took a step with it and has not done so since."""
    states = scaler._per_optimizer_states
    if id(opt) in states and states[id(opt)]["stage"] is OptState.STEPPED:
        scaler.update()


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
