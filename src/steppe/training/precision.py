"""Number formats: what each precision does to a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.amp.grad_scaler import GradScaler

from steppe.errors import UserError

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def check(precision: str, device: torch.device, needs_graph: bool) -> None:
    """Refuses what cannot work, before anything starts."""
    if device.type == "cpu" and precision in ("fp16", "tf32"):
        raise UserError(f"precision={precision} needs a GPU: on a CPU, use fp32 or bf16")
    if needs_graph and precision == "fp16":
        raise UserError(
            "precision=fp16 does not suit an optimizer that differentiates twice (adahessian, "
            "gam-exact): its scaled gradients would be squared. Use fp32, tf32 or bf16."
        )


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of forward passes."""
    if precision not in _HALF:
        return nullcontext()
    return torch.autocast(device.type, dtype=_HALF[precision])


def scaler(precision: str, device: torch.device) -> GradScaler | None:
    """Keeps the small gradients of fp16 from vanishing; None where nothing needs scaling."""
    return GradScaler(device.type) if precision == "fp16" else None


@contextmanager
def settings(precision: str, deterministic: bool) -> Iterator[None]:
    """Torch's global switches for a run, put back after it.

    fp32 means full fp32: TF32 is off unless asked for, also inside convolutions, where torch has it
    on by default.
    """
    before = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        # Read when cuBLAS starts; without it some of its sums depend on timing.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before[0]
        torch.backends.cudnn.allow_tf32 = before[1]
        torch.use_deterministic_algorithms(before[2], warn_only=before[3])
        torch.backends.cudnn.benchmark = before[4]
