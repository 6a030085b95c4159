"""The part of a wrapping optimizer that is independent of its method: groups, state, copies."""

from __future__ import annotations

import inspect
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from numbers import Real
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import distributed, peers
from .schedules import scheduled


class Wrapper(Optimizer, ABC):
    """An optimizer that shares the groups, state and hooks of its base.

    It forwards instead of copying, so `load_state_dict`, deepcopy and pickling, which rebind
    `param_groups`, cannot separate the two. Hooks registered on the wrapper belong to the base:
    they fire once per step, with the global ones, and receive the base. The wrapper adds its
    hyperparameters to the groups, and a step counter and a memory to the state.
    """

    needs_graph: ClassVar[bool] = False
    """Whether the closure must call ``backward(create_graph=True)``."""
    reads_lr: ClassVar[bool] = False
    """Whether `coefficients` needs the group's learning rate, as ``lr``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Answer calls in another library's style with an error that shows the right call."""
        if args or kwargs:  # copies pass none
            _check_call(cls, args, kwargs)
        return super().__new__(cls)

    @classmethod
    def over(cls, base: Any, **options: Any) -> Callable[..., Self]:
        """Return a picklable factory that is called like torch's optimizers.

        For code that builds the optimizer itself: skorch, fastai, configuration files.

        Args:
            base: the class of the base optimizer, or a function that returns one.
            **options: defaults for options of this method or of the base.

        Examples:
            >>> import torch
            >>> from steppe.optim import FAD
            >>> model = torch.nn.Linear(3, 1)
            >>> make = FAD.over(torch.optim.SGD, momentum=0.9)
            >>> opt = make(model.parameters(), lr=0.1, rho=0.1, model=model)
            >>> [opt.param_groups[0][name] for name in ("lr", "momentum", "rho")]
            [0.1, 0.9, 0.1]
        """
        if isinstance(base, Optimizer) or not callable(base):
            raise TypeError(
                f"{cls.__name__}.over takes an optimizer class, such as torch.optim.SGD, got "
                f"{type(base).__name__}"
            )
        return partial(_build_over, cls, base, **options)

    def __init__(self, base: Optimizer) -> None:
        # Optimizer.__init__ would create a second set of param_groups and hooks, and fire the
        # global step hooks twice per step.
        check_base(base, type(self).__name__)
        self.base = base
        self.steps = 0
        """Steps taken so far. Steps that a GradScaler skips count only under a fused base, whose
        kernels skip them without telling the host."""
        self._memory: dict[Tensor, dict[str, Tensor]] = {}
        self._reset()

    @abstractmethod
    def _reset(self) -> None:
        """Initialize the attributes that copies do not carry over."""

    def parameters(self) -> list[Any]:
        """All parameters, in the order of their groups."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.base.defaults

    def __getattr__(self, name: str) -> Any:
        # Forwards what a base adds to torch's methods (`train`, `sync_lookahead`), and the private
        # dicts of torch's hooks. No other private name: GradScaler reads one that says how to call
        # `step`.
        hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
        if "base" in self.__dict__ and (hooks or not name.startswith("_")):
            with suppress(AttributeError):
                return getattr(self.base, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. `step` with a closure does this itself."""
        self.base.zero_grad(set_to_none)

    def _share(self, hyper: Mapping[str, Any]) -> None:
        """Write the hyperparameters into the base's groups, except where a group overrides them."""
        self._hyper = {n: float(v) if isinstance(v, Real) else v for n, v in hyper.items()}
        method = type(self).__name__.lower()
        self._keys = {n: f"{method}_{n}" if n in self.base.defaults else n for n in hyper}
        # A base that was wrapped before still has the earlier wrapper's values.
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
        self._own()

    def _values(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """One group's hyperparameters at a step, with schedules evaluated and values checked."""
        if group.get("maximize"):
            raise ValueError(
                f"{type(self).__name__} does not support maximize=True, because it climbs toward a "
                "larger loss. Minimize the negated loss instead."
            )
        values = {}
        for name, key in self._keys.items():
            value = group.get(key, self._hyper[name])
            if isinstance(value, nn.Module):
                raise TypeError(f"{key} must be a number, got a module: pass it as model=model")
            value = scheduled(value, step, group)
            if isinstance(value, Tensor):
                raise TypeError(
                    f"{key} must be a Python number or a function of the step, got a tensor: pass "
                    f"{key}.item(), or a function to change it during training"
                )
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"{key} must be a finite number, got {value!r} at step {step}")
            values[name] = float(value)
        self.validate(values)
        return {**values, "lr": float(group["lr"])} if self.reads_lr else values

    def validate(self, hyper: Mapping[str, float]) -> None:
        """Raise ValueError for invalid hyperparameters. By default, none may be negative."""
        for name, value in hyper.items():
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")

    def _check_parameters(self) -> None:
        method, params = type(self).__name__, self.parameters()
        if any(p.is_complex() for p in params):
            raise ValueError(
                f"{method} does not support complex parameters: pass torch.view_as_real(p) instead."
            )
        if self.needs_graph and any(map(distributed.is_sharded, params)):
            raise TypeError(
                f"{method} differentiates gradients, which is not possible for sharded parameters "
                "(FSDP2). Use GAM, which needs only gradients."
            )
        distributed.one_device(params)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base; hyperparameters that it lacks get the shared values."""
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
        """The base's state plus the step counter and the method's memory.

        Schedules are code and are not saved, as in torch's `LambdaLR`: the optimizer that loads the
        state keeps its own.
        """
        saved = self.base.state_dict()
        for group in saved["param_groups"]:
            for key in self._keys.values():
                if callable(group.get(key)):
                    del group[key]
        params = self.parameters()
        memory = {i: dict(self._memory[p]) for i, p in enumerate(params) if p in self._memory}
        return {**saved, "steppe": {"step": self.steps, "memory": memory, **self._further()}}

    def _further(self) -> dict[str, Any]:
        """What a method keeps besides its memory."""
        return {}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or a state of the base optimizer alone.

        States of the SAM classes in pytorch_optimizer and davda54/sam load too.
        """
        state_dict = dict(state_dict)
        own = state_dict.pop("steppe", None)
        if own is None:
            method, adaptive = type(self).__name__, getattr(self, "adaptive", None)
            state_dict, own = peers.read_state(method, state_dict, self.base, adaptive)
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

    def forget(self) -> None:
        """Drop the vectors that the method keeps between steps; the base's state stays."""
        self._memory = {}

    def _own(self) -> None:
        self.base._steppe_owner = weakref.ref(self)  # type: ignore[attr-defined]

    def _owner(self) -> Any:
        """The last optimizer that wrapped the base."""
        owner = getattr(self.base, "_steppe_owner", None)
        return self if owner is None else owner()

    def __getstate__(self) -> dict[str, Any]:
        """Everything that persists between steps, including the model."""
        blank = object.__new__(type(self))
        blank._reset()
        transient = {"step", *blank.__dict__}  # schedulers patch `step` on the instance
        return {k: v for k, v in self.__dict__.items() if k not in transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
        self._own()

    def __repr__(self) -> str:
        shown = {n: self.param_groups[0].get(k, self._hyper[n]) for n, k in self._keys.items()}
        hyper = ", ".join(f"{name}={value}" for name, value in shown.items())
        return f"{type(self).__name__}({hyper}, base={self.base!r})"


@cache
def options_of(cls: type) -> tuple[str, ...]:
    """The names of a constructor's options, including those it passes on to its parents."""
    positional: list[str] = []
    keyword: list[str] = []
    handed_on = True
    for ancestor in cls.__mro__:
        if "__init__" not in vars(ancestor):
            continue
        parameters = inspect.signature(vars(ancestor)["__init__"]).parameters.values()
        keyword += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        if handed_on:
            positional += [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        kinds = {p.kind for p in parameters}
        # Without *args, the child itself sets what its parent takes by position.
        handed_on = handed_on and inspect.Parameter.VAR_POSITIONAL in kinds
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    names = dict.fromkeys([*positional, *keyword])
    return tuple(name for name in names if name not in {"self", "params", "base", "model"})


def _build_over(
    cls: Any, base: Callable[..., Optimizer], params: Any, *args: Any, **options: Any
) -> Any:
    """Build a base and wrap it. An option that both have goes to the wrapper."""
    own = {name: options.pop(name) for name in (*options_of(cls), "model") if name in options}
    return cls(base(params, *args, **options), **own)


def _check_call(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise an error that shows the right call if the arguments follow another library."""
    if next(iter(inspect.signature(cls).parameters), "") != "base":
        return
    first = args[0] if args else kwargs.get("base", kwargs.get("params"))
    method, known = cls.__name__, options_of(cls)
    if isinstance(first, Optimizer):
        base: type = type(first)
        for name in kwargs:
            if name in (*known, "base", "model"):
                continue
            ours = peers.our_name(method, name)
            if name in options_of(base):
                raise TypeError(
                    f"{method} has no option {name!r}: it belongs to the base, "
                    f"{base.__name__}(model.parameters(), {name}={kwargs[name]!r})"
                )
            if ours in known and ours != name:
                theirs = {k: v for k, v in kwargs.items() if peers.our_name(method, k) in known}
                written = peers.our_options(method, theirs)
                changed = {k: v for k, v in written.items() if k not in theirs or theirs[k] != v}
                raise TypeError(f"{method} has no option {name!r}: write{_spelled(changed)[1:]}")
        return
    inner: Any = next((v for v in (*args, *kwargs.values()) if _makes_optimizers(v)), None)
    given, rest = _sorted_options(cls, args, kwargs, inner)
    own = {name: given[name] for name in known if name in given}
    lost = {name: value for name, value in given.items() if name not in known and value}
    if isinstance(inner, partial):
        inner, rest = inner.func, {**inner.keywords, **rest}
    made = type(inner) if isinstance(inner, Optimizer) else inner or torch.optim.SGD
    prefix = "torch.optim." if made.__module__.startswith("torch.optim") else ""
    name = f"{prefix}{made.__name__}"
    inside = f"{name}(model.parameters(){_spelled(rest or {'lr': 1e-3})})"
    line = f"{method}({inside}{_spelled(own)}, model=model)"
    if isinstance(inner, Optimizer):
        line = f"{method}(optimizer{_spelled(own)}, model=model)  # the {made.__name__}"
    got = f"the class {first.__name__}" if isinstance(first, type) else type(first).__name__
    left_out = f"{method} has no equivalent of{_spelled(lost)[1:]}. " if lost else ""
    raise TypeError(
        f"{method} wraps an optimizer instance, got {'nothing' if first is None else got}. Write"
        f"\n\n    {line}\n\n"
        f"{left_out}If you can only pass parameters, use {method}.over({name})."
    )


def _sorted_options(
    cls: type, args: Sequence[Any], kwargs: Mapping[str, Any], inner: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a call in another library's style: the method's, and those of its base."""
    method, known = cls.__name__, options_of(cls)
    named = {k: v for k, v in kwargs.items() if k not in ("base", "params", "base_optimizer")}
    named.pop("model", None)
    place = next((i for i, value in enumerate(args) if value is inner), len(args))
    if inner is None:  # as in torch: the first number is the learning rate
        numbers = [v for v in args if isinstance(v, Real)]
        named = {**dict(zip(("lr", *known), numbers, strict=False)), **named}
    else:
        named = {**peers.positional(method, known, args[place + 1 :]), **named}
    own = {*known, *peers.SWITCHES}
    theirs = {k: v for k, v in named.items() if k in own or peers.our_name(method, k) in known}
    given = peers.our_options(method, theirs)
    leading = args[0] if args else kwargs.get("base")
    if inner is not None and inner is not leading:  # not our order: expects other defaults
        given = {**peers.their_defaults(method), **given}
    return given, {k: v for k, v in named.items() if k not in theirs}


def _makes_optimizers(value: Any) -> bool:
    """Whether a value is an optimizer, an optimizer class, or a partial of one."""
    value = value.func if isinstance(value, partial) else value
    return issubclass(value if isinstance(value, type) else type(value), Optimizer)


def _spelled(options: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


def check_base(base: Optimizer, method: str) -> None:
    """Raise TypeError for an optimizer that cannot step with a given direction."""
    if isinstance(base, Wrapper):
        raise TypeError(f"{method} cannot wrap {type(base).__name__}: wrap its base instead.")
    closure = inspect.signature(base.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{method} cannot wrap {type(base).__name__}, which itself needs a closure."
        )
    if getattr(base, "needs_graph", False):
        raise TypeError(
            f"{method} cannot wrap {type(base).__name__}, which differentiates its gradient: "
            "the direction has no graph."
        )
