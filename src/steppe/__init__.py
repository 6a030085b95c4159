"""Flatness-aware optimizers for PyTorch and a benchmark for domain generalization.

Importing `steppe` costs nothing: torch and everything heavier are imported by the subpackages
that need them, and those are imported when first used.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

_SUBPACKAGES = (
    *("algorithms", "averaging", "curvature", "domains", "integrations", "measure"),
    *("optim", "paper", "reports", "sweeps", "training"),
)


def __getattr__(name: str) -> ModuleType:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES})
