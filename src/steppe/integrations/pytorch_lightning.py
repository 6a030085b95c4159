"""Lightning under its older name, `pytorch_lightning`; see `steppe.integrations.lightning`.

The two packages define separate classes, and modules of one do not train with the other.
"""

from __future__ import annotations

from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.core.optimizer import do_nothing_closure

from ._lightning import Checks, FlatnessSteps, first_pass

__all__ = ["ManualFlatness", "first_pass"]


class ManualFlatness(FlatnessSteps, LightningModule):
    """`steppe.integrations.lightning.ManualFlatness`, a LightningModule of `pytorch_lightning`."""


class Guard(Checks, Callback):
    """Used by `steppe.optim.frameworks` when a Trainer steps a steppe optimizer."""

    module = LightningModule
    nothing = staticmethod(do_nothing_closure)
