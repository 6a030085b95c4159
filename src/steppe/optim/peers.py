"""Calls and checkpoints of other SAM libraries, translated to this one's.

The names are those of pytorch_optimizer 4.1, davda54/sam and juntang-zhuang/GSAM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from torch.optim import Optimizer

from .schedules import FollowLR


@dataclass(frozen=True)
class Peer:
    """How other libraries call and save a method that has the same name here."""

    order: tuple[str, ...]
    """Their arguments after the base optimizer, without the model."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Their defaults, where ours differ."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Arguments that mean something only in a call of this method."""
    convert: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """From their values, under our names, to values that compute the same."""
    memory: Mapping[str, str] = field(default_factory=dict)
    """What they keep between steps and we keep too, from their name to ours."""


def _sigma(options: dict[str, Any]) -> dict[str, Any]:
    """Their sigma weighs the mean before this step's gradient enters it, ours the mean after.

    g - s m and g - sigma (lam m + (1 - lam) g) are parallel for this sigma; 0 and 1 stay.
    """
    s, lam = options.get("sigma", 1.0), options.get("lam", 0.9)
    return {**options, "sigma": s / (lam + s * (1.0 - lam))} if s not in (0, 1) else options


def _gamma(options: dict[str, Any]) -> dict[str, Any]:
    """Their groups hold gamma / (1 - gamma), as `alpha`."""
    others = {name: value for name, value in options.items() if name != "alpha"}
    a = options.get("alpha")
    return others if a is None else {**others, "gamma": a / (1.0 + a)}


PEERS = {
    "SAM": Peer(("rho", "adaptive", "use_gc", "perturb_eps", "foreach")),
    "GSAM": Peer(
        ("rho_scheduler", "alpha", "adaptive", "perturb_eps", "foreach"),
        defaults={"alpha": 0.4},
        renamed={"gsam_alpha": "alpha"},
    ),
    "WSAM": Peer(
        ("rho", "gamma", "adaptive", "decouple", "max_norm", "eps", "foreach"),
        renamed={"eps": "xi"},
        convert=_gamma,
    ),
    "LookSAM": Peer(
        ("rho", "k", "alpha", "adaptive", "use_gc", "perturb_eps", "foreach"),
        defaults={"rho": 0.1, "k": 10},
    ),
    "FriendlySAM": Peer(
        ("rho", "sigma", "lmbda", "adaptive", "perturb_eps", "foreach"),
        convert=_sigma,
        memory={"momentum": "mean"},
    ),
}

RENAMED = {"lmbda": "lam", "perturb_eps": "xi", "rho_scheduler": "rho"}

SWITCHES = ("adaptive", "use_gc")
"""Options that only some methods have here; off means the same as leaving them out."""

TEMPORARY = frozenset({"old_p", "e_w", "old_g", "old_grad_p", "gv", "sharpness"})
"""Per-parameter state that serves one step, or (LookSAM's `gv`) has another meaning here."""

GROUP_ONLY = frozenset({"adaptive", "sam_eps", "looksam_step"})
"""Group entries that no method here reads."""


def positional(method: str, known: Sequence[str], after_base: Sequence[Any]) -> dict[str, Any]:
    """Name the arguments that another library takes by position after the base optimizer."""
    order = PEERS[method].order if method in PEERS else known
    # Skip the model, or misplaced parameters, between the base and the options.
    values = [v for v in after_base if v is None or isinstance(v, Real) or _is_proportion(v)]
    return dict(zip(order, values, strict=False))


def our_name(method: str, name: str) -> str:
    return {**RENAMED, **_peer(method).renamed}.get(name, name)


def our_options(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of their call, under our names and with values that compute the same."""
    ours = {our_name(method, name): value for name, value in options.items()}
    if "rho" in ours:
        ours["rho"] = _radius(ours["rho"])
    return _peer(method).convert(ours)


def their_defaults(method: str) -> Mapping[str, Any]:
    """Their defaults under our names, where ours differ."""
    return _peer(method).defaults


def _peer(method: str) -> Peer:
    return PEERS.get(method, Peer(()))


def _radius(rho: Any) -> Any:
    """A ProportionScheduler as the schedule that gives the same radii."""
    if not _is_proportion(rho):
        return rho
    follow = FollowLR(rho.max_value, rho.min_value, rho.max_lr, rho.min_lr)
    varies = follow.high != follow.low and follow.lr_high > follow.lr_low
    return follow if varies else follow.high


def _is_proportion(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("max_value", "min_value", "max_lr", "min_lr"))


def read_state(
    method: str, state_dict: Mapping[str, Any], base: Optimizer, adaptive: bool | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a state that steppe did not save into the base's part and the wrapper's own.

    A state of the base optimizer alone passes through.

    Args:
        method: the name of the class that loads the state.
        state_dict: the state.
        base: the optimizer that will load the first part.
        adaptive: the option of that name; None for a method without it.
    """
    # A base may itself save a `base_optimizer`: pytorch_optimizer's Lookahead does.
    nested = "base_optimizer" in state_dict and "base_optimizer" not in base.state_dict()
    saved = dict(state_dict["base_optimizer"] if nested else state_dict)
    if not {"state", "param_groups"} <= saved.keys():  # not torch's format
        return saved, {"step": 0, "memory": {}}
    groups = saved["param_groups"]
    _check_adaptive(method, groups, base, adaptive)
    saved["param_groups"] = [_our_group(method, group, base) for group in groups]
    saved["state"] = {i: _without_temporary(state) for i, state in saved["state"].items()}
    kept = _peer(method).memory if nested else {}
    memory = {
        i: {ours: state[theirs] for theirs, ours in kept.items()}
        for i, state in (state_dict["state"].items() if kept else ())
        if kept.keys() <= state.keys()
    }
    step = max((int(group.get("looksam_step", 0)) for group in groups), default=0)
    return saved, {"step": step, "memory": memory}


def _our_group(method: str, group: Mapping[str, Any], base: Optimizer) -> dict[str, Any]:
    if not _is_theirs(group, base):
        return dict(group)
    of_base = {name: value for name, value in group.items() if name in base.defaults}
    rest = {
        RENAMED.get(name, name): value
        for name, value in group.items()
        if name not in of_base and name not in GROUP_ONLY
    }
    return {**of_base, **_peer(method).convert(rest)}


def _is_theirs(group: Mapping[str, Any], base: Optimizer) -> bool:
    """Whether a wrapper of another library wrote a group; GSAM, which does not, adds nothing."""
    return "adaptive" in group and "adaptive" not in base.defaults


def _without_temporary(state: Any) -> Any:
    if not isinstance(state, Mapping) or TEMPORARY.isdisjoint(state):
        return state
    return {name: value for name, value in state.items() if name not in TEMPORARY}


def _check_adaptive(
    method: str, groups: Sequence[Mapping[str, Any]], base: Optimizer, adaptive: bool | None
) -> None:
    theirs = {bool(group["adaptive"]) for group in groups if _is_theirs(group, base)}
    if not theirs - {bool(adaptive)}:
        return
    wrong = not adaptive
    remedy = "" if adaptive is None else f" Load it into SAM(base, adaptive={wrong})."
    raise ValueError(
        f"The checkpoint was trained with adaptive={wrong}, which this {method} does not "
        f"compute.{remedy} To continue without it, set 'adaptive' to {not wrong} in the "
        "checkpoint's param_groups."
    )
