"""Curvature and flatness of any loss: Hessian spectra, traces, the paper's theory."""

from .density import Density, spectral_density
from .eigenvalues import Eigenvalues, top_eigenvalues
from .gauss_newton import GaussNewtonOperator
from .hessian import HessianOperator
from .operator import CurvatureOperator, LossFunction, Symmetric
from .progress import Progress
from .trace import Trace, trace

__all__ = [
    "CurvatureOperator",
    "Density",
    "Eigenvalues",
    "GaussNewtonOperator",
    "HessianOperator",
    "LossFunction",
    "Progress",
    "Symmetric",
    "Trace",
    "spectral_density",
    "top_eigenvalues",
    "trace",
]
