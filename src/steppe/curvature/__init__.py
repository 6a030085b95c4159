"""Curvature and flatness of any loss: Hessian spectra, traces, the paper's measures."""

from typing import TYPE_CHECKING

from steppe.lazy import lazily

if TYPE_CHECKING:
    from .ball import flatness
    from .density import Density, spectral_density
    from .eigenvalues import Eigenvalues, top_eigenvalues
    from .gauss_newton import GaussNewtonOperator
    from .hessian import HessianOperator
    from .hutchinson import trace
    from .operator import CurvatureOperator, LossFunction
    from .progress import Progress
    from .results import Flatness, Trace, lambda_max_from_flatness
    from .symmetric import Symmetric

__all__ = [
    "CurvatureOperator",
    "Density",
    "Eigenvalues",
    "Flatness",
    "GaussNewtonOperator",
    "HessianOperator",
    "LossFunction",
    "Progress",
    "Symmetric",
    "Trace",
    "flatness",
    "lambda_max_from_flatness",
    "spectral_density",
    "top_eigenvalues",
    "trace",
]

__getattr__ = lazily(
    globals(),
    {
        "ball": "flatness",
        "density": "Density spectral_density",
        "eigenvalues": "Eigenvalues top_eigenvalues",
        "gauss_newton": "GaussNewtonOperator",
        "hessian": "HessianOperator",
        "hutchinson": "trace",
        "operator": "CurvatureOperator LossFunction",
        "progress": "Progress",
        "results": "Flatness Trace lambda_max_from_flatness",
        "symmetric": "Symmetric",
    },
)
