"""GENIE (Cho et al., ICML 2025): steps weighted by how well each weight's gradient generalizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from steppe.options import Option
from steppe.search import Hyperparameter, LogUniform, Uniform

from . import noise
from .distributed import is_sharded, local, shard_groups
from .registry import register_optimizer
from .vectors import CPU_BLOCK, Vector

SMALL = 1e-8
"""Stands in for a variance that is not positive, and is added to squared means."""
LARGEST = 10.0
"""The largest inverse variance."""
DEVICE_BLOCK = 2**26
"""Bytes of weights per block on an accelerator: temporaries take six times as much."""


@register_optimizer(
    "genie",
    citation="Cho et al., One-Step Generalization Ratio Guided Optimization for Domain "
    "Generalization, ICML 2025",
    passes=1,
    # The authors' default and range. Decay has SGD's range though it is decoupled, because learning
    # rates are as large as SGD's (over 1 - momentum).
    lr=Hyperparameter(0.015, LogUniform(-3, -1)),
    base=None,
)
class GENIE(Optimizer):
    r"""Scales a weight's mean gradient by its signal-to-noise ratio, adds noise, and skips weights.

    $$
    \begin{split}
    m_t &= \beta m_{t-1} + (1 - \beta)\, g_t, \qquad v_t = \beta v_{t-1} + (1 - \beta)\, g_t^2 \\
    \hat m &= m_t / z, \qquad \hat v = v_t / z, \qquad z = 1 - \beta^t, \qquad
        r = \frac{(1 - \beta)(2 - z)}{(1 + \beta)\, z} \\
    \sigma^2 &= (\hat v - \hat m^2) / (1 - r), \quad
        10^{-8} \text{ where not positive and at } t = 1 \\
    T &= \tanh(\min(1 / \sigma^2, 10)), \qquad
        u = \hat m \,/\, (1 + r \sigma^2 / (\hat m^2 + 10^{-8})) \\
    n &= \textstyle\sum T \lvert u \rvert / \sum T \quad \text{for each tensor} \\
    \theta_t &= (1 - \eta \lambda)\, \theta_{t-1}
        - \frac{\eta}{1 - p}\, M \odot \left[ T u + (1 - T)\, n\, \nu \right]
    \end{split}
    $$

    with $m_0 = v_0 = 0$, standard normal noise $\nu$, and a mask $M$ that is 0 with probability
    $p$ and 1 otherwise. $r \sigma^2$ estimates the variance of $\hat m$.

    This is the rule of the authors' code (github.com/00ssum/GENIE), which gave the paper's numbers,
    with these differences:

    - `lr` is the step size. Their class has `convergence_rate` for it and ignores `lr`, so that
      schedulers have no effect.
    - The weights are the model's. Theirs live in a copy, which overwrites what others change.
    - At $t = 1$ there is no variance yet. Their code divides rounding errors by zero, and where
      they are positive, the first step is pure noise.
    - Weight decay is decoupled. Their class adds $\lambda \theta$ to $g_t$, which counts as signal
      in $\hat m$; the paper's runs have no decay.
    - Noise and mask come from a generator that `seed`, the tensor's position and its step
      determine, so that all processes agree and a resumed run repeats them. CPUs and GPUs draw
      different numbers.

    The paper's Algorithm 1 is another rule. It multiplies $\hat m / \hat v$ by
    $\tanh(1 / \sigma^2)\, \hat m^2$, draws noise from $N(0, \sigma^2)$, and keeps a step with
    probability $p$.

    The constants make the rule depend on the scale of the loss. Variances below 0.1 give
    $T \approx 1$: no noise.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: the step size $\eta$.
        beta: the decay rate $\beta$ of both averages.
        p: the share of the weights that a step does not change.
        weight_decay: $\lambda$.
        seed: determines noise and mask. Saved with the state.

    Examples:
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> optimizer = GENIE([w], lr=0.1)
        >>> for _ in range(200):
        ...     optimizer.zero_grad()
        ...     loss = (w**2).sum()
        ...     loss.backward()
        ...     _ = optimizer.step()
        >>> bool(loss < 0.01)
        True
    """

    needs_graph = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.015,
        beta: Annotated[float, Option(Uniform(0.9, 0.999), above=0.0, high=1.0)] = 0.95,
        p: Annotated[float, Option(Uniform(0.1, 0.8), high=1.0)] = 0.4,
        *,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        for name, value in {"lr": lr, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise ValueError(f"GENIE: {name} must not be negative, got {value}")
        if not 0 < beta < 1:
            raise ValueError(f"GENIE: beta must be between 0 and 1, got {beta}")
        if not 0 <= p < 1:
            raise ValueError(f"GENIE: p must be in [0, 1), got {p}")
        defaults = {"lr": lr, "beta": beta, "p": p, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: evaluates the model, calls ``backward`` and returns the loss. Optional.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for group in self.param_groups:
            places = {p: i for i, p in enumerate(group["params"], first) if p.grad is not None}
            first += len(group["params"])
            for p in places:
                self._prepare(p)
            for block in _blocks(list(places)):
                self._update(group, {p: places[p] for p in block})
        return loss

    def _prepare(self, p: Any) -> None:
        if p.grad.is_sparse or p.is_complex():
            raise RuntimeError("GENIE supports neither sparse gradients nor complex weights")
        if p.dtype == torch.float16:
            raise RuntimeError(
                "GENIE does not support float16 weights, where 1e-8 is zero: keep the weights in "
                "float32 and use autocast"
            )
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1

    def _update(self, group: dict[str, Any], places: dict[Any, int]) -> None:
        states = [self.state[p] for p in places]
        steps = [int(state["step"]) for state in states]
        shards = shard_groups(list(places))
        theta = [local(p) for p in places]
        g = [local(p.grad) for p in places]
        m = [local(state["exp_avg"]) for state in states]
        v = [local(state["exp_avg_sq"]) for state in states]
        torch._foreach_lerp_(m, g, 1 - group["beta"])
        torch._foreach_mul_(v, group["beta"])
        torch._foreach_addcmul_(v, g, g, value=1 - group["beta"])

        kept, trust = signal(m, v, group["beta"], steps)  # T u and T
        scales = _noise_scales(kept, trust, shards)
        masks: Vector = []
        noisy: Vector = []
        spreads: Vector = []
        noises: Vector = []
        for place, t, k, T, n in zip(places.values(), steps, kept, trust, scales, strict=True):
            draw = noise.generator(k.device, group["seed"], place, t, *noise.ranks(shards))
            if group["p"] > 0:
                masks.append(torch.empty_like(k).uniform_(generator=draw).gt_(group["p"]))
            if not _certain(T):
                noisy.append(k)
                spreads.append(T.sub_(1.0))
                noises.append(torch.empty_like(k).normal_(generator=draw).mul_(n))
        if noisy:
            torch._foreach_addcmul_(noisy, spreads, noises, value=-1.0)
        if masks:
            torch._foreach_mul_(kept, masks)
        lr = float(group["lr"])
        if group["weight_decay"] != 0:
            torch._foreach_mul_(theta, 1 - lr * group["weight_decay"])
        torch._foreach_add_(theta, kept, alpha=-lr / (1 - group["p"]))


def signal(m: Vector, v: Vector, beta: float, steps: list[int]) -> tuple[Vector, Vector]:
    """The gradient's signal, T u, and its share in the direction, T."""
    z = [1 - beta**t for t in steps]
    r = [(1 - beta) * (2 - zt) / ((1 + beta) * zt) for zt in z]
    u = list(torch._foreach_div(m, z))
    square = list(torch._foreach_mul(u, u))
    variance = list(torch._foreach_div(v, z))
    torch._foreach_sub_(variance, square)
    # A single gradient has no variance: then r = 1.
    unbiased = [1 / (1 - rt) if t > 1 else 0.0 for rt, t in zip(r, steps, strict=True)]
    torch._foreach_mul_(variance, unbiased)
    torch._foreach_clamp_min_(variance, 0.0)
    positive = list(torch._foreach_sign(variance))
    torch._foreach_sub_(positive, 1.0)
    torch._foreach_add_(variance, positive, alpha=-SMALL)
    trust = list(torch._foreach_reciprocal(variance))
    torch._foreach_clamp_max_(trust, LARGEST)
    torch._foreach_tanh_(trust)
    torch._foreach_add_(square, SMALL)
    torch._foreach_mul_(variance, r)
    torch._foreach_div_(variance, square)
    torch._foreach_add_(variance, 1.0)
    torch._foreach_div_(u, variance)
    torch._foreach_mul_(u, trust)
    return u, trust


def _noise_scales(kept: Vector, trust: Vector, shards: list[dist.ProcessGroup]) -> Vector:
    """For each tensor, the mean of |u| weighted by T, over all shards."""
    if kept[0].device.type == "cpu":  # where foreach is a loop, and its norm slow
        parts = [*(k.abs().sum() for k in kept), *(T.sum() for T in trust)]
    else:
        parts = [*torch._foreach_norm(kept, 1), *torch._foreach_norm(trust, 1)]
    sums = torch.stack(parts)
    for group in shards:
        dist.all_reduce(sums, group=group)
    above, below = sums.chunk(2)
    return list(above / below)


def _certain(T: Tensor) -> bool:
    """Whether T rounds to 1 throughout, so that noise would be multiplied by zero.

    Drawing is slow on a CPU. On an accelerator it is fast, and this check would stall the host.
    """
    return T.device.type == "cpu" and T.numel() > 0 and bool(T.amin() == 1)


def _blocks(params: list[Any]) -> Iterator[list[Any]]:
    """Parts of the list to process one after the other, which limits temporary memory.

    On a CPU, they fit the cache. Sharded weights are one part: each part costs a reduction.
    """
    block: list[Any] = []
    size = 0
    for p in params:
        limit = CPU_BLOCK if p.device.type == "cpu" else DEVICE_BLOCK
        if block and size + p.nbytes > limit and not is_sharded(p):
            yield block
            block, size = [], 0
        block.append(p)
        size += p.nbytes
    if block:
        yield block
