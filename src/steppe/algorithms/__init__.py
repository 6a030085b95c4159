"""Algorithms: how batches of several domains become a loss. One file each."""

from typing import TYPE_CHECKING

from steppe.lazy import attach

if TYPE_CHECKING:
    from .algorithm import (
        Algorithm as Algorithm,
        Losses as Losses,
        Objective as Objective,
        Prepared as Prepared,
    )
    from .erm import ERM as ERM
    from .network import Network as Network, Stage as Stage
    from .registry import (
        AlgorithmSpec as AlgorithmSpec,
        algorithm_names as algorithm_names,
        algorithm_spec as algorithm_spec,
        build_algorithm as build_algorithm,
        register_algorithm as register_algorithm,
    )
else:  # not for type checkers, which would take any name for one of the package
    __getattr__, __dir__, __all__ = attach(__name__)
