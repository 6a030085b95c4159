"""Flatness-aware steps with Hugging Face Accelerate."""

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
Train with data parallelism, which steppe supports:

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
    """Runs the passes of a step over all micro-batches that Accelerate accumulates.

    Accelerate gives the loop one micro-batch at a time, but every pass of a flatness-aware step
    needs all of them. `over` therefore keeps micro-batches in memory until the last one, then
    visits all of them once per phase, reducing gradients between processes where Accelerate would.
    The rest of the loop does not change: clipping, ``optimizer.step()`` and ``scheduler.step()``
    act on the direction, and a step that overflows in fp16 is skipped. All passes replay the same
    random draws, as with `FlatnessOptimizer.phases`.

    Args:
        accelerator: the accelerator that prepared the model and optimizer.
        model: the prepared model, which also becomes the optimizer's `model`.
        optimizer: the prepared flatness-aware optimizer.

    Raises:
        UserError: in modes that would silently change the method: DeepSpeed, Megatron-LM, XLA,
            Accelerate's FSDP, tensor, context and sequence parallelism, fp8.

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
                f"FlatnessPasses needs a flatness-aware optimizer, got {type(opt).__name__}. Wrap "
                f"it before accelerator.prepare:\n\n{_PREPARE}"
            )
        if opt is optimizer:
            raise UserError(
                f"This {type(opt).__name__} is not prepared: its step() would neither wait for the "
                f"last micro-batch nor unscale fp16 gradients. Write\n\n{_PREPARE}"
            )
        opt.model = model
        self.accelerator = accelerator
        self.model = model
        self.optimizer = opt
        self._kept: list[Batch] = []
        self._silent = accelerator.mixed_precision == "bf16"

    def over(self, batch: Batch) -> Iterator[tuple[Phase, Batch]]:
        """Yield the phase and micro-batch of every pass to run now; nothing while accumulating.

        Run forward and ``accelerator.backward`` once for each. Losses with ``phase.index == 0``
        are at the unperturbed weights (except in MSAM and ``RWP(alpha=1)``). Leaving the loop
        early, or an exception in it, restores the weights and discards the micro-batches.
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
    """Return the optimizer inside Accelerate's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def check_mode(accelerator: Accelerator) -> None:
    """Raise UserError in modes that would silently change a flatness-aware step."""
    reason, remedy = _REFUSED.get(accelerator.distributed_type, ("", ""))
    layout = accelerator.parallelism_config
    if layout is not None and (layout.tp_enabled or layout.cp_enabled or layout.sp_enabled):
        reason, remedy = "the model or sequence is split across processes", _DATA_PARALLEL
    if accelerator.mixed_precision == "fp8":
        reason = "differences of gradients do not survive fp8"
        remedy = "Use fp16:\n\n    accelerator = Accelerator(mixed_precision='fp16')"
    if reason:
        raise UserError(f"A flatness-aware step is not possible here: {reason}. {remedy}")
