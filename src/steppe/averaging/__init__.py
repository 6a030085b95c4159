"""Weight averaging: SWAD, SMA, or none. It follows a module and knows nothing of what trains it."""

from .averaging import Averaging
from .batchnorm import reestimate, unfrozen
from .none import NoAveraging
from .registry import AveragingSpec, averaging_names, averaging_spec, build_averaging
from .sma import SMA
from .swad import SWAD

__all__ = [
    "SMA",
    "SWAD",
    "Averaging",
    "AveragingSpec",
    "NoAveraging",
    "averaging_names",
    "averaging_spec",
    "build_averaging",
    "reestimate",
    "unfrozen",
]
