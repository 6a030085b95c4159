"""Averages by name, each with its options and its paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from steppe.axes import AxisSpec, declared, registrar
from steppe.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from .averaging import Averaging

C = TypeVar("C", bound=type)


@dataclass(frozen=True, kw_only=True)
class AveragingSpec(AxisSpec):
    """One entry of the registry."""

    kind: ClassVar[str] = "averaging"


averages = Registry(
    "averaging",
    lambda: declared(AveragingSpec, __package__, "register_averaging", ("none", "swad", "sma")),
)


def register_averaging(name: str, *, citation: str = "") -> Callable[[C], C]:
    """Add an average of your own: a decorator for its class, in a module named with ``--plugin``.

    The class is built as ``cls(module, **options)``; what its constructor annotates with
    `steppe.options.Option` are its options.
    """
    return registrar(averages, AveragingSpec, name, citation=citation)


def averaging_names() -> tuple[str, ...]:
    """Return the names that `build_averaging` knows."""
    return tuple(averages)


def averaging_spec(name: str) -> AveragingSpec:
    """Return the entry of the registry for a name, in any case.

    Examples:
        >>> averaging_spec("SMA").default_options
        {'start': 100}
    """
    return averages[name]


def build_averaging(name: str, module: nn.Module, **options: Any) -> Averaging:
    """Build an average of the weights of a module that is on its device, in training mode.

    Options that are not given have their defaults; an unknown one is an error.

    Examples:
        >>> from torch import nn
        >>> averaging = build_averaging("swad", nn.Linear(2, 1), every=50)
        >>> [step for step in range(120) if averaging.due(step, last=step == 119)]
        [0, 50, 100, 119]
    """
    spec = averages[name]
    spec.check(options)
    built: Averaging = spec.cls(module, **options)
    return built
