"""Flatness-aware optimizers: FAD, SAM and GAM around any torch optimizer, and their peers."""

from .adahessian import AdaHessian
from .engine import FlatnessOptimizer
from .excursion import Phase
from .fad import FAD
from .gam import GAM
from .gam_exact import GAMExact
from .gam_release import GAMRelease
from .notices import BatchNormWarning, Bfloat16Warning
from .registry import (
    OptimizerSpec,
    build_optimizer,
    optimizer_names,
    optimizer_spec,
    search_space,
)
from .sam import SAM
from .schedules import InverseSqrt
from .search import run_space
from .yogi import Yogi

__all__ = [
    "FAD",
    "GAM",
    "SAM",
    "AdaHessian",
    "BatchNormWarning",
    "Bfloat16Warning",
    "FlatnessOptimizer",
    "GAMExact",
    "GAMRelease",
    "InverseSqrt",
    "OptimizerSpec",
    "Phase",
    "Yogi",
    "build_optimizer",
    "optimizer_names",
    "optimizer_spec",
    "run_space",
    "search_space",
]
