"""Calls of other SAM libraries, read in this one's terms.

The names are those of pytorch_optimizer 4.1, davda54/sam and juntang-zhuang/GSAM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from .schedules import FollowLR


@dataclass(frozen=True)
class Peer:
    """How other libraries call a method that has the same name here."""

    order: tuple[str, ...]
    """Their arguments after the base optimizer, without the model."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Their defaults, where ours differ."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Arguments that mean something only in a call of this method."""
    convert: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """From their values, under our names, to values that compute the same."""


def _sigma(options: dict[str, Any]) -> dict[str, Any]:
    """Their sigma weighs the mean before this step's gradient enters it, ours the mean after.

    g - s m and g - sigma (lam m + (1 - lam) g) are parallel for this sigma; 0 and 1 stay.
    """
    s, lam = options.get("sigma", 1.0), options.get("lam", 0.9)
    return {**options, "sigma": s / (lam + s * (1.0 - lam))} if s not in (0, 1) else options


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
    ),
    "LookSAM": Peer(
        ("rho", "k", "alpha", "adaptive", "use_gc", "perturb_eps", "foreach"),
        defaults={"rho": 0.1, "k": 10},
    ),
    "FriendlySAM": Peer(
        ("rho", "sigma", "lmbda", "adaptive", "perturb_eps", "foreach"),
        convert=_sigma,
    ),
}

RENAMED = {"lmbda": "lam", "perturb_eps": "xi", "rho_scheduler": "rho"}

SWITCHES = ("adaptive", "use_gc")
"""Options that only some methods have here; off means the same as leaving them out."""


def positional(method: str, known: Sequence[str], after_base: Sequence[Any]) -> dict[str, Any]:
    """Name the arguments that another library takes by position after the base optimizer."""
    order = PEERS[method].order if method in PEERS else known
    # Between the base and the options may stand the model, or parameters in the wrong place.
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
