"""Whose memory a gradient is: the engine may keep and overwrite it only if nobody else can see it.

Adopting gradients saves two parameter-sized allocations per step. But a DDP bucket is written again
by the next backward, and a user may have kept a reference (``before = p.grad``) to compare with
later. Both are told from a gradient of our own by counting references. This is for memory kept
beyond its pass; within it, a gradient may be overwritten in place, as gradient clipping does.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor, nn


def are_ours(grads: list[Tensor], params: list[Tensor]) -> bool:
    """Whether these gradients of `params` are plain, and `.grad` is all that refers to them.

    The caller holds them in one list and nowhere else.
    """
    alone = _alone()
    return all(counts == alone for counts in _references(grads)) and all(map(_plain, grads, params))


def _references(grads: list[Tensor]) -> list[tuple[int, int]]:
    """References to each tensor from Python, and to its memory (views, detached twins, NumPy)."""
    count = torch._C._storage_Use_Count
    return [(sys.getrefcount(g), count(g.untyped_storage()._cdata)) for g in grads]


@functools.cache
def _alone() -> tuple[int, int]:
    """What `_references` gives for a gradient that only its parameter holds.

    Measured rather than written down: the numbers are CPython's and torch's own business.
    """
    p = nn.Parameter(torch.zeros(1))
    p.grad = torch.zeros(1)
    return _references([p.grad])[0]


def _plain(grad: Tensor, p: Tensor) -> bool:
    """Laid out like its parameter in memory of its own, outside any graph."""
    return (
        type(grad) is Tensor  # not a DTensor
        and not grad.requires_grad
        and not grad._is_view()
        and grad.dtype == p.dtype
        and grad.stride() == p.stride()
        and grad.untyped_storage().nbytes() == grad.nbytes
    )
