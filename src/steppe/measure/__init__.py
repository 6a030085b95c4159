"""The curvature and flatness of a run's loss at the weights that it found."""

from typing import TYPE_CHECKING

from steppe.lazy import attach

if TYPE_CHECKING:
    from .measuring import measure_run as measure_run
    from .settings import Settings as Settings
    from .stored import Measured as Measured, load_measurements as load_measurements
else:  # not for type checkers, which would take any name for one of the package
    __getattr__, __dir__, __all__ = attach(__name__)
