"""The walk of the weights in one step: they visit a few points and return exactly.

A method (fad.py, sam.py, ...) is a short list of `Visit`s. Each visit takes one gradient and
decides what to do with it: move the weights to the next point, fold the gradient into what the
method holds, or, at the last visit, return the direction for the base optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from . import noise, vectors
from .distributed import local
from .vectors import Vector, are_ours

Coefficients = Mapping[str, float]
"""One group's numbers for the stages, by name."""

Held = tuple[Vector, ...]
"""What a method keeps from one visit to the next."""

MOMENTA = ("momentum_buffer", "exp_avg")
"""Where torch's optimizers keep their average of gradients."""


@dataclass(frozen=True)
class Visit:
    """One forward and backward pass, and what becomes of its gradient.

    Attributes:
        then: ``then(walk, gradient, *held)`` returns what to hold until the next visit, or, at the
            last visit, the direction, followed by what the optimizer's `after` needs. It may
            overwrite the gradient.
        loss: the loss that the closure must differentiate. Any name but ``"main"`` is passed to the
            closure, for methods whose ascent loss differs from their descent loss.
        before: ``before(walk)`` moves the weights before the pass; only at the first visit.
    """

    then: Callable[..., Held]
    loss: str = "main"
    before: Callable[[Walk], None] | None = None


@dataclass(frozen=True)
class Span:
    """Neighboring tensors that share their coefficients: a parameter group, or a part of one."""

    tensors: slice
    coefficients: Coefficients


PLAIN: tuple[Visit, ...] = (Visit(lambda walk, g: (g,)),)
"""A step without flatness: the direction is the gradient."""


class Layout:
    """Divides parameters into spans with equal coefficients, which on a CPU fit the cache.

    Recomputed only when parameters or coefficients change.
    """

    def __init__(self) -> None:
        self._key: tuple[float, Sequence[Coefficients], object] = (0.0, (), None)
        self._params: list[Any] = []
        self._spans: list[Span] = []

    def spans(
        self,
        groups: Sequence[Mapping[str, Any]],
        coefficients: Sequence[Coefficients],
        only: frozenset[Tensor] | None,
        params: Any,
    ) -> list[Span]:
        """The spans of `params`; those outside `only` have a radius of zero."""
        limit = vectors.CPU_BLOCK if params[0].device.type == "cpu" else math.inf
        key = (limit, coefficients, only)
        if self._key != key or vectors.differ(self._params, params):
            owner = {
                p: c if only is None or p in only else {**c, "rho": 0.0}
                for g, c in zip(groups, coefficients, strict=True)
                for p in g["params"]
            }
            self._spans = _divided(params, [owner[p] for p in params], limit)
            self._key, self._params = key, params
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
        xi: the small constant of Algorithm 1, scaled like the gradients.
        scale: the loss scale: 1, or that of a GradScaler.
        memory: what methods keep between steps, by parameter (see `remember`).
        state: the base optimizer's state, by parameter.
        seed: what `normal` draws from: the optimizer's seed and its step; None if it never draws.
        spare: memory for the backup, or None to allocate it.
        adopt: whether to hold a gradient without copying it, if nothing else refers to it.
        groups: process groups over which squared norms add up (sharded parameters).
        backup: the weights at the start of the step, where they have moved.
        staged: what `remember` will keep if the base steps, by name and parameter.
        numbers: what a method keeps from one visit to the next besides vectors.
    """

    params: list[Any]
    theta: Vector
    spans: list[Span]
    xi: float | Tensor
    scale: float | Tensor
    memory: Mapping[Tensor, Mapping[str, Tensor]]
    state: Mapping[Tensor, Mapping[str, Any]]
    seed: tuple[int, int] | None
    spare: Vector | None
    adopt: bool
    groups: Sequence[dist.ProcessGroup]
    backup: list[Any] | None = field(init=False, default=None)
    staged: dict[str, dict[Tensor, Tensor]] = field(init=False, default_factory=dict)
    numbers: list[Tensor | float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        half = any(t.dtype == torch.float16 for t in self.theta)
        self._cap = torch.finfo(torch.float16).max if half else math.inf
        self._saved: dict[int, slice] = {}  # the parts that the backup holds, by their start

    def remember(self, name: str, xs: Vector) -> None:
        """Keep a vector for later steps, such as an average of gradients.

        It counts only if the base takes its step: an overflow or an error leaves what was kept
        before. It is part of the optimizer's `state_dict`, without the loss scale. The walk owns
        `xs` from now on.
        """
        if self._scaled:
            torch._foreach_div_(xs, self.scale)
        self.staged[name] = dict(zip(self.params, xs, strict=True))

    def recall(self, name: str, start: Vector | None = None) -> Vector:
        """What was kept under a name, at the present loss scale; do not write to it.

        Parameters for which nothing was kept have the value of `start`, or zero.
        """
        known = [self.memory.get(p, {}).get(name) for p in self.params]
        kept = [m for m in known if m is not None]
        if self._scaled and kept:
            kept = list(torch._foreach_mul(kept, self.scale))
        values = iter(kept)
        first = self.theta if start is None else start
        missing = torch.zeros_like if start is None else _itself
        return [
            missing(x) if m is None else next(values) for m, x in zip(known, first, strict=True)
        ]

    def averaged(
        self, name: str, g: Vector, new: str | None = None, old: str | None = None
    ) -> Iterator[tuple[Span, Vector]]:
        """What was kept under a name, averaged with `g`; `g` itself where nothing was kept.

        Yields span by span, for what follows while a span's tensors are in the cache. Pass the name
        of the coefficient that weights the new value or of the one that weights the old value.
        """
        kept = self.recall(name, start=g)
        for span in self.spans:
            part = span.tensors
            if new is not None:
                mean = torch._foreach_lerp(kept[part], g[part], span.coefficients[new])
            else:
                assert old is not None
                mean = torch._foreach_lerp(g[part], kept[part], span.coefficients[old])
            yield span, list(mean)

    def known(self, name: str) -> list[bool]:
        """For each parameter, whether anything was kept under a name."""
        return [name in self.memory.get(p, ()) for p in self.params]

    def momentum(self) -> Vector:
        """The base's average of gradients, which has no loss scale; zero before its first step."""
        states = [self.state.get(p, {}) for p in self.params]
        found = [next((s[key] for key in MOMENTA if s.get(key) is not None), None) for s in states]
        kept = dict.fromkeys(key for s in states for key in s)
        if kept and not any(key in kept for key in MOMENTA):
            raise RuntimeError(
                f"the base optimizer's state has neither {' nor '.join(MOMENTA)} (it has "
                f"{', '.join(kept)}): use SGD with momentum, or Adam"
            )
        return [
            torch.zeros_like(t) if v is None else local(v)
            for v, t in zip(found, self.theta, strict=True)
        ]

    @_disable_dynamo
    def normal(self) -> Vector:
        """Standard normal noise; it repeats with the optimizer's seed and step.

        Shards draw their own; copies of a weight on several processes draw the same.
        """
        if self.seed is None:
            raise TypeError("a method that draws noise needs draws = True in its class")
        place = (*self.seed, *noise.ranks(self.groups))
        generator = noise.generator(self.theta[0].device, *place)
        return [torch.empty_like(t).normal_(generator=generator) for t in self.theta]

    @property
    def _scaled(self) -> bool:
        return isinstance(self.scale, Tensor) or self.scale != 1.0

    def norm(self, d: Vector, over: str | None = None) -> Tensor | float:
        """Global norm of `d` over all groups and shards.

        A Python number on a CPU, so that additions can fuse their factor. On an accelerator, a
        tensor, because reading it would stall the host.

        Args:
            d: the vector.
            over: only where the coefficient of this name is not zero.
        """
        if over is not None and any(s.coefficients[over] == 0 for s in self.spans):
            d = [x for s in self.spans if s.coefficients[over] != 0 for x in d[s.tensors]]
            if not d:
                return 0.0
        return self._length(vectors.norm(d))

    def joined(self, lengths: list[Tensor]) -> Tensor | float:
        """The norm of a vector, given its parts' `vectors.lengths`; 0 if there are none."""
        return self._length(torch.linalg.vector_norm(torch.cat(lengths))) if lengths else 0.0

    def _length(self, norm: Tensor) -> Tensor | float:
        """The norm over all shards, given this process's."""
        return _readable(self.total(norm.square()).sqrt() if self.groups else norm)

    def dot(self, xs: Vector, ys: Vector, *, scratch: Vector | None = None) -> Tensor | float:
        """Inner product over all groups and shards; a number or a tensor, like `norm`."""
        return _readable(self.total(vectors.dot(xs, ys, scratch=scratch)))

    def along(self, xs: Vector, ys: Vector) -> Tensor | float:
        """The multiple of `ys` that is the projection of `xs` onto it."""
        inner, norm = vectors.dot_and_norm(xs, ys)
        return _readable(self.total(inner)) / (self._length(norm) + self.xi) ** 2

    def total(self, value: Tensor) -> Tensor:
        """The sum over the processes that hold shards."""
        for group in self.groups:
            dist.all_reduce(value, group=group)
        return value

    def climb(
        self,
        d: Vector,
        rho: str,
        *,
        norm: Any = None,
        spend: bool = True,
        less: str | None = None,
        scaled: bool = True,
    ) -> None:
        """Move from the current point: ``theta += (rho / (|d| + xi) - less) * d``.

        Where the radius is zero, weights stay and do not count in the norm.

        Args:
            d: the direction.
            rho: the name of the coefficient with the radius.
            norm: the length to divide by instead of ``|d|``.
            spend: whether `d` may be overwritten.
            less: the name of a coefficient to subtract from the factor.
            scaled: whether `d` has the loss scale, as gradients do.
        """
        scale = self.scale if scaled else 1.0
        xi = self.xi if scaled else self.xi / self.scale
        length = self.norm(d, over=rho) if norm is None else norm

        def factor(c: Coefficients) -> Any:
            found = _per_unit(c[rho], length, xi, self._cap) if c[rho] else 0.0
            return found if less is None else found - c[less] / scale

        needs = (rho,) if less is None else (rho, less)
        self._move(d, factor, needs, spend=spend)

    def jump(self, d: Vector, rho: str) -> None:
        """Move relative to the start, ``theta = start + rho * d / (|d| + xi)``; overwrites `d`."""
        length = self.norm(d, over=rho)
        self._move(d, lambda c: _per_unit(c[rho], length, self.xi, self._cap), (rho,), home=True)

    def shift(self, d: Vector, coefficient: str) -> None:
        """Move from the current point by a vector of the method's own: ``theta += c * d``."""
        self._move(d, lambda c: c[coefficient], (coefficient,))

    def _move(
        self,
        d: Vector,
        factor: Callable[[Coefficients], Any],
        needs: Sequence[str],
        spend: bool = True,
        home: bool = False,
    ) -> None:
        """Move where any of the coefficients in `needs` is not zero."""
        if self.backup is None:
            self.backup = [None] * len(self.theta) if self.spare is None else self.spare
            self.spare = None
        # One at a time, while its tensors are in the cache; the norm left the last ones there.
        for span in reversed(self.spans):
            part = span.tensors
            theta = self.theta[part]
            if part.start in self._saved:
                if home:
                    torch._foreach_copy_(theta, self.backup[part])
            elif all(span.coefficients[name] == 0 for name in needs):
                continue
            else:
                if self.backup[part.start] is None:
                    self.backup[part] = vectors.like(theta)
                torch._foreach_copy_(self.backup[part], theta)
                self._saved[part.start] = part
            vectors.add_(theta, d[part], factor(span.coefficients), spend=spend)

    def restore(self) -> None:
        """Restore the weights at the start of the step, bit for bit."""
        for part in self._saved.values():  # others never moved, or a move was interrupted
            assert self.backup is not None
            torch._foreach_copy_(self.theta[part], self.backup[part])

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
        moved = {i for part in self._saved.values() for i in range(part.start, part.stop)}
        backup = None
        if self.backup is not None:
            start = [b if i in moved else self.theta[i].clone() for i, b in enumerate(self.backup)]
            backup = extended(start, torch.clone)
        self.spare = None  # too short now
        self.params, self.spans = params, spans
        # Together and last, so that an interrupt finds a backup that matches theta.
        saved = {} if backup is None else {span.tensors.start: span.tensors for span in spans}
        self.theta, self.backup, self._saved = theta, backup, saved
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
    return scale.clamp(-cap, cap) if isinstance(scale, Tensor) else max(min(scale, cap), -cap)


def _itself(x: Tensor) -> Tensor:
    return x
