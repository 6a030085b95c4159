"""The curvature and flatness of a run's loss at the weights that it found."""

from typing import TYPE_CHECKING

from steppe.lazy import lazily

if TYPE_CHECKING:
    from .measuring import measure_run
    from .settings import Settings
    from .stored import Measured, load_measurements

__all__ = ["Measured", "Settings", "load_measurements", "measure_run"]

__getattr__ = lazily(
    globals(),
    {
        "measuring": "measure_run",
        "settings": "Settings",
        "stored": "Measured load_measurements",
    },
)
