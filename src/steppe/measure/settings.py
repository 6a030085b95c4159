from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from steppe.errors import UserError, unknown
from steppe.training.which import Which

Format = Literal["float32", "float64"]
Precision = Literal[Format, "tf32"]


@dataclass(frozen=True)
class Settings:
    """What to measure of a run, and how accurately.

    Attributes:
        domains: domain names. A training domain contributes its training split, any other domain
            all its images (default: the training split of all training domains).
        top: number of Hessian eigenvalues, largest first.
        images: number of images to sample across all domains; 0 uses all.
        which: weights to measure: after the last step (``last``), the best by validation
            (``best``), or after step N (``step:N``).
        rho: radius of the paper's flatness (default: the run's optimizer's, or 0.05).
        alpha: weight of zeroth-order flatness in R_FAD (default: the run's FAD's, or 0.5). Not
            GAM's `alpha`, the weight of its first-order term.
        tol: target residual of the eigenvalues, relative to the largest.
        trace_rtol: target standard error of the trace, relative to it.
        batch_size: images per batch; smaller batches need less memory (default: as many pixels as
            64 color images of 224 x 224).
        density: also estimate and draw the spectral density.
        seed: seed of the sampled images and random vectors.
        precision: ``float32``, ``float64``, or ``tf32`` (only on a GPU): float32, with a faster
            search for the eigenvalues, which are then verified and refined in full float32.
    """

    domains: Sequence[str] | None = None
    top: int = 50
    images: int = 1024
    which: Which = "last"
    rho: float | None = None
    alpha: float | None = None
    tol: float = 1e-3
    trace_rtol: float = 0.02
    batch_size: int | None = None
    density: bool = False
    seed: int = 0
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        for name in ("tol", "trace_rtol"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.top < 1:
            raise UserError(f"top must be >= 1, got {self.top}")
        if self.images < 0:
            raise UserError(f"images must be >= 0, got {self.images} (0 uses all)")
        if self.batch_size is not None and self.batch_size < 1:
            raise UserError(f"batch_size must be >= 1, got {self.batch_size}")
        if self.precision not in get_args(Precision):
            raise UserError(unknown("precision", self.precision, get_args(Precision)))
