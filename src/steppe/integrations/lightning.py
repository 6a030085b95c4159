"""Lightning (`lightning`): a module for manual optimization, and checks of Trainer settings."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import do_nothing_closure

from ._lightning import Checks, FlatnessSteps, first_pass

__all__ = ["ManualFlatness", "first_pass"]


class ManualFlatness(FlatnessSteps, LightningModule):
    """A LightningModule that runs the passes of a flatness-aware optimizer.

    Use it as the base class, or as a mixin before another LightningModule. It turns on manual
    optimization; call `flatness_step` from `training_step`. Unlike automatic optimization, it
    supports fp16 with Lightning's GradScaler, accumulation, any clipping of the direction, and
    `on_before_optimizer_step` once per step with the direction in ``.grad``.

    Examples:
        >>> import torch
        >>> from steppe.optim import FAD
        >>> class Net(ManualFlatness):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(20, 5)
        ...
        ...     def loss(self, batch):
        ...         x, y = batch
        ...         return torch.nn.functional.cross_entropy(self.layer(x), y)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         self.log("train_loss", self.flatness_step(batch, self.loss))
        ...
        ...     def configure_optimizers(self):
        ...         base = torch.optim.SGD(self.parameters(), lr=0.1)
        ...         return FAD(base, rho=0.05, model=self, max_norm=1.0)
        >>> Net().automatic_optimization
        False
    """


class Guard(Checks, Callback):
    """Used by `steppe.optim.frameworks` when a Trainer steps a steppe optimizer."""

    module = LightningModule
    nothing = staticmethod(do_nothing_closure)
