"""Random draws that all passes of a step share: the same dropout masks, the same augmentation."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch


def rewinder(generator: Any) -> Callable[[], None]:
    """Remembers the state of a generator and returns a function that rewinds to it.

    Takes a `torch.Generator`, a NumPy `Generator` or `RandomState`, and a `random.Random`; the
    modules `random` and `numpy.random`, too, are their global generators.
    """
    if hasattr(generator, "getstate"):  # random.Random
        state = generator.getstate()
        return lambda: generator.setstate(state)
    if hasattr(generator, "get_state"):  # torch.Generator, numpy.random.RandomState
        state = generator.get_state()
        return lambda: generator.set_state(state)
    bits: Any = getattr(generator, "bit_generator", None)  # numpy.random.Generator
    if not hasattr(bits, "state"):
        raise TypeError(
            "generators takes torch.Generator, numpy.random.Generator, numpy.random.RandomState "
            f"and random.Random objects, got {type(generator).__name__}"
        )
    state = bits.state
    return lambda: setattr(bits, "state", state)


def record_randomness(device: torch.device, generators: Sequence[Any]) -> Callable[[], None]:
    """Remembers every global random state and returns a function that rewinds to it.

    Covers torch on the CPU and on `device`, Python's `random`, NumPy's global state when NumPy is
    loaded, and the `generators` given. While a CUDA graph is being captured the device generator
    cannot be rewound and is left alone: capture a whole step only where the loss draws nothing.
    """
    numpy = sys.modules.get("numpy")
    known = [torch.default_generator, random, *([numpy.random] if numpy else []), *generators]
    rewinders = list(map(rewinder, known))
    if device.type != "cpu" and not is_capturing(device):
        backend = torch.get_device_module(device)
        state = backend.get_rng_state(device)
        rewinders.append(lambda: backend.set_rng_state(state, device))

    def rewind() -> None:
        for one in rewinders:
            one()

    return rewind


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
