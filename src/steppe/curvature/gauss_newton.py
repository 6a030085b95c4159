"""The generalized Gauss-Newton matrix of the mean loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steppe.errors import UserError

from .hessian import derivatives
from .operator import CurvatureOperator, Differentiated, LossFunction, Parts, gradient_parts


class GaussNewtonOperator(CurvatureOperator):
    r"""The generalized Gauss-Newton matrix $J^\top \nabla_z^2 L\, J$ of the mean loss.

    Here $z$ are the outputs of the model and $J$ is their Jacobian with respect to the parameters.
    This is the Hessian without the curvature of the model itself. It is positive semi-definite if
    the loss is convex in the outputs, like cross-entropy and squared error. It ignores terms of the
    loss that bypass the outputs, such as a weight penalty.

    Takes the arguments of [`CurvatureOperator`][steppe.curvature.CurvatureOperator], and:

    Args:
        outputs: the module whose outputs are $z$: the model (default) or one inside it. It must
            return a tensor. The loss may call it several times.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batches: Iterable[Any],
        params: Iterable[Tensor] | None = None,
        *,
        outputs: nn.Module | None = None,
        keep_graphs: bool | None = None,
        check: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(
            model,
            loss_fn,
            batches,
            params,
            keep_graphs=keep_graphs,
            check=check,
            progress=progress,
        )
        self._outputs = model if outputs is None else outputs

    def _differentiate(self, batch: Any, number: int) -> Differentiated:
        seen: list[Tensor] = []
        given: list[Tensor] = []

        def see(module: nn.Module, args: object, output: object) -> Tensor:
            if not isinstance(output, Tensor):
                raise UserError(
                    f"{type(module).__name__} returns {type(output).__name__}, not a tensor: pass "
                    "the module whose outputs the loss uses as outputs="
                )
            seen.append(output)
            given.append(output.clone())  # later code may change it in place
            return given[-1]

        with self._outputs.register_forward_hook(see):
            loss = self._loss(batch, number)
        if not seen:
            raise UserError(
                f"the loss does not call {type(self._outputs).__name__}: pass the module whose "
                "outputs the loss uses as outputs="
            )
        _check_apart(self._outputs, seen, given)

        def gradient() -> Parts:
            return gradient_parts(loss, self.params, keep=True)

        nothing: Parts = [None] * len(self.params)
        z = [output for output in seen if output.requires_grad]
        if not z:
            return Differentiated(loss.detach(), gradient, lambda tangent: nothing)
        _, curvature = derivatives(loss, z)
        # J v is the derivative of (J' u) . v, which is linear in u, with respect to u.
        u = [torch.zeros_like(output, requires_grad=True) for output in z]
        pulled: Parts = torch.autograd.grad(z, self.params, u, create_graph=True, allow_unused=True)
        live = [(i, g) for i, g in enumerate(pulled) if g is not None]

        def product(tangent: Sequence[Tensor]) -> Parts:
            if not live:
                return nothing
            pushed: Sequence[Tensor] = torch.autograd.grad(
                [g for _, g in live],
                u,
                [tangent[i] for i, _ in live],
                retain_graph=True,
                materialize_grads=True,
            )
            bent = [
                torch.zeros_like(output) if part is None else part
                for output, part in zip(z, curvature(pushed), strict=True)
            ]
            return torch.autograd.grad(z, self.params, bent, retain_graph=True, allow_unused=True)

        return Differentiated(loss.detach(), gradient, product)


def _check_apart(module: nn.Module, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Raise an error if outputs are fed back into their module: they would count twice."""
    z = [output for output in outputs if output.requires_grad]
    copies = [copy for copy in given if copy.requires_grad]
    if not z:
        return
    into: Parts = torch.autograd.grad(
        z, copies, [torch.zeros_like(output) for output in z], retain_graph=True, allow_unused=True
    )
    if any(part is not None for part in into):
        raise UserError(
            f"outputs of {type(module).__name__} are fed back into it, so they are not independent "
            "variables: pass an outer module as outputs="
        )
