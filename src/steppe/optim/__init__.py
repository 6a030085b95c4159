"""Flatness-aware optimizers: FAD, SAM and GAM around any torch optimizer, and their peers."""

from typing import TYPE_CHECKING

from steppe.lazy import attach

if TYPE_CHECKING:
    from .adahessian import AdaHessian as AdaHessian
    from .asam import ASAM as ASAM
    from .engine import FlatnessOptimizer as FlatnessOptimizer, InverseSqrt as InverseSqrt
    from .excursion import Phase as Phase
    from .fad import FAD as FAD
    from .gam import GAM as GAM
    from .gam_exact import GAMExact as GAMExact
    from .gam_release import GAMRelease as GAMRelease
    from .notices import BatchNormWarning as BatchNormWarning, Bfloat16Warning as Bfloat16Warning
    from .registry import (
        OptimizerSpec as OptimizerSpec,
        build_optimizer as build_optimizer,
        optimizer_names as optimizer_names,
        optimizer_spec as optimizer_spec,
        register_optimizer as register_optimizer,
        search_space as search_space,
    )
    from .sam import SAM as SAM
    from .yogi import Yogi as Yogi
else:  # hidden from type checkers: __getattr__ would make them accept any name
    __getattr__, __dir__, __all__ = attach(__name__)
