"""Curvature and flatness of any loss: Hessian spectra, traces, the paper's theory."""

from .bound import Bound, ood_bound
from .density import Density, spectral_density
from .eigenvalues import Eigenvalues, top_eigenvalues
from .flatness import Flatness, flatness, lambda_max_from_flatness
from .gauss_newton import GaussNewtonOperator
from .hessian import HessianOperator
from .operator import CurvatureOperator, LossFunction
from .progress import Progress
from .schedule import ConvergenceSchedule, convergence_schedule
from .symmetric import Symmetric
from .trace import Trace, trace

__all__ = [
    "Bound",
    "ConvergenceSchedule",
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
    "convergence_schedule",
    "flatness",
    "lambda_max_from_flatness",
    "ood_bound",
    "spectral_density",
    "top_eigenvalues",
    "trace",
]
