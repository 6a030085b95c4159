r"""Convolutions that stay fast when differentiated twice.

PyTorch computes one term of a convolution's second derivative as a convolution with an image as its
kernel, one group at a time, which is very slow for depthwise convolutions. This is avoidable:
$\langle g, C(x, w) \rangle$ is linear in the images $x$, the kernel $w$ and the gradient $g$ of the
output. Its derivatives with respect to these are the convolution and the two parts of its gradient.
Each of the three has a fast kernel, and differentiating one of them leads back to the other two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Geometry(NamedTuple):
    """The arguments of `torch.ops.aten.convolution` after the tensors."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def is_pointwise(self, w: Tensor) -> bool:
        ones, simple = {*w.shape[2:], *self.stride} == {1}, not any(self.padding)
        return ones and simple and not self.transposed and self.groups == 1


Kernel = Callable[..., Tensor]
"""Computes a derivative of the form below: `kernel(by, shape, x, w, g)`."""


class _Convolution(torch.autograd.Function):
    r"""The derivative of $\langle g, C(x, w) \rangle$ with respect to $x$, $w$ or $g$.

    The derivative with respect to $g$ is the convolution itself. The expression is linear in each
    argument, so the one to differentiate with respect to is passed as None: only its shape matters.
    """

    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, by: int, shape: Sequence[int], *arguments: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(*arguments)
        ctx.kernel, ctx.by = kernel, by
        return kernel(by, shape, *arguments)

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Tensor | None, ...]:
        arguments = list(ctx.saved_tensors)
        arguments[ctx.by] = tangent
        needed = enumerate(ctx.needs_input_grad[3:])
        found = (
            _derivative(ctx.kernel, by, arguments) if wanted else None for by, wanted in needed
        )
        return None, None, None, *found


def _derivative(kernel: Kernel, by: int, arguments: Sequence[Tensor]) -> Tensor:
    others = [None if i == by else argument for i, argument in enumerate(arguments)]
    shape = arguments[by].shape
    if not torch.is_grad_enabled():  # nothing differentiates this, and a graph costs host time
        return kernel(by, shape, *others)
    return cast(Tensor, _Convolution.apply(kernel, by, shape, *others))


def _general(geometry: Geometry, by: int, shape: Sequence[int], x: Any, w: Any, g: Any) -> Tensor:
    if by == 2:
        return cast(Tensor, torch.ops.aten.convolution(x, w, None, *geometry))
    missing = g.new_empty(1).expand(shape)
    x, w = missing if x is None else x, missing if w is None else w
    mask = (by == 0, by == 1, False)
    found = torch.ops.aten.convolution_backward(g, x, w, None, *geometry, mask)
    return cast(Tensor, found[by])


def _pointwise(by: int, shape: Sequence[int], x: Any, w: Any, g: Any) -> Tensor:
    """A convolution of single pixels: a matrix product per image, which is faster on GPUs."""
    if by == 1:
        found = (g.flatten(2) @ x.flatten(2).mT).sum(0).view(shape)
    else:
        kernel, images = (w.flatten(1), x) if by == 2 else (w.flatten(1).T, g)
        # Unlike `matmul`, this does not transpose the images first.
        found = torch.bmm(kernel.expand(len(images), -1, -1), images.flatten(2))
        found = found.view(*found.shape[:2], *images.shape[2:])
    return cast(Tensor, found)


class FastConvolutions(TorchFunctionMode):
    """A context that replaces torch's convolutions with those of this module.

    It also folds a batch norm with fixed statistics into the convolution before it, which leaves
    fewer passes over images in each derivative.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: _Made | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace supported calls; call everything else unchanged."""
        kwargs = kwargs or {}
        found = None
        if func is F.batch_norm and self._last is not None:
            found = _folded(self._last, *args, **kwargs)
            self._last = None
        # torch.func's transforms support only torch's own convolutions.
        elif func in _CONVOLUTIONS and not torch._C._are_functorch_transforms_active():
            dims, names = _CONVOLUTIONS[func]
            self._last = None  # frees its memory first
            self._last = _convolved(
                dims, names, dict(zip(names, args, strict=False)) | dict(kwargs)
            )
            found = None if self._last is None else self._last.y
        return func(*args, **kwargs) if found is None else found


class _Made(NamedTuple):
    """A convolution and what it was made of."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    kernel: Kernel
    y: Tensor
    version: int
    """Of `y` when it was made."""


def _make(x: Tensor, w: Tensor, bias: Tensor | None, kernel: Kernel) -> _Made:
    y: Tensor = _Convolution.apply(kernel, 2, (), x, w, None)
    if bias is not None:
        y = y + bias.reshape(-1, *[1] * (x.ndim - 2))
    return _Made(x, w, bias, kernel, y, y._version)


def _folded(
    made: _Made,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """The batch norm of a convolution as one convolution; None if that is impossible or slower."""
    x, w, shift, kernel, y, version = made
    if (
        input is not y
        or y._version != version
        or training
        or running_mean is None
        or running_var is None
        or running_var.dtype != w.dtype
        or w.shape[0] != y.shape[1]  # transposed
        or w.numel() > y.numel()  # scaling the kernel would take longer than scaling the images
    ):
        return None
    norm = (running_mean, running_var, weight, bias, eps)
    return _make(x, *normalized(w, shift, *norm, dims=w.ndim - 1), kernel).y


def normalized(
    w: Any, bias: Any, mean: Any, var: Any, gamma: Any, beta: Any, eps: float, *, dims: int = 3
) -> tuple[Any, Any]:
    r"""Return the weight and bias of a convolution followed by a batch norm with fixed statistics.

    $\gamma\,(C(x, w) + c - \mu) / \sigma + \beta = C(x, s w) + \beta + s\,(c - \mu)$ with
    $s = \gamma / \sigma$: the same function of all parameters.

    Args:
        w: the weight; like the other values, a tensor or a node of a graph.
        bias: $c$, or None.
        mean: $\mu$.
        var: $\sigma^2$, to which `eps` is added.
        gamma: the norm's weight, or None.
        beta: the norm's bias, or None.
        eps: added to the variance.
        dims: the dimensions of the weight after the first.
    """
    scale = (var + eps).rsqrt()
    if gamma is not None:
        scale = scale * gamma
    shift = -mean * scale if bias is None else (bias - mean) * scale
    if beta is not None:
        shift = shift + beta
    return w * scale.reshape(-1, *[1] * dims), shift


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


def _convolved(dims: int, names: Sequence[str], given: Mapping[str, Any]) -> _Made | None:
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
    is_product = x.is_cuda and geometry.is_pointwise(w)
    return _make(x, w, bias, _pointwise if is_product else partial(_general, geometry))


def _each(dims: int, value: int | Sequence[int]) -> Sequence[int]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)
