"""The curvature and flatness of a run's loss at the weights that it found."""

from typing import TYPE_CHECKING

from steppe.lazy import lazily

if TYPE_CHECKING:
    from .measuring import Settings, measure_run
    from .stored import Measured, load_measurements

__all__ = ["Measured", "Settings", "load_measurements", "measure_run"]

__getattr__ = lazily(
    globals(),
    {"measuring": "Settings measure_run", "stored": "Measured load_measurements"},
)
