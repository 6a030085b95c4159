r"""Convolutions that are as fast when they are differentiated twice.

PyTorch's second derivative of a convolution computes one of its terms as a convolution whose kernel
is an image, and takes groups one at a time, which is very slow for depthwise ones. There is no need
to: $\langle g, C(x, w) \rangle$ is linear in the images, the kernel and the gradient of the output.
Its derivatives by these three are the convolution and the two parts of its gradient; the
derivatives of each are again these three, and all have kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Geometry(NamedTuple):
    """How a convolution moves, as `torch.ops.aten.convolution` wants it."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


class _Convolution(torch.autograd.Function):
    r"""The derivative of $\langle g, C(x, w) \rangle$ by one of $x$, $w$, $g$, given the other two.

    By $g$ it is the convolution itself. Each argument enters linearly, so the one that the
    derivative is taken by is not needed: None stands in its place, and only its shape counts.
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
    """While it is entered, torch's convolutions are those of this module."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Takes over the convolutions it knows how to, and leaves everything else alone."""
        kwargs = kwargs or {}
        found = None
        # Inside torch.func's transforms, torch's own are used: they know how to be transformed.
        if func in _CONVOLUTIONS and not torch._C._are_functorch_transforms_active():
            found = _CONVOLUTIONS[func](*args, **kwargs)
        return func(*args, **kwargs) if found is None else found


Numbers = int | Sequence[int]


def _plain(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers | str = 0,
    dilation: Numbers = 1,
    groups: int = 1,
) -> Tensor | None:
    if isinstance(padding, str):
        if padding != "valid":
            return None  # "same" may pad one side more than the other
        padding = 0
    many = _each(dims, stride), _each(dims, padding), _each(dims, dilation)
    return _with_bias(input, weight, bias, Geometry(*many, False, (0,) * dims, groups))


def _transposed(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
) -> Tensor | None:
    many = _each(dims, stride), _each(dims, padding), _each(dims, dilation)
    geometry = Geometry(*many, True, _each(dims, output_padding), groups)
    return _with_bias(input, weight, bias, geometry)


def _with_bias(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor | None:
    dims = len(geometry.stride)
    if x.ndim != dims + 2:
        return None  # an image without a batch
    y: Tensor = _Convolution.apply(geometry, 2, (), x, w, None)
    return y if bias is None else y + bias.reshape(-1, *[1] * dims)


def _each(dims: int, value: Numbers) -> Sequence[int]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


_CONVOLUTIONS: dict[Callable[..., Tensor], Callable[..., Tensor | None]] = {
    torch.conv1d: partial(_plain, 1),
    torch.conv2d: partial(_plain, 2),
    torch.conv3d: partial(_plain, 3),
    torch.conv_transpose1d: partial(_transposed, 1),
    torch.conv_transpose2d: partial(_transposed, 2),
    torch.conv_transpose3d: partial(_transposed, 3),
}
