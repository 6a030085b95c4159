"""Curvature and flatness of any loss: Hessian spectra, traces, the paper's measures."""

from typing import TYPE_CHECKING

from steppe.lazy import attach

if TYPE_CHECKING:
    from .ball import flatness as flatness
    from .density import Density as Density, spectral_density as spectral_density
    from .eigenvalues import Eigenvalues as Eigenvalues, top_eigenvalues as top_eigenvalues
    from .gauss_newton import GaussNewtonOperator as GaussNewtonOperator
    from .hessian import HessianOperator as HessianOperator
    from .hutchinson import trace as trace
    from .operator import CurvatureOperator as CurvatureOperator, LossFunction as LossFunction
    from .results import (
        Flatness as Flatness,
        Progress as Progress,
        Trace as Trace,
        lambda_max_from_flatness as lambda_max_from_flatness,
    )
    from .symmetric import Symmetric as Symmetric
else:  # hidden from type checkers: __getattr__ would make them accept any name
    __getattr__, __dir__, __all__ = attach(__name__)
