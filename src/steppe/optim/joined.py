"""Several optimizers as one, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .wrapper import Wrapper, check_base

_HOOKS = tuple(
    f"_optimizer_{event}_{side}_hooks"
    for event in ("step", "state_dict", "load_state_dict")
    for side in ("pre", "post")
)
"""Where torch's optimizers keep their hooks."""


class Joined(Optimizer):
    """Several optimizers over different parameters as one, also as the base of SAM or FAD.

    Parameter groups and state are the optimizers' own, in their order, so that schedulers and edits
    act on them. A `GradScaler` skips a step of all of them or of none, even if some are fused.
    Step hooks fire once per step; global ones (`register_optimizer_step_pre_hook`) fire for each of
    the joined optimizers. `state_dict` has torch's format, with parameters numbered throughout.

    Args:
        optimizers: torch optimizers that share no parameter and whose `step` needs no closure.

    Examples:
        >>> from torch import nn
        >>> from steppe.optim import FAD
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> matrices = [p for p in model.parameters() if p.ndim == 2]
        >>> others = [p for p in model.parameters() if p.ndim != 2]
        >>> muon = torch.optim.Muon(matrices, lr=0.02)
        >>> adamw = torch.optim.AdamW(others, lr=1e-3)
        >>> opt = FAD(Joined([muon, adamw]), rho=0.05, model=model)
        >>> [group["lr"] for group in opt.param_groups]
        [0.02, 0.001]
        >>> x = torch.randn(16, 4)
        >>> def closure():
        ...     loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> before = opt.step(closure)
        >>> bool(closure() < before)
        True
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        # Optimizer.__init__ would make groups and state of its own.
        if isinstance(optimizers, Optimizer):
            raise TypeError(
                f"Joined takes a list of optimizers, got a single {type(optimizers).__name__}"
            )
        found = tuple(optimizers)
        if not found:
            raise ValueError("Joined needs at least one optimizer, got none")
        for one in found:
            _check(one)
        owners: dict[Tensor, Optimizer] = {}
        for one in found:
            for p in _parameters(one):
                if p in owners:
                    raise ValueError(
                        f"Joined: a parameter of shape {tuple(p.shape)} belongs to both "
                        f"{type(owners[p]).__name__} and {type(one).__name__}. Give each parameter "
                        "to one optimizer."
                    )
                owners[p] = one
        self.optimizers = found
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        """The optimizers; like torch's copies, copies have no hooks."""
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizers = state["optimizers"]
        self._reset()

    def _reset(self) -> None:
        for name in _HOOKS:
            setattr(self, name, OrderedDict())

    def __getattr__(self, name: str) -> Any:
        if name in ("train", "eval"):  # of schedule-free optimizers: call all of them
            found = [getattr(one, name) for one in self.optimizers if hasattr(one, name)]
            if found:
                return partial(_call, found)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.optimizers for group in one.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"Joined has {len(self.param_groups)} parameter groups, got {len(groups)}"
            )
        rest = iter(groups)
        for one in self.optimizers:
            one.param_groups = list(islice(rest, len(one.param_groups)))

    @property
    def state(self) -> Any:
        """The state of the optimizers by parameter: a view that reads and writes their own."""
        return States(self.optimizers)

    @state.setter
    def state(self, state: Any) -> None:
        for one in self.optimizers:
            known = set(_parameters(one))
            one.state = defaultdict(dict, {p: v for p, v in state.items() if p in known})

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The options of all optimizers; the first optimizer's value where names coincide."""
        return {k: v for one in reversed(self.optimizers) for k, v in one.defaults.items()}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let every optimizer take its step.

        Args:
            closure: evaluates the model, calls ``backward`` and returns the loss; called once.
        """
        call: tuple[Any, dict[str, Any]] = ((self, closure), {})
        for hook in self._optimizer_step_pre_hooks.values():
            call = hook(self, *call) or call
        loss = Joined._step(*call[0], **call[1])
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, *call)
        return loss

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for one in self.optimizers:
            one.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group: only the caller knows which optimizer it is for."""
        raise TypeError(
            "Joined cannot tell which of its optimizers should get the group. Add it to that one: "
            "joined.optimizers[0].add_param_group(...)"
        )

    def state_dict(self) -> dict[str, Any]:
        """All states in torch's format, as if one optimizer had all groups."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved: dict[str, Any] = {"state": {}, "param_groups": []}
        others, start = [], 0
        for one in self.optimizers:
            own = dict(one.state_dict())
            groups, state = own.pop("param_groups"), own.pop("state")
            for group in groups:
                moved = [start + i for i in group["params"]]
                saved["param_groups"].append({**group, "params": moved})
            saved["state"] |= {start + i: kept for i, kept in state.items()}
            start += len(_parameters(one))
            others.append(own)
        if any(others):  # what an optimizer saves beyond torch's format
            saved["joined"] = others
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups, state = state_dict["param_groups"], state_dict["state"]
        expected = [len(group["params"]) for group in self.param_groups]
        sizes = [len(group["params"]) for group in groups]
        if sizes != expected:  # checked first, so that none is loaded if one does not fit
            raise ValueError(
                f"the state has groups of {sizes} parameters, but the joined optimizers have "
                f"{expected}: join the same optimizers in the same order"
            )
        rest = iter(groups)
        others = state_dict.get("joined", [{} for _ in self.optimizers])
        for one, other in zip(self.optimizers, others, strict=True):
            part = list(islice(rest, len(one.param_groups)))
            known = {i for group in part for i in group["params"]}
            kept = {i: values for i, values in state.items() if i in known}
            one.load_state_dict({"state": kept, "param_groups": part, **other})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __repr__(self) -> str:
        return f"Joined([{', '.join(map(repr, self.optimizers))}])"


class States(MutableMapping[Any, Any]):
    """The states of several optimizers as one `defaultdict`."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _holder(self, p: Any) -> Any:
        """The state that has an entry for a parameter, or None."""
        return next((one.state for one in self._optimizers if p in one.state), None)

    def _home(self, p: Any) -> Any:
        """The state where a parameter's entry belongs."""
        holder = self._holder(p)
        if holder is not None:
            return holder
        for one in self._optimizers:
            if any(p is q for q in _parameters(one)):
                return one.state
        raise KeyError("not a parameter of any of the joined optimizers")

    def __getitem__(self, p: Any) -> Any:
        return self._home(p)[p]

    def __setitem__(self, p: Any, value: Any) -> None:
        self._home(p)[p] = value

    def __delitem__(self, p: Any) -> None:
        del self._home(p)[p]

    def __contains__(self, p: object) -> bool:
        return self._holder(p) is not None

    def __iter__(self) -> Iterator[Any]:
        return (p for one in self._optimizers for p in one.state)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)

    # As in a defaultdict, only [] creates an entry. MutableMapping's own methods would call [].

    def get(self, p: Any, default: Any = None) -> Any:
        holder = self._holder(p)
        return default if holder is None else holder[p]

    def setdefault(self, p: Any, default: Any = None) -> Any:
        return self._home(p).setdefault(p, default)

    def pop(self, p: Any, *default: Any) -> Any:
        holder = self._holder(p)
        return ({} if holder is None else holder).pop(p, *default)


def _call(methods: Sequence[Callable[[], Any]]) -> None:
    for method in methods:
        method()


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _check(optimizer: Any) -> None:
    if isinstance(optimizer, Wrapper):
        method = type(optimizer).__name__
        raise TypeError(
            f"Joined cannot hold {method}. Join the bases and wrap the result: "
            f"{method}(Joined([...]))"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"Joined takes torch optimizers, got {type(optimizer).__name__}")
    check_base(optimizer, "Joined")
