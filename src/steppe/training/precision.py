"""Number formats of a run, and the torch settings that each needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch.amp.grad_scaler import GradScaler

from steppe.errors import UserError
from steppe.optim import optimizer_spec

if TYPE_CHECKING:
    from .config import Named

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}

FIDELITY = 0.98
"""Mean cosine to float64 that a format needs for `auto` to choose it."""

MEASURED: dict[float, dict[str, tuple[float, float]]] = {
    0.01: {"fp16": (0.996, 0.971), "tf32": (0.998, 0.995)},
    0.05: {"fp16": (0.999, 0.997), "tf32": (0.999, 0.998)},
    0.1: {"fp16": (0.999, 0.997), "tf32": (0.999, 0.997)},
    0.2: {"fp16": (0.998, 0.977), "tf32": (0.999, 0.981)},
    0.5: {"fp16": (0.994, 0.970), "tf32": (0.996, 0.964)},
    1.0: {"fp16": (0.989, 0.900), "tf32": (0.993, 0.901)},
    2.0: {"fp16": (0.979, 0.690), "tf32": (0.987, 0.773)},
}
"""Cosines of h0 and h1 to float64 at each rho, from ``benchmarks/fidelity-h200.json``."""


def resolve(precision: str, device: torch.device, optimizer: Named) -> str:
    """Resolve `auto` to a precision; check that any other works.

    `auto` is fp32 on a CPU. On a GPU it is fp16 with loss scaling, which is as fast as bf16 and
    more accurate in the differences of gradients that measure flatness. If the measured fidelity of
    those at the optimizer's rho is too low, it is TF32, then fp32. Between measured radii, both
    neighbors must qualify. It is also fp32 beyond the measured radii, for adaptive radii, for
    optimizers that differentiate twice, and for multi-pass ones without a registered radius.

    Examples:
        >>> from .config import Named
        >>> cuda = torch.device("cuda")
        >>> resolve("auto", cuda, Named(name="fad", rho=0.05))
        'fp16'
        >>> resolve("auto", cuda, Named(name="fad", rho=2.0))
        'fp32'
    """
    spec = optimizer_spec(optimizer.name)
    if device.type == "cpu" and precision in ("fp16", "tf32"):
        raise UserError(f"precision={precision} needs a GPU: on a CPU, use auto, fp32 or bf16")
    if spec.needs_graph and precision == "fp16":
        raise UserError(
            "precision=fp16 does not work with an optimizer that differentiates twice (adahessian, "
            "gam-exact), which would square the scaled gradients. Use fp32, tf32 or bf16."
        )
    if precision != "auto":
        return precision
    if device.type != "cuda" or spec.needs_graph or optimizer.options.get("adaptive"):
        return "fp32"
    if spec.passes > 1 and not spec.radii:
        return "fp32"
    options = {**spec.defaults(), **optimizer.options}
    for candidate in ("fp16", "tf32"):
        if all(_fidelity(candidate, options[r], spec.order) >= FIDELITY for r in spec.radii):
            return candidate
    return "fp32"


def _fidelity(precision: str, rho: float, order: int) -> float:
    """The lower of the measured cosines at the neighboring radii; 0 beyond the measured range."""
    if rho == 0:
        return 1.0  # no differences of gradients
    below = [r for r in MEASURED if r <= rho]
    above = [r for r in MEASURED if r >= rho]
    if not below or not above:
        return 0.0
    return min(MEASURED[r][precision][order] for r in (max(below), min(above)))


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    if precision not in _HALF:
        return nullcontext()
    return torch.autocast(device.type, dtype=_HALF[precision])


def scaler(precision: str, device: torch.device) -> GradScaler | None:
    """Loss scaling against underflow of fp16 gradients; None for other formats."""
    return GradScaler(device.type) if precision == "fp16" else None


@contextmanager
def settings(precision: str, deterministic: bool) -> Iterator[None]:
    """Set torch's global switches for a run, and restore them afterwards.

    fp32 means full fp32: TF32 is off, even in convolutions, where torch enables it by default.
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
        # Read when cuBLAS starts; without it, some of its sums depend on timing.
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
