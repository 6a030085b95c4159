"""Precision of float32 products on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


def full_float32(device: torch.device) -> AbstractContextManager[None]:
    """Disable TF32, which keeps only ten bits of mantissa, and restore torch's settings."""
    return _products(device, "ieee")


def tf32(device: torch.device) -> AbstractContextManager[None]:
    """Enable TF32, and restore torch's settings."""
    return _products(device, "tf32")


@contextmanager
def _products(device: torch.device, precision: str) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    # Reading `allow_tf32` raises an error once someone has used these newer settings.
    cudnn: Any = torch.backends.cudnn
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = precision
        yield
    finally:
        for switch, earlier in zip(switches, before, strict=True):
            switch.fp32_precision = earlier
