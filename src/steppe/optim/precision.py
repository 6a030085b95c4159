"""One warning: bfloat16 autocast blurs the differences of gradients that flatness lives in."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Bfloat16Warning(UserWarning):
    """A flatness-aware step ran under bfloat16 autocast."""


MESSAGE = (
    "{method} ran its passes under bfloat16 autocast. It acts on differences of gradients "
    "(g1 - g0), of which bfloat16's 8 bits of mantissa lose more than float16's 11: "
    "'steppe bench fidelity' measures how much. Prefer torch.autocast(..., dtype=torch.float16) "
    "with a GradScaler, TF32 or float32. This is said once per optimizer."
)


def warn_on_bfloat16(method: str) -> AbstractContextManager[None]:
    """Watches the forward passes inside for bfloat16 autocast and warns at the first sign.

    The autocast region is inside the user's closure, over before the optimizer runs again, so the
    only place to see it without touching the model is where autograd saves a tensor. Meant for one
    pass: afterwards nothing is hooked and nothing is paid.
    """
    warned = False

    def pack(x: Tensor) -> Tensor:
        nonlocal warned
        kind = x.device.type
        if (
            not warned
            and torch.is_autocast_enabled(kind)
            and torch.get_autocast_dtype(kind) is torch.bfloat16
        ):
            warned = True
            warnings.warn(MESSAGE.format(method=method), Bfloat16Warning, stacklevel=2)
        return x.detach()  # the tensor itself would form a reference cycle through its node

    return saved_tensors_hooks(pack, lambda x: x)
