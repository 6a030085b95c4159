"""Arithmetic on lists of tensors, each treated as one vector.

Functions take lists of equal length and loop over tensors only inside PyTorch (`torch._foreach_*`),
so a call costs a handful of kernel launches. The last functions determine who owns a tensor's
memory and whether its contents changed.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

Vector = list[Tensor]

CPU_BLOCK = 2**20
"""Bytes that a CPU processes at once. An accelerator is faster with few large launches."""

SMALL = 2**12
"""Entries of a tensor that are copied faster than PyTorch is called."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def norm(xs: Vector) -> Tensor:
    """Euclidean norm of the whole vector, as a 0-dim tensor on its device.

    Accumulates half precision in float32: the norm of a scaled fp16 gradient overflows fp16.
    """
    return cast(Tensor, torch.linalg.vector_norm(lengths(xs)))


def lengths(xs: Vector) -> Tensor:
    """Norms of the parts of a vector; their norm is the vector's."""
    if _dotted(xs):
        return torch.stack([torch.dot(f, f) for f in _flat(xs)]).sqrt_()
    return torch.stack(torch._foreach_norm(xs, 2, dtype=_wide(xs)))


def dot(xs: Vector, ys: Vector, *, scratch: Vector | None = None) -> Tensor:
    """Inner product of two vectors, accumulated like `norm`; may overwrite `scratch`.

    Launches one kernel per tensor, because foreach has no sum.
    """
    if _dotted(xs) and _dotted(ys):
        pairs = zip(_flat(xs), _flat(ys), strict=True)
        return torch.stack([torch.dot(x, y) for x, y in pairs]).sum()
    products = list(torch._foreach_mul(xs, ys)) if scratch is None else scratch
    if scratch is not None:
        torch._foreach_copy_(scratch, xs)
        torch._foreach_mul_(scratch, ys)
    return torch.stack([p.sum(dtype=_wide(xs)) for p in products]).sum()


def dot_and_norm(xs: Vector, ys: Vector) -> tuple[Tensor, Tensor]:
    """The inner product of two vectors and the norm of the second, which a CPU reads only once."""
    if _dotted(xs) and _dotted(ys):
        pairs = zip(_flat(xs), _flat(ys), strict=True)
        both = torch.stack([torch.dot(v, y) for x, y in pairs for v in (x, y)])
        inner, square = both.view(-1, 2).sum(0)
        return inner, square.sqrt()
    return dot(xs, ys), norm(ys)


def like(xs: Vector) -> Vector:
    """Uninitialized memory for a vector of the same shape, strides and type."""
    return [torch.empty_like(x) for x in xs]


def blocks(*vectors: Vector) -> Iterator[tuple[Vector, ...]]:
    """Parts of vectors of the same shape for several operations in a row; writes go through.

    On a CPU, large tensors are split along their first dimension, so that the parts stay in the
    cache from one operation to the next.
    """
    if vectors[0][0].device.type != "cpu" or torch.compiler.is_compiling():
        yield vectors
        return
    small = [x.nbytes <= CPU_BLOCK for x in vectors[0]]
    if any(small):
        yield tuple(list(itertools.compress(xs, small)) for xs in vectors)
    for large in itertools.compress(zip(*vectors, strict=True), map(operator.not_, small)):
        rows = max(1, CPU_BLOCK * len(large[0]) // large[0].nbytes)
        for parts in zip(*(x.split(rows) for x in large), strict=True):
            yield tuple([part] for part in parts)


def differ(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists hold different objects, or the same ones in another order."""
    return len(some) != len(others) or any(map(operator.is_not, some, others))


def add_(xs: Vector, ys: Vector, scale: float | Tensor, *, spend: bool = False) -> None:
    """Compute ``xs += scale * ys``.

    A tensor `scale` never leaves its device. Foreach addition accepts only a Python number as its
    factor; on a GPU, torch's fused SGD does the same with a learning rate on the device. Otherwise
    this needs a temporary, unless `spend` allows overwriting `ys`.
    """
    if isinstance(scale, Tensor) and _fusible(xs, ys, scale):
        torch._fused_sgd_(
            xs,
            ys,
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=scale,
            dampening=0.0,
            nesterov=False,
            maximize=True,  # uphill
            is_first_step=False,
        )
    elif isinstance(scale, Tensor):
        if spend:
            torch._foreach_mul_(ys, scale)
        else:
            ys = list(torch._foreach_mul(ys, scale))
        torch._foreach_add_(xs, ys)
    else:
        torch._foreach_add_(xs, ys, alpha=scale)


def _wide(xs: Vector) -> torch.dtype:
    """The dtype to accumulate in."""
    return torch.float64 if any(x.dtype == torch.float64 for x in xs) else torch.float32


def _fusible(xs: Vector, ys: Vector, scale: Tensor) -> bool:
    """Whether fused SGD can add them: float32 on a GPU with equal strides."""
    return (
        scale.device.type == "cuda"
        and scale.dtype == torch.float32
        and not torch.compiler.is_compiling()
        and all(
            x.dtype == y.dtype == torch.float32 and x.stride() == y.stride()
            for x, y in zip(xs, ys, strict=True)
        )
    )


def _dotted(xs: Vector) -> bool:
    """Whether to compute a norm by inner products, which on a CPU run at memory bandwidth.

    There, foreach loops over tensors as well, and its norm is slower.
    """
    return (
        xs[0].device.type == "cpu"
        and xs[0].dtype in (torch.float32, torch.float64)
        and all(x.dtype == xs[0].dtype and x.is_contiguous() for x in xs)
        and not torch.compiler.is_compiling()
    )


def _flat(xs: Vector) -> Vector:
    """The same entries in one-dimensional tensors; small ones joined, which saves calls."""
    flat = [x.view(-1) for x in xs if x.numel() > SMALL]
    small = [x for x in xs if x.numel() <= SMALL]
    return [*flat, _flatten_dense_tensors(small)] if small else flat


def are_ours(grads: list[Tensor], params: list[Tensor]) -> bool:
    """Whether the engine may keep and overwrite these gradients of `params` beyond their pass.

    That saves two parameter-sized allocations per step. But the next backward overwrites a DDP
    bucket, and users may keep a reference (``before = p.grad``). Reference counts distinguish
    both from a gradient that only `.grad` refers to. The caller must hold the gradients in one
    list only.
    """
    alone = _alone()
    return all(counts == alone for counts in _references(grads)) and all(map(_plain, grads, params))


def _references(grads: list[Tensor]) -> list[tuple[int, int]]:
    """References to each tensor from Python, and to its storage (views, NumPy arrays)."""
    count = torch._C._storage_Use_Count
    return [(sys.getrefcount(g), count(g.untyped_storage()._cdata)) for g in grads]


@functools.cache
def _alone() -> tuple[int, int]:
    """The counts of a gradient that only its parameter holds.

    Measured, because they depend on the versions of CPython and torch.
    """
    p = nn.Parameter(torch.zeros(1))
    p.grad = torch.zeros(1)
    return _references([p.grad])[0]


def _plain(grad: Tensor, p: Tensor) -> bool:
    """Whether a gradient owns its memory, with its parameter's layout and no graph."""
    return (
        type(grad) is Tensor  # not a DTensor
        and not grad.requires_grad
        and not grad._is_view()
        and grad.dtype == p.dtype
        and grad.stride() == p.stride()
        and grad.untyped_storage().nbytes() == grad.nbytes
    )


def fingerprint(x: Tensor) -> tuple[int, ...]:
    """A checksum: sums of the bits along two axes. Changing any one entry changes it."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().reshape(-1)
    size = flat.element_size()
    whole = len(flat) - len(flat) % (8 // size)
    body, rest = flat[:whole], flat[whole:].view(_WORDS[size])
    if body.storage_offset() * size % 8:
        body = body.clone()
    words = body.view(torch.int64)  # sums of 64-bit words run at memory bandwidth
    cut = len(words) - len(words) % 4095
    table = words[:cut].view(-1, 4095)
    parts = (table.sum(0), table.sum(1), words[cut:], rest.to(torch.int64))
    return tuple(map(_weighted, parts))


def _weighted(x: Tensor) -> int:
    """A sum with odd weights: changing one term changes it, and so does almost any swap."""
    x = x ^ (x >> 29)  # otherwise an even number of flipped sign bits would cancel
    weights = torch.arange(1, len(x) + 1, device=x.device) * 0x9E3779B1 | 1
    return int((x * weights).sum())
