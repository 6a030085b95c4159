"""Flatness-aware steps with the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.trainer import Trainer

from steppe.errors import UserError
from steppe.optim import FlatnessOptimizer

from .accelerate import FlatnessPasses, check_mode, unwrapped

_USAGE = """\
    FlatnessTrainer(model, args, train_dataset=data, flatness=partial(FAD, rho=0.05))"""


class FlatnessTrainer(Trainer):
    """A Trainer that takes flatness-aware steps.

    It keeps the micro-batches of a step and visits all of them once per pass. It logs the loss at
    the unperturbed weights. `max_grad_norm` (default: 1.0), the logged ``grad_norm``, fp16 loss
    scaling and the scheduler act on the direction. Checkpoints hold the full optimizer state, so
    training resumes exactly. The reported floating-point operations count a single pass.

    Args:
        *args: passed to `transformers.Trainer`.
        flatness: wraps the Trainer's optimizer, whether the Trainer builds it from `optim`,
            `learning_rate` and `weight_decay` or receives it: ``functools.partial(FAD, rho=0.05)``.
            Omit it if ``optimizers=`` already contains a flatness-aware optimizer.
        **kwargs: passed to `transformers.Trainer`.

    Raises:
        UserError: without a flatness-aware optimizer, in modes that `FlatnessPasses` does not
            support, and for optimizers that step inside backward (LOMO, layer-wise GaLore and
            Apollo) or need its graph. Also for optimizers that ask for other losses (DISAM, GGA-L),
            unless you override `compute_loss` to return the loss that `loss_name` names.

    Examples:
        >>> import tempfile
        >>> from functools import partial
        >>> from steppe.optim import FAD
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> config = BertConfig(
        ...     vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        ...     intermediate_size=8,
        ... )
        >>> data = [{"input_ids": [n % 20, 3], "labels": n % 2} for n in range(8)]
        >>> args = TrainingArguments(
        ...     tempfile.mkdtemp(), use_cpu=True, max_steps=2, save_strategy="no",
        ...     report_to="none", disable_tqdm=True,
        ... )
        >>> trainer = FlatnessTrainer(
        ...     BertForSequenceClassification(config), args, train_dataset=data,
        ...     flatness=partial(FAD, rho=0.05),
        ... )
        >>> trainer.train().global_step
        {...}
        2
    """

    loss_name = "main"
    """The loss that `compute_loss` must return in this pass."""

    def __init__(
        self,
        *args: Any,
        flatness: Callable[[Optimizer], FlatnessOptimizer] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.flatness = flatness
        # Inputs, and the divisor of losses: the number of labels in the step, or of micro-batches.
        self._passes: FlatnessPasses[tuple[dict[str, Any], Tensor | int | None, int]] | None = None
        check_mode(self.accelerator)
        if flatness is not None and isinstance(self.optimizer, FlatnessOptimizer):
            raise UserError(
                f"Both flatness= and optimizers= provide a flatness-aware optimizer "
                f"({type(self.optimizer).__name__}): leave one out."
            )
        if self.optimizer is None and any(n in self.args.optim for n in ("lomo", "layerwise")):
            raise UserError(
                f"optim={self.args.optim!r} changes weights during backward, before a "
                "flatness-aware step has seen all gradients. Use optim='adamw_torch'."
            )

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Build the Trainer's optimizer and wrap it; called at the start of every training."""
        self._passes = None  # drop micro-batches left from an earlier training
        optimizer = super().create_optimizer(model)
        opt = unwrapped(optimizer)
        if self.flatness is not None and not isinstance(opt, FlatnessOptimizer):
            opt = self.optimizer = optimizer = self.flatness(optimizer)
        if not isinstance(opt, FlatnessOptimizer):
            raise UserError(
                f"FlatnessTrainer needs a flatness-aware optimizer, got {type(opt).__name__}. "
                f"Write\n\n{_USAGE}"
            )
        if opt.needs_graph:
            raise UserError(
                f"{type(opt).__name__} needs backward(create_graph=True), which the Trainer does "
                "not call. Use GAM, or Accelerate with accelerator.backward(loss, "
                "create_graph=True)."
            )
        return optimizer

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Store a micro-batch; on the last one of a step, run all passes and return its loss.

        Return zero for the other micro-batches.
        """
        if self._passes is None:
            assert self.optimizer is not None
            self._passes = FlatnessPasses(self.accelerator, model, self.optimizer)
        given = inputs, num_items_in_batch, self.current_gradient_accumulation_steps
        loss = torch.zeros((), device=self.args.device)
        first: int | None = None  # the first pass over the main loss
        try:
            for phase, (inputs, n_items, per_step) in self._passes.over(given):
                self.current_gradient_accumulation_steps = per_step
                self.loss_name = phase.loss
                self._check_loss()
                part = super().training_step(model, inputs, n_items)
                first = phase.index if first is None and phase.loss == "main" else first
                if phase.index == first:
                    loss += part
        finally:
            self.loss_name = "main"
        return loss

    def _check_loss(self) -> None:
        if self.loss_name != "main" and type(self).compute_loss is Trainer.compute_loss:
            raise UserError(
                f"{type(unwrapped(self.optimizer)).__name__} asks for the loss {self.loss_name!r}. "
                "Override compute_loss of FlatnessTrainer, and return the loss that self.loss_name "
                "names."
            )
