"""Flatness-aware steps in loops that Hugging Face's Accelerate drives.

Accelerate hands the loop one micro-batch at a time and takes the step after the last one. A
flatness-aware step needs all of them again at every point it visits, so they are kept until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Generic, TypeVar

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from steppe.errors import UserError
from steppe.optim import FlatnessOptimizer, Phase, notices

Batch = TypeVar("Batch")

_DATA_PARALLEL = """\
Train with data parallelism, which steppe does support:

    torchrun --nproc-per-node 2 train.py"""
_FULLY_SHARD = """\
Shard the model with torch, and run the passes yourself:

    fully_shard(model)
    opt = FAD(torch.optim.AdamW(model.parameters()), model=model)
    for phase in opt.phases():
        with phase:
            loss_fn(model(x), y).backward()
    opt.step()"""
_REFUSED = {
    DistributedType.DEEPSPEED: ("DeepSpeed owns the weights and the step", _DATA_PARALLEL),
    DistributedType.MEGATRON_LM: ("Megatron-LM owns the passes and the step", _DATA_PARALLEL),
    DistributedType.XLA: ("XLA traces the step lazily and swaps parameters", _DATA_PARALLEL),
    DistributedType.FSDP: ("Accelerate's FSDP replaces and saves parameters itself", _FULLY_SHARD),
}
_PREPARE = """\
    model, optimizer, loader = accelerator.prepare(model, FAD(base), loader)
    passes = FlatnessPasses(accelerator, model, optimizer)"""


class FlatnessPasses(Generic[Batch]):
    """Runs the passes of a step over all its micro-batches, as Accelerate hands them out.

    `Accelerator.prepare` hides the optimizer's phases, and `Accelerator.accumulate` shows the loop
    one micro-batch after the other. `over` keeps them while Accelerate accumulates. With the last
    one it goes through all of them once per phase, reducing gradients between processes where
    Accelerate would. What follows is Accelerate's usual loop: clipping, ``optimizer.step()`` and
    ``scheduler.step()`` act on the direction, and a step that fp16 overflows is skipped.

    Every micro-batch stays in memory until the step. Draws are repeated in each pass, as they are
    with `FlatnessOptimizer.phases`.

    Args:
        accelerator: what prepared the other two.
        model: the model as `Accelerator.prepare` returned it; the optimizer's `model` becomes this.
        optimizer: a flatness-aware optimizer as `Accelerator.prepare` returned it.

    Raises:
        UserError: in modes that could not compute what the method defines: DeepSpeed, Megatron-LM,
            XLA, Accelerate's FSDP, tensor, context and sequence parallelism, fp8.

    Examples:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from steppe.optim import FAD
        >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = FAD(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
        >>> model, optimizer = accelerator.prepare(model, opt)
        >>> passes = FlatnessPasses(accelerator, model, optimizer)
        >>> visited = []
        >>> for x in torch.randn(2, 8, 3):  # two micro-batches, one step
        ...     with accelerator.accumulate(model):
        ...         for phase, micro in passes.over(x):
        ...             accelerator.backward(model(micro).square().mean())
        ...             visited.append(phase.index)
        ...         optimizer.step()
        >>> visited
        [0, 0, 1, 1, 2, 2, 3, 3]
        >>> opt.steps
        1
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> None:
        check_mode(accelerator)
        opt = unwrapped(optimizer)
        if not isinstance(opt, FlatnessOptimizer):
            raise UserError(
                f"FlatnessPasses runs the phases of a flatness-aware optimizer, got "
                f"{type(opt).__name__}. Wrap it before it is prepared:\n\n{_PREPARE}"
            )
        if opt is optimizer:
            raise UserError(
                f"This {type(opt).__name__} is not prepared: its step() would neither wait for the "
                f"last micro-batch nor undo the loss scale of fp16. Write\n\n{_PREPARE}"
            )
        opt.model = model
        self.accelerator = accelerator
        self.model = model
        self.optimizer = opt
        self._kept: list[Batch] = []
        self._silent = accelerator.mixed_precision == "bf16"

    def over(self, batch: Batch) -> Iterator[tuple[Phase, Batch]]:
        """Every pass to run now, as its phase and the micro-batch: none while accumulating.

        Run forward and ``accelerator.backward`` once for each. Losses of ``phase.index == 0`` are
        those at the unperturbed weights. Leaving the loop early, or an exception in it, restores
        the weights and gives the micro-batches up.
        """
        self._kept.append(batch)
        if not self.accelerator.sync_gradients:
            return
        batches, self._kept = self._kept, []
        accelerator = self.accelerator
        eager = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        passes = self.optimizer.passes(
            batches,
            accelerator.scaler,
            no_sync=nullcontext if eager else lambda: accelerator.no_sync(self.model),
        )
        for phase, micro in passes:
            if self._silent and phase.total > 1:
                self._silent = False
                notices.tell_bfloat16(type(self.optimizer).__name__)
            yield phase, micro


def unwrapped(optimizer: Optimizer | None) -> Optimizer | None:
    """The optimizer that Accelerate was given, out of what it returned."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def check_mode(accelerator: Accelerator) -> None:
    """Raises UserError where a flatness-aware step would compute something else."""
    reason, remedy = _REFUSED.get(accelerator.distributed_type, ("", ""))
    layout = accelerator.parallelism_config
    if layout is not None and (layout.tp_enabled or layout.cp_enabled or layout.sp_enabled):
        reason, remedy = "a model or a sequence split over processes", _DATA_PARALLEL
    if accelerator.mixed_precision == "fp8":
        reason = "differences of gradients do not survive fp8"
        remedy = "Use fp16:\n\n    accelerator = Accelerator(mixed_precision='fp16')"
    if reason:
        raise UserError(f"A flatness-aware step is not possible here: {reason}. {remedy}")
