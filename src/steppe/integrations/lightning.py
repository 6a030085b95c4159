"""Lightning (`lightning`): a module for manual optimization; what would go wrong is refused."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import do_nothing_closure

from ._lightning import Checks, FlatnessSteps, first_pass

__all__ = ["ManualFlatness", "first_pass"]


class ManualFlatness(FlatnessSteps, LightningModule):
    """A LightningModule whose steps are taken by a flatness-aware optimizer, pass by pass.

    A base class, or a mixin in front of another LightningModule. It switches manual optimization
    on; call `flatness_step` from `training_step`. Under it hold, unlike in automatic optimization:
    fp16 with Lightning's GradScaler, accumulation over batches, clipping of the direction by any
    rule, and `on_before_optimizer_step` once per step with the direction in ``.grad``.

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
    """Found by `steppe.optim.frameworks` when a Trainer steps one of our optimizers."""

    module = LightningModule
    nothing = staticmethod(do_nothing_closure)
