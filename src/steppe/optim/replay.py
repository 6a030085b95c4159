"""What must stay put while one step evaluates the loss several times.

All passes of a step have to see the same loss function: the same dropout masks, the same
augmentation draws. And only the first of them, at the unperturbed weights, may leave a trace in the
model's buffers (batch-norm statistics and their counter).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def record_randomness(device: torch.device) -> Callable[[], None]:
    """Remembers every global random state and returns a function that rewinds to it.

    Covers torch on the CPU and on `device`, Python's `random`, and NumPy's global state when NumPy
    is loaded. While a CUDA graph is being captured the device generator cannot be rewound and is
    left alone: capture a whole step only where the loss draws nothing.
    """
    rewinders: list[Callable[[], None]] = []

    cpu = torch.get_rng_state()
    rewinders.append(lambda: torch.set_rng_state(cpu))

    if device.type != "cpu" and not is_capturing(device):
        backend = torch.get_device_module(device)
        state = backend.get_rng_state(device)
        rewinders.append(lambda: backend.set_rng_state(state, device))

    python = random.getstate()
    rewinders.append(lambda: random.setstate(python))

    if (numpy := sys.modules.get("numpy")) is not None:
        legacy = numpy.random.get_state()
        rewinders.append(lambda: numpy.random.set_state(legacy))

    def rewind() -> None:
        for one in rewinders:
            one()

    return rewind


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


Models = nn.Module | Iterable[nn.Module] | None


class StillBuffers:
    """Keeps a model's buffers as the first pass left them.

    Attributes such as `momentum` or `training` are never toggled: that would recompile compiled
    models, and `momentum=0` still advances `num_batches_tracked`.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._kept: list[tuple[nn.Module, str, Tensor]] = []
        self._values: list[Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Remembers the buffers as they are now."""
        if self._model is not None:
            self._kept = [
                (module, name, buffer)
                for module in self._model.modules()
                if not _is_still(module)
                for name, buffer in module._buffers.items()
                if buffer is not None and _can_be_written_to(buffer)
            ]
            self._values = [buffer.clone() for _, _, buffer in self._kept]

    @torch.no_grad()
    def put_back(self) -> None:
        """Writes the remembered values into the buffers, and rebinds those that were replaced."""
        if self._kept:
            for module, name, buffer in self._kept:
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
            torch._foreach_copy_([buffer for _, _, buffer in self._kept], self._values)


def _is_still(module: nn.Module) -> bool:
    """Whether it is a batch norm that uses its statistics as they are, as when fine-tuning."""
    return isinstance(module, _BatchNorm) and not module.training


def _can_be_written_to(buffer: Tensor) -> bool:
    """Not sparse or nested, which are no state of a layer, and not expanded."""
    if buffer.is_nested or buffer.layout is not torch.strided:
        return False
    return not any(
        stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
    )
