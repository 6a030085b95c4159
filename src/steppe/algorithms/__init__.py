"""Algorithms: how batches of several domains become a loss. One file each."""

from .algorithm import Algorithm, Losses, Objective, Prepared
from .erm import ERM
from .network import Network, Stage
from .registry import (
    AlgorithmSpec,
    Option,
    algorithm_names,
    algorithm_spec,
    build_algorithm,
    register_algorithm,
)

__all__ = [
    "ERM",
    "Algorithm",
    "AlgorithmSpec",
    "Losses",
    "Network",
    "Objective",
    "Option",
    "Prepared",
    "Stage",
    "algorithm_names",
    "algorithm_spec",
    "build_algorithm",
    "register_algorithm",
]
