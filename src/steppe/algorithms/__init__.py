"""Domain-generalization algorithms: each turns batches from several domains into a loss."""

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
else:  # a module-level __getattr__ would make type checkers accept any name
    __getattr__, __dir__, __all__ = attach(__name__)
