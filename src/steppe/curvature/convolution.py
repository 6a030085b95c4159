r"""Convolutions that are as fast when they are differentiated twice.

PyTorch's second derivative of a convolution computes one of its terms as a convolution whose kernel
is an image, and takes groups one at a time, which is very slow for depthwise ones. There is no need
to: a convolution $y = C(x, w)$ is linear in both arguments, and so are the two parts of its
derivative, $D(g, w)$ with respect to $x$ and $W(x, g)$ with respect to $w$. The derivatives of
these three are again these three, and each has a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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


def convolve(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """The convolution C(x, w), without a bias."""
    y: Tensor = _Convolve.apply(x, w, geometry)
    return y


def _input_gradient(g: Tensor, w: Tensor, geometry: Geometry, shape: Sequence[int]) -> Tensor:
    """D(g, w): what C's first argument, of this shape, gets."""
    x: Tensor = _InputGradient.apply(g, w, geometry, shape)
    return x


def _weight_gradient(x: Tensor, g: Tensor, geometry: Geometry, shape: Sequence[int]) -> Tensor:
    """W(x, g): what C's second argument, of this shape, gets."""
    w: Tensor = _WeightGradient.apply(x, g, geometry, shape)
    return w


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry = geometry
        y: Tensor = torch.ops.aten.convolution(x, w, None, *geometry)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), (for_x, for_w, _) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            _input_gradient(g, w, ctx.geometry, x.shape) if for_x else None,
            _weight_gradient(x, g, ctx.geometry, w.shape) if for_w else None,
            None,
        )


class _InputGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, w: Tensor, geometry: Geometry, shape: Sequence[int]) -> Tensor:
        ctx.save_for_backward(g, w)
        ctx.geometry = geometry
        x = g.new_empty(1).expand(shape)  # of which only the shape matters
        found: Tensor = _backward(g, x, w, geometry, (True, False, False))[0]
        return found

    @staticmethod
    def backward(ctx: Any, gx: Tensor) -> tuple[Tensor | None, ...]:
        (g, w), (for_g, for_w, *_) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            convolve(gx, w, ctx.geometry) if for_g else None,
            _weight_gradient(gx, g, ctx.geometry, w.shape) if for_w else None,
            None,
            None,
        )


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, geometry: Geometry, shape: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, g)
        ctx.geometry = geometry
        w = x.new_empty(1).expand(shape)
        found: Tensor = _backward(g, x, w, geometry, (False, True, False))[1]
        return found

    @staticmethod
    def backward(ctx: Any, gw: Tensor) -> tuple[Tensor | None, ...]:
        (x, g), (for_x, for_g, *_) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            _input_gradient(g, gw, ctx.geometry, x.shape) if for_x else None,
            convolve(x, gw, ctx.geometry) if for_g else None,
            None,
            None,
        )


def _backward(
    g: Tensor, x: Tensor, w: Tensor, geometry: Geometry, mask: tuple[bool, bool, bool]
) -> Any:
    return torch.ops.aten.convolution_backward(g, x, w, None, *geometry, mask)


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
    y = convolve(x, w, geometry)
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
