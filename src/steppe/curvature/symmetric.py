"""The interface between solvers and matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from steppe.errors import UserError


class Symmetric(Protocol):
    """A symmetric matrix: an operator or a dense `torch.Tensor`."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def __matmul__(self, vectors: Tensor, /) -> Tensor: ...


def check_matrix(op: Symmetric) -> None:
    """Raise an error for a dense matrix that would give wrong results."""
    if not isinstance(op, Tensor):
        return
    if op.ndim != 2 or op.shape[0] != op.shape[1] or not op.shape[0]:
        raise UserError(f"the matrix must be square, n x n, got shape {tuple(op.shape)}")
    if op.dtype not in (torch.float32, torch.float64):
        raise UserError(f"the matrix is {op.dtype}: convert it with .float() or .double()")
    rounding = 100 * torch.finfo(op.dtype).eps * op.abs().max()
    if not (op - op.T).abs().max() <= rounding:  # or not a number
        raise UserError("the matrix is not symmetric, or has entries that are not finite")


def multiply(op: Symmetric, vectors: Tensor) -> Tensor:
    """Multiply by vectors; raise an error if the product is not finite."""
    product = op @ vectors
    if not product.isfinite().all():
        raise UserError(
            "the product with a vector is not finite: the loss is not twice differentiable at "
            "these weights, or its second derivatives overflow. If they overflow, use float64."
        )
    return product


def in_tf32(op: Symmetric) -> Symmetric:
    """The operator with TF32 products; raise an error if it has none."""
    if not hasattr(op, "tf32"):
        raise UserError(
            f"{type(op).__name__} has no TF32 products, only operators such as HessianOperator "
            "have: use precision='fp32'"
        )
    coarse: Symmetric = op.tf32
    return coarse
