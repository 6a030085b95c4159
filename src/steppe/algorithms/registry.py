"""Algorithms by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steppe.errors import UserError, unknown

from .algorithm import Algorithm
from .erm import ERM
from .network import Network


@dataclass(frozen=True)
class AlgorithmSpec:
    """One entry of the registry.

    Attributes:
        name: what users call it.
        target: the class.
        citation: the paper it comes from.
        defaults: its hyper-parameters.
    """

    name: str
    target: type[Algorithm]
    citation: str
    defaults: Mapping[str, float | int] = field(default_factory=dict)


_SPECS = (
    AlgorithmSpec(
        name="ERM",
        target=ERM,
        citation="Vapnik, Statistical Learning Theory, Wiley 1998",
    ),
)
_BY_NAME = {spec.name: spec for spec in _SPECS}


def algorithm_names() -> tuple[str, ...]:
    """Return the names that `build_algorithm` knows.

    Examples:
        >>> algorithm_names()
        ('ERM',)
    """
    return tuple(_BY_NAME)


def algorithm_spec(name: str) -> AlgorithmSpec:
    """Return the entry of the registry for a name, in any case.

    Examples:
        >>> algorithm_spec("erm").citation
        'Vapnik, Statistical Learning Theory, Wiley 1998'
    """
    by_lower = {known.lower(): spec for known, spec in _BY_NAME.items()}
    try:
        return by_lower[name.lower()]
    except KeyError:
        raise UserError(unknown("algorithm", name, _BY_NAME)) from None


def build_algorithm(name: str, network: Network, n_domains: int, **hparams: Any) -> Algorithm:
    """Build an algorithm by name, around a network."""
    return algorithm_spec(name).target(network, n_domains, **hparams)
