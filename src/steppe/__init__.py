"""Flatness-aware optimizers for PyTorch and a benchmark for domain generalization.

Importing `steppe` is instant: subpackages, and torch with them, are imported on first use.
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
