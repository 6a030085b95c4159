r"""Frozen batch norm, folded into the convolution before it.

With fixed statistics, batch norm is a linear map of each channel:
$\gamma\,(\mathrm{conv}(x, w) + c - \mu)/\sigma + \beta = \mathrm{conv}(x, s w) + b$ with
$s = \gamma/\sigma$ and $b = \beta + s\,(c - \mu)$, where $c$ is the convolution's own bias. The
folded weight is computed from the parameters in every pass, so each parameter gets the gradient it
had, and neither pass reads or writes the activation between convolution and norm.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

_NORM = inspect.signature(F.batch_norm)
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@cache  # dynamo keeps code per backend: the runs of one process share theirs
def backend(**options: Any) -> Backend:
    """Return a `torch.compile` backend: inductor with `options`, after folding.

    It sees the graph that dynamo traced, so any library's modules will do. A graph that is not
    differentiated, as in evaluation, stays as it is.
    """

    def compile(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        if torch.is_grad_enabled():
            fold(module)
        compiled: Callable[..., Any] = compile_fx(module, list(examples), config_patches=options)
        return compiled

    return compile


def fold(module: fx.GraphModule) -> int:
    """Fold every frozen batch norm that alone reads a convolution; return how many.

    A norm that uses the batch's statistics stays, and so does one whose input has another reader.
    """
    folded = 0
    tracer = fx.proxy.GraphAppendingTracer(module.graph)
    for norm in list(module.graph.nodes):
        if norm.target is not F.batch_norm:
            continue
        given = _arguments(norm)
        convolution = given["input"]
        if (
            convolution.target is not torch.conv2d
            or len(convolution.users) > 1
            or given["training"]
        ):
            continue
        with module.graph.inserting_before(norm):
            nodes = (given, _operands(convolution))
            found = fx.node.map_arg(nodes, lambda node: fx.Proxy(node, tracer))
            norm.replace_all_uses_with(_folded(*found).node)
        module.graph.erase_node(norm)
        module.graph.erase_node(convolution)
        folded += 1
    if folded:
        module.recompile()
    return folded


def _folded(norm: dict[str, Any], convolution: dict[str, Any]) -> Any:
    """The norm's output, from tensors or from nodes of a graph."""
    scale = torch.rsqrt(norm["running_var"] + norm["eps"])
    if norm["weight"] is not None:
        scale = scale * norm["weight"]
    centre = norm["running_mean"]
    if convolution["bias"] is not None:
        centre = centre - convolution["bias"]
    shift = -centre * scale
    if norm["bias"] is not None:
        shift = shift + norm["bias"]
    weight = convolution["weight"] * scale[:, None, None, None]
    return torch.conv2d(**{**convolution, "weight": weight, "bias": shift})


def _arguments(norm: fx.Node) -> dict[str, Any]:
    bound = _NORM.bind(*norm.args, **norm.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _operands(convolution: fx.Node) -> dict[str, Any]:
    given = dict(zip(_CONVOLUTION, convolution.args, strict=False))
    return {"bias": None, **given, **convolution.kwargs}
