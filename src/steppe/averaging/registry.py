"""Averages by name, each with its options and its paper.

The table `_SPECS` is the only place that knows the names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from steppe.errors import UserError, unknown

from .averaging import Averaging
from .none import NoAveraging
from .options import check_options
from .sma import SMA
from .swad import SWAD


@dataclass(frozen=True)
class AveragingSpec:
    """One entry of the registry.

    Attributes:
        name: what users call it.
        target: the class.
        citation: the paper it comes from.
        options: the defaults of its options, by name.
    """

    name: str
    target: type[Averaging]
    citation: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuses options that it does not have, or values that make no sense."""
        for key in options:
            if not self.options:
                raise UserError(f"averaging {self.name!r} has no options: leave out {key!r}")
            if key not in self.options:
                raise UserError(unknown(f"option for averaging {self.name!r}:", key, self.options))
        check_options(self.name, options)


def _defaults(target: type[Averaging]) -> dict[str, Any]:
    parameters = inspect.signature(target).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


_SPECS = (
    AveragingSpec(name="none", target=NoAveraging, citation=""),
    AveragingSpec(
        name="swad",
        target=SWAD,
        citation="Cha et al., SWAD: Domain Generalization by Seeking Flat Minima, NeurIPS 2021",
        options=_defaults(SWAD),
    ),
    AveragingSpec(
        name="sma",
        target=SMA,
        citation="Arpit et al., Ensemble of Averages: Improving Model Selection and Boosting "
        "Performance in Domain Generalization, NeurIPS 2022",
        options=_defaults(SMA),
    ),
)
_BY_NAME = {spec.name: spec for spec in _SPECS}


def averaging_names() -> tuple[str, ...]:
    """Return the names that `build_averaging` knows.

    Examples:
        >>> averaging_names()
        ('none', 'swad', 'sma')
    """
    return tuple(_BY_NAME)


def averaging_spec(name: str) -> AveragingSpec:
    """Return the entry of the registry for a name, in any case.

    Examples:
        >>> averaging_spec("SMA").options
        {'start': 100}
    """
    try:
        return _BY_NAME[name.lower()]
    except KeyError:
        raise UserError(unknown("averaging", name, _BY_NAME)) from None


def build_averaging(name: str, module: nn.Module, **options: Any) -> Averaging:
    """Build an average of a module's weights by name.

    Args:
        name: one of `averaging_names()`.
        module: what is trained: on its device, in training mode.
        **options: options of the average; an unknown one is an error.

    Examples:
        >>> averaging = build_averaging("swad", nn.Linear(2, 1), every=50)
        >>> [step for step in range(120) if averaging.due(step, last=step == 119)]
        [0, 50, 100, 119]
    """
    spec = averaging_spec(name)
    spec.check(options)
    return spec.target(module, **options)
