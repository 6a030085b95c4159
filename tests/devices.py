"""Where a test runs: on a CPU always, on a GPU with `make test-gpu`.

A test takes the fixture `device`, or a parameter of its own from `DEVICES`. What only a GPU has is
marked `gpu` and runs there alone.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ("cpu", GPU)


@contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """On a GPU, an error where the host waits for it; a CPU has nothing to wait for."""
    with _watched(device, "error"):
        yield


@contextmanager
def counting_waits(device: torch.device) -> Iterator[list[str]]:
    """A list of the times that the host waited for a GPU; empty on a CPU."""
    waits: list[str] = []
    with warnings.catch_warnings(record=True) as seen, _watched(device, "warn"):
        warnings.simplefilter("always")
        yield waits
    waits += [text for w in seen if "synchronizing" in (text := str(w.message))]


@contextmanager
def _watched(device: torch.device, mode: str) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
