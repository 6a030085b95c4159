"""float32 that is float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Computes without TF32, which keeps ten bits, and puts torch's switches back afterwards."""
    if device.type != "cuda":
        yield
        return
    # Not `allow_tf32`, which cannot be read once someone has used these newer switches.
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
