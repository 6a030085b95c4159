"""The engine behind every flatness-aware optimizer.

A method's file turns hyperparameters into coefficients and lists the points to visit, in the
vocabulary of `walk`. This file runs a step from its phases to the base's step, `excursion` runs
each pass, and `wrapper` handles groups, state and copies.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # as torch.optim uses it: imports no compiler
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from . import distributed, frameworks, notices
from .excursion import Excursion, Phase
from .schedules import Hyper
from .still import Models, StillState, rewinder
from .vectors import Vector, differ
from .walk import PLAIN, Layout, Visit, Walk
from .wrapper import Wrapper

Batch = TypeVar("Batch")


class FlatnessOptimizer(Wrapper):
    """Wrap an optimizer and give it a direction computed from several gradients.

    `param_groups`, `state` and `defaults` are the base's own objects, so schedulers, `lr` edits and
    logging work unchanged. Step hooks fire once per step, when the direction is in `.grad`.

    Args:
        base: any `torch.optim.Optimizer` whose `step` needs no closure.
        hyper: the method's hyperparameters by name. A parameter group may override each under the
            same name, or under ``<method>_<name>`` if the base already uses the name (RMSprop's
            ``alpha``).
        model: the module being trained, or several. Then only the first pass may change what it
            holds besides the optimized parameters (batch-norm statistics, a momentum encoder, a
            discriminator), and ``perturbation="local"`` can use DDP's `no_sync`.
        ratio: the fraction of steps, in (0, 1], that use flatness; the others are base steps.
        perturbation: under DDP, ``"global"`` perturbs along the all-reduced gradient; ``"local"``
            lets each process perturb along its own (m-sharpness) and reduces the direction once.
        ascent: the name of the loss of the first pass. Unless it is ``"main"``, the closure gets it
            as its argument, differentiates that loss and returns the main one.
        max_norm: clips the norm of the direction before the base step.
        xi: small constant added to every norm.
        compile: fuse the arithmetic between passes with `torch.compile`.
        generators: your own random generators that the loss draws from (`torch.Generator`,
            `numpy.random.Generator`), so that every pass sees the same draws. Global generators
            are always included.
    """

    scale_free: ClassVar[bool] = True
    """Whether the direction scales with the loss, so that phases need no GradScaler."""
    seed = 0
    """The seed of a method that draws noise."""
    draws: ClassVar[bool] = False
    """Whether the method draws noise."""

    def __init__(
        self,
        base: Optimizer,
        hyper: Mapping[str, Hyper],
        *,
        model: Models = None,
        ratio: float = 1.0,
        perturbation: str = "global",
        ascent: str = "main",
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
        if not isinstance(ascent, str):
            raise TypeError(f"ascent must be the name of a loss, got {ascent!r}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        if not xi > 0:
            raise ValueError(f"xi must be positive, got {xi}")
        self.model = model
        self.ratio = ratio
        self.perturbation = perturbation
        self.ascent = ascent
        self.max_norm = max_norm
        self.xi = xi
        self.compile = compile
        self.generators = tuple(generators) if isinstance(generators, Iterable) else (generators,)
        for generator in self.generators:
            rewinder(generator)  # raises if it is not one
        self._check_parameters()
        if perturbation == "local":
            distributed.check_local(self.models, self.parameters())
        self._share(hyper)  # last: a failed constructor leaves the base unchanged

    def _reset(self) -> None:
        self._ready = False
        """Whether the direction is in ``.grad``, ready for the base's step."""
        self._looked = False
        self._scaler_known = False
        """Whether the passes knew the GradScaler of their step."""
        self._staged: Walk | None = None
        """The walk of a step that the base has not taken yet, with what it will remember."""
        self._kept: tuple[dict[Tensor, Tensor], ...] = ()
        """What `after` needs, by parameter."""
        self._open: Excursion | None = None
        self._still = StillState((), ())
        self._layout = Layout()

    @property
    def model(self) -> nn.Module | tuple[nn.Module, ...] | None:
        """The module being trained, or several. Assignable."""
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

    def _further(self) -> dict[str, Any]:
        return {"seed": self.seed} if self.draws else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.draws:
            self.seed = state_dict.get("steppe", {}).get("seed", self.seed)

    def coefficients(self, hyper: Mapping[str, float]) -> Mapping[str, float]:
        """The numbers that the stages use, computed from one group's hyperparameters."""
        return hyper

    def after(self, walk: Walk, *kept: Vector) -> None:
        """Change the weights after the base's step, with what the last visit returned for it.

        Not called if the step was skipped. A GradScaler's scale is still in `kept`.
        """
        method = type(self).__name__
        raise TypeError(f"{method}'s last visit returned more than a direction: define after()")

    @property
    def perturbed(self) -> frozenset[Tensor] | None:
        """The only parameters with a radius; None for all."""
        return None

    @abstractmethod
    def visits(self, coefficients: Sequence[Mapping[str, float]]) -> tuple[Visit, ...]:
        """The points to visit in this step, given each group's coefficients."""

    def planned(self) -> tuple[list[Mapping[str, float]], tuple[Visit, ...]]:
        """Each group's coefficients in the next step, and the points that it visits."""
        step = self.steps + 1
        coefficients = [self.coefficients(self._values(g, step)) for g in self.param_groups]
        visits = self.visits(coefficients) if self.due else PLAIN
        if self.ascent != "main" and len(visits) > 1:
            visits = (replace(visits[0], loss=self.ascent), *visits[1:])
        return coefficients, visits

    @_disable_dynamo
    def step(
        self, closure: Callable[..., Any] | None = None, scaler: GradScaler | None = None
    ) -> Any:
        """Take one step and return the loss at the unperturbed weights.

        The step itself always runs eagerly, even inside a compiled function, as torch's optimizers
        with a closure do; a compiled model stays compiled. If no parameter gets a gradient, nothing
        changes.

        Args:
            closure: computes the loss, calls backward on it (scaled, if `scaler` is given) and
                returns it. Gradients are cleared before each call. Omit it only after running
                `phases`.
            scaler: the `torch.amp.GradScaler` whose `scale` the closure applies. The direction is
                unscaled once; if it is not finite, the weights do not change and the scaler backs
                off at its next `update`. Call ``scaler.update()`` after the step as usual; if you
                do not, the next step does.
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
            if state.get("stage") is OptState.STEPPED:  # the loop has not called update()
                scaler.update()
        loss = None
        for phase in self.phases(scaler):
            with phase, torch.enable_grad():
                result = closure() if phase.loss == "main" else self._named(closure, phase.loss)
                if phase.index == 0 and phase.total > 1 and not self._looked:
                    method, known = type(self).__name__, bool(self.models)
                    self._looked = notices.look(result, method, phase.total, model_given=known)
            if phase.index == 0:  # copied, because a replayed CUDA graph reuses its memory
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
    def _step_supports_amp_scaling(self) -> bool:
        """False, like any optimizer without fused kernels.

        `GradScaler.step` reads it, so this is where a missing scaler shows.
        """
        if self._ready and not self._scaler_known and not self.scale_free:
            raise RuntimeError(
                f"A GradScaler steps this {type(self).__name__}, but its passes did not get the "
                "scaler, and part of the step does not scale with the loss. Write "
                "opt.phases(scaler), or opt.passes(batches, scaler)."
            )
        return False

    def _named(self, closure: Callable[..., Any], loss: str) -> Any:
        """Call a closure for a loss other than the main one."""
        notices.check_named(closure, type(self).__name__, loss)
        return closure(loss)

    @property
    def due(self) -> bool:
        """Whether the next step uses flatness, according to `ratio`."""
        # The 1e-9 absorbs rounding: 100 * 0.29 is 28.999999999999996.
        owed = [math.floor(t * self.ratio + 1e-9) for t in (self.steps, self.steps + 1)]
        return owed[1] > owed[0]

    def phases(self, scaler: GradScaler | None = None) -> Iterator[Phase]:
        """Iterate over the passes of one step, for loops that own `backward`.

        Run forward and backward once inside each phase. The end of the last phase restores the
        weights and puts the direction in `.grad`; after that, `scaler.unscale_`, clipping and
        `step()` (or ``scaler.step(opt)``) work as usual. An exception, or leaving the loop early,
        restores the weights.

        Args:
            scaler: the GradScaler that scales your losses; you scale and unscale. Methods need it
                for whatever does not scale with the gradients: `xi`, memory, noise.
        """
        owner = self._owner()
        behind: Any = getattr(self, "optimizer", None)
        if behind is not None and behind is owner:  # Lightning's handle: our methods, no state
            yield from behind.phases(scaler)
            return
        frameworks.guard(self)
        self._ready, self._staged, self._kept = False, None, ()
        self._scaler_known = scaler is not None
        if self._open is not None:  # left early, but something still holds its generator
            self._open.close()
        if owner is not self:
            raise RuntimeError(
                f"The base of this {type(self).__name__} was wrapped again, by "
                f"{owner or 'another optimizer'}. Give each wrapper its own base: both would store "
                "their hyperparameters in the same groups."
            )
        excursion = self._open = Excursion(self, scaler)
        try:
            for index in range(len(excursion.visits)):
                if index == len(excursion.visits):  # shortened: no parameter got a gradient
                    break
                phase = Phase(excursion, index)
                yield phase
                if not phase.done:
                    raise RuntimeError(
                        f"Phase {index} of {phase.total} was skipped or failed: run forward and "
                        "backward inside 'with phase:', and call opt.phases() again after an error."
                    )
            self._ready = self._open is excursion  # false if another step began meanwhile
        finally:
            excursion.close()
            if self._open is excursion:
                self._open = None

    def _kept_still(self, params: list[Any]) -> StillState:
        """The record of what passes change in the models, renewed when models or weights change."""
        known = self._still
        if self.models or known.models:
            trained = [p for p in params if p.requires_grad]  # the rest is model state
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
        """Iterate over the passes of one step with gradient accumulation.

        Run forward and backward once for every pair, and divide the loss by the number of
        micro-batches as usual. Every pass uses all micro-batches. Then clip and step as after
        `phases`. Under DDP, only the last micro-batch reduces gradients.

        Args:
            batches: the micro-batches of the step.
            scaler: as for `phases`.
            no_sync: context manager that skips gradient reduction (default: the model's `no_sync`).

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
        """Discard a step that was captured in a CUDA graph, without touching the weights.

        A capture moves no weights, and after a failed one the backup holds no valid values.
        """
        if self._open is not None:
            self._open.walk = None
            self._open.close()
        self._open = self._staged = None
        self._kept = ()
        self._ready = False

    @torch.no_grad()
    def _base_step(self, scaler: GradScaler | None = None) -> None:
        """Take the base's step; pass `scaler` for a base whose kernels unscale gradients."""
        if not self._ready:
            passes = "more than once" if not self.needs_graph else "and its Hessian"
            graph = "create_graph=True" if self.needs_graph else ""
            raise RuntimeError(
                notices.USAGE.format(method=type(self).__name__, passes=passes, graph=graph)
            )
        if self.max_norm is not None:
            if scaler is not None:
                scaler.unscale_(self.base)
            nn.utils.clip_grad_norm_(self.parameters(), self.max_norm)
        if skips_by_itself(self.base):
            give_momentum(self.base)
        skipped = None
        if scaler is None:
            self.base.step()
        else:
            scaler.step(self.base)  # the host never learns whether the step was skipped
            found = scaler._per_optimizer_states[id(self.base)]["found_inf_per_device"]
            (skipped,) = (value > 0 for value in found.values())
        if self._staged is not None:
            self._finish(self._staged, skipped)
        self._ready, self._staged, self._kept = False, None, ()
        self.steps += 1

    def _finish(self, walk: Walk, skipped: Tensor | None) -> None:
        """Call `after`, and keep what the walk remembered; neither if the step was skipped."""
        pairs = [(p, name, x) for name, xs in walk.staged.items() for p, x in xs.items()]
        # Only the first step of a parameter waits for the device: nothing holds its memory yet.
        if skipped is not None and any(name not in self._memory.get(p, ()) for p, name, _ in pairs):
            if skipped.item():
                return
            skipped = None
        if self._kept:
            pairs_of = list(zip(walk.params, walk.theta, strict=True))
            kept = [
                [k[p] if p in k else torch.zeros_like(t) for p, t in pairs_of] for k in self._kept
            ]
            if skipped is not None:
                kept = [[torch.where(skipped, 0.0, x) for x in k] for k in kept]
            self.after(walk, *kept)
        for p, name, new in pairs:
            memory = self._memory.setdefault(p, {})
            old = memory.get(name)
            if old is None or (skipped is None and new.device.type == "cpu"):
                memory[name] = new
            else:  # in place: a CUDA graph knows its address
                old.copy_(new if skipped is None else torch.where(skipped, old, new))


def skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer's kernels unscale gradients, and skip the step if one is not finite.

    False under dampening: its first step differs from the others, and only the host could know
    which step was first.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not any(
        group.get("dampening", 0) for group in optimizer.param_groups
    )


def give_momentum(base: Optimizer) -> None:
    """Start the momentum of a fused SGD at zero.

    Torch allocates the buffers uninitialized, and a skipped first step would not initialize them.
    """
    for group in base.param_groups:
        if not group.get("momentum", 0):
            continue
        for p in group["params"]:
            if p.grad is not None and base.state[p].get("momentum_buffer") is None:
                base.state[p]["momentum_buffer"] = torch.zeros_like(p)
