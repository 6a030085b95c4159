"""`ManualFlatness` of `lightning` and of `pytorch_lightning`: this needs neither of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from steppe.errors import UserError
from steppe.optim import FlatnessOptimizer, distributed

Batch = TypeVar("Batch")


class FlatnessSteps:
    """`ManualFlatness` without its base class, the package's LightningModule."""

    if TYPE_CHECKING:  # what the LightningModule beside it has
        device: Any
        lr_scheduler_step: Any
        manual_backward: Any
        optimizers: Any
        trainer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self._waiting: dict[Optimizer, list[Any]] = {}

    def flatness_step(
        self,
        batch: Batch,
        loss: Callable[[Batch], Tensor],
        *,
        accumulate: int = 1,
        optimizer: Any = None,
    ) -> Tensor | None:
        """Takes one step; returns the loss at the unperturbed weights, detached.

        Schedulers of the optimizer then step by their ``interval`` and ``frequency`` as in
        automatic optimization, except `ReduceLROnPlateau`, whose metric is yours to give.

        Args:
            batch: what `training_step` was given.
            loss: from a batch to its loss; called once per batch in every pass, so log outside it.
            accumulate: how many batches make a step. Earlier ones are kept (inputs only, not
                activations) until their number is reached or the epoch ends, because every pass
                needs them all; the loss is the mean over them. Until then None is returned.
            optimizer: which of ``self.optimizers()``, where there are several.
        """
        if accumulate < 1:
            raise UserError(f"accumulate must be at least 1, got {accumulate}")
        # SWA's last epoch, for batch-norm statistics alone
        if self.trainer.fit_loop._skip_backward:
            with torch.no_grad():
                loss(batch)
            return None
        handle = self.optimizers() if optimizer is None else optimizer
        opt = _unwrap(handle)
        # Those of an optimizer that an interrupted fit has left behind are not of this one.
        known = self.trainer.optimizers
        self._waiting = {o: kept for o, kept in self._waiting.items() if o in known}
        batches = self._waiting.setdefault(opt, [])
        batches.append(batch)
        if len(batches) < accumulate and not self.trainer.is_last_batch:
            return None
        del self._waiting[opt]
        # Lightning runs training_step under autocast as a whole; here it is for the passes alone.
        with torch.autocast(self.device.type, enabled=False):
            value = self._passes(opt, batches, loss)
            handle.step()
        self._step_schedulers(opt)
        return value

    def _passes(
        self, opt: FlatnessOptimizer, batches: list[Batch], loss: Callable[[Batch], Tensor]
    ) -> Tensor:
        precision = self.trainer.precision_plugin
        total = torch.zeros((), device=self.device)
        # Lightning's DDP module, which reduces the sum once, is around the one that `opt` has.
        passes = opt.passes(
            batches,
            getattr(precision, "scaler", None),
            no_sync=lambda: distributed.no_sync([self.trainer.model]),
        )
        for phase, batch in passes:
            with precision.forward_context():
                part = loss(batch) / len(batches)
            if opt.needs_graph:
                self.manual_backward(part, create_graph=True)
            else:
                self.manual_backward(part)
            if phase.index == 0:
                total += part.detach()
        return total

    def _step_schedulers(self, opt: Optimizer) -> None:
        # Of this epoch, as Lightning counts.
        batches = self.trainer.fit_loop.epoch_loop.batch_idx + 1
        epochs = self.trainer.current_epoch + 1
        for config in self.trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            if scheduler.optimizer is not opt or isinstance(scheduler, ReduceLROnPlateau):
                continue
            by_step = config.interval == "step"
            over = by_step or self.trainer.is_last_batch
            if over and (batches if by_step else epochs) % config.frequency == 0:
                self.lr_scheduler_step(scheduler, None)


def _unwrap(handle: Any) -> FlatnessOptimizer:
    """The optimizer behind Lightning's handle, which has its methods but not its attributes."""
    opt = getattr(handle, "optimizer", None)
    if isinstance(opt, FlatnessOptimizer):
        return opt
    raise UserError(
        "flatness_step needs one of steppe.optim's flatness-aware optimizers from "
        f"configure_optimizers, got {type(handle if opt is None else opt).__name__}. Where there "
        "are several, say which: "
        "self.flatness_step(batch, self.loss, optimizer=self.optimizers()[0])."
    )
