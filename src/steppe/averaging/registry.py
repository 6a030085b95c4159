"""The registry of averaging methods: options and citations by name."""

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
    """A registered averaging method."""

    kind: ClassVar[str] = "averaging"


averages = Registry(
    "averaging",
    lambda: declared(
        AveragingSpec, __package__, "register_averaging", ("none", "swad", "sma", "bma")
    ),
)


def register_averaging(name: str, *, citation: str = "") -> Callable[[C], C]:
    """Register an `Averaging` subclass; use as a decorator in a module passed to ``--plugin``.

    steppe builds the class as ``cls(module, **options)``. Its options are the constructor
    parameters annotated with `steppe.options.Option`.
    """
    return registrar(averages, AveragingSpec, name, citation=citation)


def averaging_names() -> tuple[str, ...]:
    """List the names that `build_averaging` accepts."""
    return tuple(averages)


def averaging_spec(name: str) -> AveragingSpec:
    """Look up an averaging method's registry entry; names are case-insensitive.

    Examples:
        >>> averaging_spec("SMA").default_options
        {'start': 100, 'refresh': False}
    """
    return averages[name]


def build_averaging(
    name: str, module: nn.Module, *, steps: int | None = None, **options: Any
) -> Averaging:
    """Build an averaging method by name for a module in training mode, on its device.

    Omitted options take their defaults; an unknown option is an error. `steps` is the number of
    updates, for averages that must know it.

    Examples:
        >>> from torch import nn
        >>> averaging = build_averaging("swad", nn.Linear(2, 1), every=50)
        >>> [step for step in range(120) if averaging.due(step, last=step == 119)]
        [0, 50, 100, 119]
    """
    spec = averages[name]
    spec.check(options)
    if steps is not None and "steps" in spec.further:
        options["steps"] = steps
    built: Averaging = spec.cls(module, **options)
    return built
