"""Frozen batch norm, folded into the convolution before it, in compiled code.

With fixed statistics, batch norm scales and shifts each channel, and so can the weight and bias of
the convolution. They are computed from all parameters in every pass, so each parameter gets the
gradient it had, and no pass reads or writes the activation between convolution and norm.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import fx
from torch.nn import functional as F

from steppe.curvature.convolution import normalized

_NORM = inspect.signature(F.batch_norm)
_FIXED = ("running_mean", "running_var", "weight", "bias", "eps")
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
        compiled = compile_fx(module, list(examples), config_patches=options)
        return cast(Callable[..., Any], compiled)

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
        operands = _operands(convolution)
        fixed = [operands["weight"], operands["bias"], *(given[name] for name in _FIXED)]
        traced: list[Any] = [fx.Proxy(x, tracer) if isinstance(x, fx.Node) else x for x in fixed]
        with module.graph.inserting_before(norm):
            found = normalized(*traced)
            operands |= {"weight": found[0].node, "bias": found[1].node}
            together = module.graph.call_function(torch.conv2d, kwargs=operands)
        norm.replace_all_uses_with(together)
        module.graph.erase_node(norm)
        module.graph.erase_node(convolution)
        folded += 1
    if folded:
        module.recompile()
    return folded


def _arguments(norm: fx.Node) -> dict[str, Any]:
    bound = _NORM.bind(*norm.args, **norm.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _operands(convolution: fx.Node) -> dict[str, Any]:
    given = dict(zip(_CONVOLUTION, convolution.args, strict=False))
    return {"bias": None, **given, **convolution.kwargs}
