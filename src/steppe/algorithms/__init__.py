"""Algorithms: how batches of several domains become a loss. One file each."""

from .algorithm import Algorithm, Losses, Objective
from .erm import ERM
from .network import Network
from .registry import AlgorithmSpec, algorithm_names, algorithm_spec, build_algorithm

__all__ = [
    "ERM",
    "Algorithm",
    "AlgorithmSpec",
    "Losses",
    "Network",
    "Objective",
    "algorithm_names",
    "algorithm_spec",
    "build_algorithm",
]
