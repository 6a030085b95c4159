"""The Hessian of the mean loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .operator import CurvatureOperator, Differentiated, Parts, Product


class HessianOperator(CurvatureOperator):
    r"""The exact Hessian $\nabla^2 L(\theta)$ of the mean loss, multiplied without forming it.

    For a vector $v$, $\nabla^2 L\, v = \nabla (\nabla L \cdot v)$: a second differentiation
    (Pearlmutter, 1994). Detached parts of the loss count as constants.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> op = HessianOperator(model, lambda model, x: model(x).square().mean(), [x])
        >>> op @ torch.tensor([1.0, 0.0])  # the Hessian is 2 E[x x'] = [2 2; 2 4]
        tensor([2., 2.])
        >>> pairs = [(x, torch.zeros(2, 1))]
        >>> HessianOperator(model, nn.MSELoss(), pairs) @ torch.tensor([1.0, 0.0])
        tensor([2., 2.])
    """

    def _differentiate(self, batch: Any, number: int) -> Differentiated:
        loss = self._loss(batch, number)
        first, product = derivatives(loss, self.params)
        return Differentiated(loss.detach(), lambda: first, product)


def derivatives(value: Tensor, inputs: Sequence[Tensor]) -> tuple[Parts, Product]:
    """The gradient of a scalar, and a function that multiplies its Hessian by a vector."""
    if not value.requires_grad:
        return [None] * len(inputs), lambda tangent: [None] * len(inputs)
    first: Parts = torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True)
    # The others are constant or missing: their derivatives are zero.
    live = [(i, g) for i, g in enumerate(first) if g is not None and g.requires_grad]

    def product(tangent: Sequence[Tensor]) -> Parts:
        if not live:
            return [None] * len(inputs)
        return torch.autograd.grad(
            [g for _, g in live],
            inputs,
            [tangent[i] for i, _ in live],
            retain_graph=True,
            allow_unused=True,
        )

    return first, product
