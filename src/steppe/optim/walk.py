"""The walk of the weights in one step: they visit a few points and return exactly.

A method (fad.py, sam.py, ...) is a short list of `Visit`s. Each visit takes one gradient and
decides what to do with it: move the weights to the next point, fold the gradient into what the
method holds, or, at the last visit, return the direction for the base optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import vectors
from .vectors import Vector, are_ours

CPU_BLOCK = 2**20
"""Bytes after which a span ends on a CPU. An accelerator is faster with few large launches."""

Coefficients = Mapping[str, float]
"""One group's numbers for the stages, by name."""

Held = tuple[Vector, ...]
"""What a method keeps from one visit to the next."""


@dataclass(frozen=True)
class Visit:
    """One forward and backward pass, and what becomes of its gradient.

    Attributes:
        then: ``then(walk, gradient, *held)`` returns what to hold until the next visit, or, at the
            last visit, a tuple of the direction alone. It may overwrite the gradient.
        loss: the loss that the closure must differentiate. Any name but ``"main"`` is passed to the
            closure, for methods whose ascent loss differs from their descent loss.
    """

    then: Callable[..., Held]
    loss: str = "main"


@dataclass(frozen=True)
class Span:
    """Neighbouring tensors that share their coefficients: a parameter group, or a part of one."""

    tensors: slice
    coefficients: Coefficients


PLAIN: tuple[Visit, ...] = (Visit(lambda walk, g: (g,)),)
"""A step without flatness: the direction is the gradient."""


class Layout:
    """Divides parameters into spans with equal coefficients, which on a CPU fit the cache.

    Recomputed only when parameters or coefficients change.
    """

    def __init__(self) -> None:
        self._key: tuple[float, Sequence[Coefficients]] = (0.0, ())
        self._params: list[Any] = []
        self._spans: list[Span] = []

    def spans(
        self, groups: Sequence[Mapping[str, Any]], coefficients: Sequence[Coefficients], params: Any
    ) -> list[Span]:
        limit = CPU_BLOCK if params[0].device.type == "cpu" else math.inf
        if self._key != (limit, coefficients) or vectors.differ(self._params, params):
            owner = {p: c for g, c in zip(groups, coefficients, strict=True) for p in g["params"]}
            self._spans = _divided(params, [owner[p] for p in params], limit)
            self._key, self._params = (limit, coefficients), params
        return self._spans


def _divided(params: list[Any], owners: list[Coefficients], limit: float) -> list[Span]:
    spans: list[Span] = []
    filled = math.inf
    for i, (p, coefficients) in enumerate(zip(params, owners, strict=True)):
        if filled < limit and spans[-1].coefficients == coefficients:
            start = spans.pop().tensors.start
        else:
            start, filled = i, 0
        spans.append(Span(slice(start, i + 1), coefficients))
        filled += p.nbytes
    return spans


@dataclass(eq=False)
class Walk:
    """The weights of one step, and the operations that methods are written in.

    Attributes:
        params: the parameters that got a gradient, in group order.
        theta: their local tensors; `params` itself if nothing is sharded.
        spans: the parts of the list that operations process one after the other.
        xi: the small constant of Algorithm 1.
        memory: what methods keep between steps, by parameter (see `remembered`).
        spare: memory for the backup, or None to allocate it.
        adopt: whether to hold a gradient without copying it, if nothing else refers to it.
        groups: process groups over which squared norms add up (sharded parameters).
        backup: the weights at the start of the step, once they have moved.
    """

    params: list[Any]
    theta: Vector
    spans: list[Span]
    xi: float | Tensor
    memory: dict[Tensor, dict[str, Tensor]]
    spare: Vector | None
    adopt: bool
    groups: Sequence[dist.ProcessGroup]
    backup: Vector | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        half = any(t.dtype == torch.float16 for t in self.theta)
        self._cap = torch.finfo(torch.float16).max if half else math.inf
        self._saved = 0  # how many tensors the backup holds

    def remembered(self, name: str) -> Vector:
        """A vector that persists between steps, such as an average of gradients; initially zero.

        Write to it in place. It is part of the optimizer's `state_dict`.
        """
        found = [self.memory.setdefault(p, {}) for p in self.params]
        return [
            memory[name] if name in memory else memory.setdefault(name, torch.zeros_like(t))
            for memory, t in zip(found, self.theta, strict=True)
        ]

    def norm(self, d: Vector) -> Tensor | float:
        """Global norm of `d` over all groups and shards.

        A Python number on a CPU, so that additions can fuse their factor. On an accelerator, a
        tensor, because reading it would stall the host.
        """
        value = vectors.norm(d)
        if self.groups:
            value = self._total(value.square()).sqrt()
        return _readable(value)

    def dot(self, xs: Vector, ys: Vector, *, scratch: Vector) -> Tensor | float:
        """Inner product over all groups and shards; a number or a tensor, like `norm`."""
        return _readable(self._total(vectors.dot(xs, ys, scratch=scratch)))

    def _total(self, value: Tensor) -> Tensor:
        for group in self.groups:
            dist.all_reduce(value, group=group)
        return value

    def climb(self, d: Vector, rho: str, *, norm: Any = None, spend: bool = True) -> None:
        """Move from the current point: ``theta += rho * d / (|d| + xi)``.

        Args:
            d: the direction.
            rho: the name of the coefficient with the radius.
            norm: the length to divide by instead of ``|d|``.
            spend: whether `d` may be overwritten.
        """
        self._move(d, rho, self.norm(d) if norm is None else norm, spend=spend, home=False)

    def jump(self, d: Vector, rho: str) -> None:
        """Move relative to the start, ``theta = start + rho * d / (|d| + xi)``; overwrites `d`."""
        self._move(d, rho, self.norm(d), spend=True, home=True)

    def _move(self, d: Vector, rho: str, norm: Any, *, spend: bool, home: bool) -> None:
        leaving = self.backup is None
        if leaving:
            self.backup = vectors.like(self.theta) if self.spare is None else self.spare
            self.spare = None
        assert self.backup is not None
        for span in self.spans:  # one at a time, while its tensors are in the cache
            part = span.tensors
            theta = self.theta[part]
            if leaving:
                torch._foreach_copy_(self.backup[part], theta)
                self._saved = part.stop
            elif home:
                torch._foreach_copy_(theta, self.backup[part])
            scale = _per_unit(span.coefficients[rho], norm, self.xi, self._cap)
            vectors.add_(theta, d[part], scale, spend=spend)

    def restore(self) -> None:
        """Restore the weights at the start of the step, bit for bit."""
        if self.backup is not None:
            # The first move may have been interrupted: only saved tensors were moved.
            torch._foreach_copy_(self.theta[: self._saved], self.backup[: self._saved])

    def hold(self, g: Vector) -> Vector:
        """Keep a gradient beyond its pass, without a copy if nothing else refers to it."""
        traced = torch.compiler.is_compiling()  # reference counts are meaningless there
        if self.adopt and not traced and are_ours(g, self.params):
            return g
        kept = vectors.like(g)
        torch._foreach_copy_(kept, g)
        return kept

    def add_(self, xs: Vector, ys: Vector, coefficient: str, sign: float = 1.0) -> Vector:
        """``xs += sign * coefficient * ys``, group by group."""
        for span in self.spans:
            if (c := span.coefficients[coefficient]) != 0:
                vectors.add_(xs[span.tensors], ys[span.tensors], sign * c)
        return xs

    def lerp_(self, xs: Vector, ys: Vector, coefficient: str) -> Vector:
        """``xs += coefficient * (ys - xs)``; exactly `ys` at 1 and exactly `xs` at 0."""
        for span in self.spans:
            c = span.coefficients[coefficient]
            torch._foreach_lerp_(xs[span.tensors], ys[span.tensors], c)
        return xs

    def scale_(self, xs: Vector, coefficient: str) -> Vector:
        """``xs *= coefficient``, group by group."""
        for span in self.spans:
            torch._foreach_mul_(xs[span.tensors], span.coefficients[coefficient])
        return xs

    def grow(self, params: list[Any], theta: Vector, spans: list[Span], held: Held) -> Held:
        """Add parameters that get their first gradient of this step in a later pass.

        They have not moved, and the held vectors are zero there.
        """
        old = {id(p): i for i, p in enumerate(self.params)}

        def extended(known: Vector, new: Callable[[Tensor], Tensor]) -> Vector:
            pairs = zip(params, theta, strict=True)
            return [known[old[id(p)]] if id(p) in old else new(t) for p, t in pairs]

        held = tuple(extended(vector, torch.zeros_like) for vector in held)
        backup = None if self.backup is None else extended(self.backup, torch.clone)
        self.spare = None  # too short now
        self.params, self.spans = params, spans
        # Together and last, so that an interrupt finds a backup that matches theta.
        self.theta, self.backup, self._saved = theta, backup, len(backup or ())
        return held


def _readable(value: Tensor) -> Tensor | float:
    on_host = value.device.type == "cpu" and not torch.compiler.is_compiling()
    return value.item() if on_host else value


def _per_unit(rho: float, norm: Any, xi: Any, cap: float) -> Any:
    """``rho / (norm + xi)``, at most `cap`, and NaN if the norm is not finite.

    The NaN makes an overflow in this pass visible in the direction; without it, an infinite norm
    gives a step of length zero. The cap keeps the factor within fp16 for tiny gradients.
    """
    scale = rho / (norm + xi) + 0.0 * norm
    if cap == math.inf:
        return scale
    return scale.clamp(max=cap) if isinstance(scale, Tensor) else cap if scale > cap else scale
