"""Full float32 precision on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Disable TF32, which keeps only ten bits of mantissa, and restore torch's settings."""
    if device.type != "cuda":
        yield
        return
    # Reading `allow_tf32` raises an error once someone has used these newer settings.
    cudnn: Any = torch.backends.cudnn
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision
