r"""Cheap measurements of a network early in training that may tell which optimizer suits it.

The functions that need gradients take them as rows of a matrix, so that they can be tested and used
without a run. $L$ is the mean cross-entropy of the source domains' training images, $g$ its
gradient, and $w$ the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from steppe.curvature import CurvatureOperator, top_eigenvalues, trace as estimate_trace
from steppe.errors import UserError

from .extent import BASELINE, PROBED

TOP_TOL, TRACE_RTOL = 1e-3, 0.1
"""Accuracy of the curvature: tasks differ by orders of magnitude."""
TINY = 1e-6
"""Smallest value whose logarithm is taken."""


@dataclass(frozen=True)
class Indicator:
    """What a number says about a dataset.

    Attributes:
        name: its name in tables.
        meaning: one line.
        citation: a paper that measures it in training; empty if it needs none.
        log: whether its logarithm is fitted, because it is positive and varies by factors.
    """

    name: str
    meaning: str
    citation: str = ""
    log: bool = False


def _gains() -> Iterable[Indicator]:
    for part, where in (("validation", "source validation"), ("left-out", "left-out sources")):
        for name in PROBED:
            if name != BASELINE:
                meaning = f"accuracy of short {name} runs on {where}, minus {BASELINE}'s, in points"
                yield Indicator(f"{part} gain of {name}", meaning)


INDICATORS: tuple[Indicator, ...] = (
    Indicator(
        "noise scale",
        "variance of an image's gradient over the squared gradient, in images",
        "McCandlish et al., An Empirical Model of Large-Batch Training, 2018",
        log=True,
    ),
    Indicator(
        "disagreement",
        "one minus the mean cosine between the gradients of two source domains",
        "Ballas and Diou, Gradient-Guided Annealing for Domain Generalization, CVPR 2025",
    ),
    Indicator(
        "top eigenvalue",
        "largest eigenvalue of the Gauss-Newton matrix",
        "Jastrzebski et al., The Break-Even Point on Optimization Trajectories, ICLR 2020",
        log=True,
    ),
    Indicator(
        "trace",
        "trace of the Gauss-Newton matrix",
        "Jastrzebski et al., Catastrophic Fisher Explosion, ICML 2021",
        log=True,
    ),
    Indicator(
        "anisotropy",
        "largest eigenvalue over the trace",
        "Sagun et al., Empirical Analysis of the Hessian of Over-Parametrized Networks, 2018",
        log=True,
    ),
    Indicator(
        "rise",
        "loss after a step of length rho up the gradient, minus the loss",
        "Foret et al., Sharpness-Aware Minimization, ICLR 2021",
        log=True,
    ),
    Indicator("images", "training images of the source domains", log=True),
    Indicator("classes", "number of classes", log=True),
    Indicator("validation", f"accuracy of short {BASELINE} runs on source validation, in percent"),
    Indicator("left-out", f"accuracy of short {BASELINE} runs on left-out sources, in percent"),
    *_gains(),
)
"""All indicators, in the order of tables."""


def as_fitted(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that a model takes: the decimal logarithm where an indicator says so."""
    logs = {one.name for one in INDICATORS if one.log}
    return {k: math.log10(max(v, TINY)) if k in logs else v for k, v in values.items()}


def noise_scale(gradients: Tensor, batch_size: int) -> float:
    r"""Return the simple noise scale: the batch size at which noise equals the signal.

    $$B = \frac{\operatorname{tr} \Sigma}{|G|^2}$$

    with the covariance $\Sigma$ of one image's gradient and the true gradient $G$ (McCandlish et
    al. 2018, Equation 2.9). With $m$ batches of $b$ images, gradients $g_i$, and their mean
    $\bar g$, both parts are estimated without bias (their Appendix A.1):

    $$|G|^2 \approx \frac{m |\bar g|^2 - \overline{|g_i|^2}}{m - 1}, \qquad
    \operatorname{tr} \Sigma \approx \frac{m b}{m - 1} (\overline{|g_i|^2} - |\bar g|^2).$$

    The images cannot resolve a scale above their number, $m b$, which is the maximum.

    Args:
        gradients: m x n, one row per batch.
        batch_size: images per batch.

    Examples:
        >>> noise_scale(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), 8)
        0.0
    """
    m = len(gradients)
    if m < 2:
        raise UserError(f"the noise scale needs at least two batches, got {m}")
    rows = gradients.double()
    each, together = float(rows.square().sum(1).mean()), float(rows.mean(0).square().sum())
    signal = (m * together - each) / (m - 1)
    noise = m * batch_size * (each - together) / (m - 1)
    most = float(m * batch_size)
    return min(noise / signal, most) if signal > 0 else most


def disagreement(gradients: Tensor) -> float:
    r"""Return one minus the mean cosine between the gradients of two domains.

    $$1 - \frac{2}{D (D - 1)} \sum_{i < j} \frac{g_i \cdot g_j}{|g_i| |g_j|}$$

    It is 0 if all domains agree, 1 if their gradients are orthogonal, and more if they conflict.

    Args:
        gradients: D x n, one row per domain.

    Examples:
        >>> disagreement(torch.eye(3))
        1.0
    """
    d = len(gradients)
    if d < 2:
        raise UserError(f"domains can only disagree if there are at least two, got {d}")
    rows = gradients.double()
    rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-300)
    cosines = rows @ rows.T
    return 1 - float(cosines.sum() - cosines.trace()) / (d * (d - 1))


def top_eigenvalue(op: CurvatureOperator, seed: int = 0) -> float:
    r"""Return the largest eigenvalue $\lambda_1$, to 0.1%.

    Pass the Gauss-Newton matrix: early in training, the Hessian has negative eigenvalues, with
    which a trace says nothing about sharpness.
    """
    return float(top_eigenvalues(op, 1, tol=TOP_TOL, seed=seed, verify=0).values[0])


def trace(op: CurvatureOperator, seed: int = 0) -> float:
    r"""Return the trace $\sum_i \lambda_i$, to about 10%."""
    return estimate_trace(op, rtol=TRACE_RTOL, seed=seed).value


def anisotropy(top: float, trace: float) -> float:
    r"""Return $\lambda_1 / \sum_i \lambda_i$: 1 if the loss curves in one direction only.

    A loss that does not curve at all has 0.

    Examples:
        >>> anisotropy(2.0, 8.0)
        0.25
    """
    return top / trace if trace > 0 else 0.0


def rise(loss: Callable[[], Tensor], params: Sequence[Tensor], rho: float = 0.05) -> float:
    r"""Return how much the loss rises at SAM's perturbed weights.

    $$L\left(w + \rho \frac{g}{|g|}\right) - L(w)$$

    Args:
        loss: the loss at the current weights.
        params: the weights, which are restored.
        rho: the length of the step; the default is SAM's.

    Examples:
        >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> round(rise(lambda: w.square().sum(), [w], rho=1.0), 4)  # (5 + 1)^2 - 5^2
        11.0
    """
    before = loss()
    gradients = torch.autograd.grad(before, list(params))
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    if not norm > 0:
        return 0.0
    with torch.no_grad():
        kept = [p.clone() for p in params]
        for p, g in zip(params, gradients, strict=True):
            p.add_(g, alpha=rho / float(norm))
        try:
            after = loss()
        finally:
            for p, was in zip(params, kept, strict=True):
                p.copy_(was)
    return float(after.double() - before.detach().double())


def gain(ours: Sequence[float], theirs: Sequence[float]) -> float:
    r"""Return the mean difference of paired accuracies, in points.

    $$\frac{1}{n} \sum_{i=1}^n (a_i - b_i)$$

    Args:
        ours: an optimizer's accuracies, in percent.
        theirs: the baseline's, on the same splits and seeds.

    Examples:
        >>> gain([80.0, 70.0], [78.0, 70.0])
        1.0
    """
    return fmean(a - b for a, b in zip(ours, theirs, strict=True))
