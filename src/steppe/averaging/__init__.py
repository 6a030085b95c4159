"""Weight averaging (SWAD, SMA or none), independent of the algorithm and optimizer."""

from typing import TYPE_CHECKING

from steppe.lazy import attach

if TYPE_CHECKING:
    from .averaging import Averaging as Averaging
    from .batchnorm import reestimate as reestimate, unfrozen as unfrozen
    from .bma import BMA as BMA
    from .none import NoAveraging as NoAveraging
    from .registry import (
        AveragingSpec as AveragingSpec,
        averaging_names as averaging_names,
        averaging_spec as averaging_spec,
        build_averaging as build_averaging,
        register_averaging as register_averaging,
    )
    from .sma import SMA as SMA
    from .swad import SWAD as SWAD
else:  # a module-level __getattr__ would make type checkers accept any name
    __getattr__, __dir__, __all__ = attach(__name__)
