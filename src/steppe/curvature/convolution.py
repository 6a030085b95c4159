r"""Convolutions that stay fast when differentiated twice.

PyTorch computes one term of a convolution's second derivative as a convolution with an image as its
kernel, one group at a time, which is very slow for depthwise convolutions. This is avoidable:
$\langle g, C(x, w) \rangle$ is linear in the images $x$, the kernel $w$ and the gradient $g$ of the
output. Its derivatives with respect to these are the convolution and the two parts of its gradient.
Each of the three has a fast kernel, and differentiating one of them leads back to the other two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Geometry(NamedTuple):
    """The arguments of `torch.ops.aten.convolution` after the tensors."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


class _Convolution(torch.autograd.Function):
    r"""The derivative of $\langle g, C(x, w) \rangle$ with respect to $x$, $w$ or $g$.

    The derivative with respect to $g$ is the convolution itself. The expression is linear in each
    argument, so the one to differentiate with respect to is passed as None: only its shape matters.
    """

    @staticmethod
    def forward(
        ctx: Any, geometry: Geometry, by: int, shape: Sequence[int], *arguments: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(*arguments)
        ctx.geometry, ctx.by = geometry, by
        x, w, g = arguments
        if g is None:
            y: Tensor = torch.ops.aten.convolution(x, w, None, *geometry)
            return y
        missing = g.new_empty(1).expand(shape)
        x, w = missing if x is None else x, missing if w is None else w
        mask = (by == 0, by == 1, False)
        found = torch.ops.aten.convolution_backward(g, x, w, None, *geometry, mask)
        return cast(Tensor, found[by])

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Tensor | None, ...]:
        arguments = list(ctx.saved_tensors)
        arguments[ctx.by] = tangent
        needed = enumerate(ctx.needs_input_grad[3:])
        found = (
            _derivative(ctx.geometry, by, arguments) if wanted else None for by, wanted in needed
        )
        return None, None, None, *found


def _derivative(geometry: Geometry, by: int, arguments: Sequence[Tensor]) -> Tensor:
    others = [None if i == by else argument for i, argument in enumerate(arguments)]
    return cast(Tensor, _Convolution.apply(geometry, by, arguments[by].shape, *others))


class FastConvolutions(TorchFunctionMode):
    """A context that replaces torch's convolutions with those of this module."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace supported convolutions; call everything else unchanged."""
        kwargs = kwargs or {}
        found = None
        # torch.func's transforms support only torch's own convolutions.
        if func in _CONVOLUTIONS and not torch._C._are_functorch_transforms_active():
            dims, names = _CONVOLUTIONS[func]
            found = _convolved(dims, names, dict(zip(names, args, strict=False)) | dict(kwargs))
        return func(*args, **kwargs) if found is None else found


_PLAIN = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_PLAIN[:5], "output_padding", "groups", "dilation")
_CONVOLUTIONS = {
    torch.conv1d: (1, _PLAIN),
    torch.conv2d: (2, _PLAIN),
    torch.conv3d: (3, _PLAIN),
    torch.conv_transpose1d: (1, _TRANSPOSED),
    torch.conv_transpose2d: (2, _TRANSPOSED),
    torch.conv_transpose3d: (3, _TRANSPOSED),
}
"""The number of spatial dimensions, and the positional parameters."""


def _convolved(dims: int, names: Sequence[str], given: Mapping[str, Any]) -> Tensor | None:
    """The convolution; None for unbatched images and unsupported calls."""
    x, w, bias = given["input"], given["weight"], given.get("bias")
    padding = 0 if given.get("padding", 0) == "valid" else given.get("padding", 0)
    # "same" may pad one side more than the other.
    if x.ndim != dims + 2 or isinstance(padding, str) or not given.keys() <= set(names):
        return None
    geometry = Geometry(
        _each(dims, given.get("stride", 1)),
        _each(dims, padding),
        _each(dims, given.get("dilation", 1)),
        names is _TRANSPOSED,
        _each(dims, given.get("output_padding", 0)),
        given.get("groups", 1),
    )
    y: Tensor = _Convolution.apply(geometry, 2, (), x, w, None)
    return y if bias is None else y + bias.reshape(-1, *[1] * dims)


def _each(dims: int, value: int | Sequence[int]) -> Sequence[int]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)
