"""Losses that an optimizer asks for by name, besides the algorithm's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from steppe.algorithms import Algorithm, Losses
from steppe.averaging import unfrozen
from steppe.errors import UserError
from steppe.optim import FlatnessOptimizer, distributed
from steppe.optim.disam import DomainInspired
from steppe.optim.still import record_randomness

Term = Callable[[Any, Losses], Tensor]
"""Maps a part of the batch and its losses to the scalar to differentiate."""


def domain(name: str) -> int | None:
    """The number of the domain whose loss is asked for, such as ``domain:0``.

    Examples:
        >>> domain("domain:2"), domain("ascent")
        (2, None)
    """
    kind, _, number = name.partition(":")
    return int(number) if kind == "domain" and number.isdecimal() else None


def term(
    name: str,
    optimizer: Optimizer,
    module: nn.Module,
    prepared: Sequence[Any],
    evaluate: Callable[[nn.Module, int], Losses],
) -> Term:
    """How to compute a loss of a whole batch, part by part.

    Args:
        name: the loss.
        optimizer: the one that asks for it.
        module: the algorithm, possibly inside DDP.
        prepared: the parts of the batch.
        evaluate: returns the losses of an algorithm or its DDP module on the part of this number.
    """
    if name == "main":
        return lambda part, losses: losses.total
    if name != "ascent":
        raise UserError(
            f"{type(optimizer).__name__} asks for the loss {name!r}, but steppe's training has "
            "only main, ascent, and domain:0, domain:1, ..."
        )
    if not isinstance(optimizer, DomainInspired):
        raise UserError(
            f"optimizer.ascent={name}: {type(optimizer).__name__} has no lam, the weight of the "
            "variance. Choose disam, disam-gsam, disam-sagm or disam-fad"
        )
    return _ascent(optimizer, module, prepared, evaluate)


def _ascent(
    optimizer: DomainInspired,
    module: nn.Module,
    prepared: Sequence[Any],
    evaluate: Callable[[nn.Module, int], Losses],
) -> Term:
    r"""DISAM's ascent loss, $L - \lambda \operatorname{Var}_i(L_i)$, over the whole batch.

    $L_i$ is the mean cross-entropy of domain $i$ over all parts and processes, so the variance does
    not split into parts. Its gradient does:
    $\nabla \operatorname{Var}_i(L_i) = \frac{2}{M} \sum_i (L_i - \bar L)\, \nabla L_i$. So each
    part subtracts its own domain losses, weighted by factors of the whole batch.
    """
    if not optimizer.lam:
        return lambda part, losses: losses.total
    algorithm = algorithm_of(module)
    reducing = reduced(optimizer, module)

    def factors(risks: Tensor) -> Tensor:
        _, (risks,) = distributed.average([risks], {risks: risks}, reducing)
        return 2 * optimizer.lam / len(risks) * (risks - risks.mean())

    def risks_of(part: Any, losses: Losses) -> Tensor:
        # Without the algorithm's logits, this is a second forward pass of the same step.
        with nullcontext() if losses.logits is not None else _unchanged(algorithm):
            return algorithm.risks(part, losses.logits)

    known: Tensor | None = None
    if len(prepared) > 1:
        with torch.no_grad(), _unchanged(algorithm):
            every = [risks_of(part, evaluate(algorithm, i)) for i, part in enumerate(prepared)]
            known = factors(torch.stack(every).mean(0))

    def of_part(part: Any, losses: Losses) -> Tensor:
        risks = risks_of(part, losses)
        weights = factors(risks.detach().clone()) if known is None else known
        return losses.total - (weights * risks).sum()

    return of_part


def algorithm_of(module: nn.Module) -> Algorithm:
    found = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(found, Algorithm)
    return found


def reduced(optimizer: Optimizer, module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules over whose processes to average: none if each process has its own ascent."""
    local = isinstance(optimizer, FlatnessOptimizer) and optimizer.perturbation == "local"
    return () if local else (module,)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Leave batch-norm statistics and random states as they were, for an additional forward."""
    rewind = record_randomness(next(module.parameters()).device, ())
    norms = unfrozen(module)
    buffers = [dict(norm._buffers) for norm in norms]
    # Replaced, not written back: backward needs the tensors that forward has used.
    for norm in norms:
        norm._buffers.update({n: b if b is None else b.clone() for n, b in norm._buffers.items()})
    try:
        yield
    finally:
        rewind()
        for norm, before in zip(norms, buffers, strict=True):
            norm._buffers.update(before)
