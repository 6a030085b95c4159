r"""A linear probe: logistic regression on fixed features, to start fine-tuning from.

Fine-tuning a network with a random classifier first distorts its features. LP-FT (Kumar et al.,
ICLR 2022) therefore fits the classifier before. With \(n\) features \(x_i\), it minimizes

\[ \frac{1}{n} \sum_i \ell(W x_i + b, y_i) + \frac{1}{2 C n} \lVert W \rVert^2 \]

by L-BFGS, for every \(C\) of a grid, and keeps the one with the highest validation accuracy. Like
the authors' code, it first divides all features by their standard deviation, a single number, so
that one grid suits all networks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.domains.batches import Batch
from steppe.errors import UserError
from steppe.validation import first_best, mean

from .scoring import TRAIN, VALIDATION

GRID = tuple(10.0**exponent for exponent in range(-7, 3))
"""Values of C; the range is that of the authors' code, which tries 100."""
TOLERANCE = 1e-6
"""Largest entry of the gradient at a solution."""
ITERATIONS = 20_000

log = logging.getLogger("steppe")


class Examples(NamedTuple):
    """Features and labels of some images."""

    features: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Probe:
    """A fitted classifier, in float64.

    Attributes:
        weight: one row per class.
        bias: one number per class.
        c: the inverse strength of the penalty.
        accuracy: the mean validation accuracy over source domains; None if C was given.
    """

    weight: Tensor
    bias: Tensor
    c: float
    accuracy: float | None = None

    def predict(self, features: Tensor) -> Tensor:
        return F.linear(features.to(self.weight), self.weight, self.bias)

    @torch.no_grad()
    def load_into(self, classifier: nn.Linear) -> None:
        classifier.weight.copy_(self.weight)
        classifier.bias.copy_(self.bias)

    def to_json(self) -> dict[str, float]:
        return {"C": self.c} | ({} if self.accuracy is None else {"accuracy": self.accuracy})


def probe_sources(
    classifier: nn.Linear,
    predict: Callable[..., Tensor],
    batches: Callable[[str], Iterator[tuple[int, Iterator[Batch]]]],
    chosen: Mapping[str, float] | None = None,
) -> Probe:
    """Fit a probe to the source images of a run.

    Args:
        classifier: the layer that it stands for.
        predict: maps images and their `source` domain's number to logits, by the classifier.
        batches: yields the number of each source domain with its images of that part.
        chosen: what a first stage chose (default: choose C on validation images).
    """
    grid = GRID if chosen is None else [c for c in GRID if c <= chosen["C"]]
    train, validation = (
        [examples(classifier, partial(predict, source=i), own) for i, own in batches(part)]
        for part in (TRAIN, VALIDATION)
    )
    together = Examples(*(torch.cat(parts) for parts in zip(*train, strict=True)))
    probe = fit_probe(together, validation, classifier.out_features, grid)
    log.info("linear probe on %s images: C=%g", f"{len(together.labels):,}", probe.c)
    return probe


def fit_probe(
    train: Examples, validation: Sequence[Examples], n_classes: int, grid: Sequence[float] = GRID
) -> Probe:
    """Fit a probe for every C of a grid, and choose the most accurate; the lowest C wins a tie.

    Args:
        train: the training images of all source domains.
        validation: the validation images of each source domain; without any, the last C is kept.
        n_classes: the number of classes.
        grid: values of C, in ascending order.
    """
    x = train.features.double()
    # The bias absorbs any shift, but L-BFGS takes a third of the steps on centered features.
    shift, scale = x.mean(0), x.std().clamp_min(torch.finfo(torch.float32).tiny)
    x = (x - shift) / scale
    start = x.new_zeros(n_classes, x.shape[1] + 1)
    found = []
    for c in grid:
        start = logistic_regression(x, train.labels, c, start)
        weight = start[:, :-1] / scale
        probe = Probe(weight, start[:, -1] - weight @ shift, c)
        accuracy = mean([_accuracy(probe, domain) for domain in validation]) if validation else None
        found.append(Probe(probe.weight, probe.bias, c, accuracy))
    best = first_best([probe.accuracy for probe in found]) if validation else -1
    assert best is not None
    return found[best]


def logistic_regression(x: Tensor, labels: Tensor, c: float, start: Tensor) -> Tensor:
    """Minimize the penalized cross-entropy until no entry of its gradient exceeds `TOLERANCE`.

    Args:
        x: features, in float64.
        labels: the class of each row.
        c: the inverse strength of the penalty.
        start: initial weights with the biases as last column, in float64.
    """
    from scipy.optimize import minimize

    targets, shape = F.one_hot(labels, len(start)).to(x), start.shape

    def objective(flat: Any) -> tuple[float, Any]:
        weight = torch.from_numpy(np.array(flat)).to(x).view(shape)
        value, gradient = penalized(x, targets, c, weight)
        return float(value), gradient.flatten().cpu().numpy()

    # No tolerance for the value, which stops changing before the gradient is small enough.
    options = {"gtol": TOLERANCE, "ftol": 0.0, "maxiter": ITERATIONS, "maxfun": 2 * ITERATIONS}
    found = minimize(
        objective, start.flatten().cpu().numpy(), jac=True, method="L-BFGS-B", options=options
    )
    if (largest := float(np.abs(found.jac).max())) > TOLERANCE:
        log.warning("linear probe with C=%g: the gradient is %.1e, not %.0e", c, largest, TOLERANCE)
    return torch.from_numpy(found.x).to(x).view(shape)


def penalized(x: Tensor, targets: Tensor, c: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The penalized cross-entropy at some weights, whose last column is the bias, and its gradient.

    `targets` are one-hot.
    """
    logits = torch.addmm(weight[:, -1], x, weight[:, :-1].T)
    log_p = logits.log_softmax(1)
    n, plain = len(x), weight[:, :-1]
    value = -(targets * log_p).sum() / n + plain.square().sum() / (2 * c * n)
    slopes = (log_p.exp() - targets) / n
    gradient = torch.cat([slopes.T @ x + plain / (c * n), slopes.sum(0)[:, None]], 1)
    return value, gradient


def _accuracy(probe: Probe, domain: Examples) -> float:
    right = probe.predict(domain.features).argmax(1) == domain.labels
    return float(right.double().mean())


@torch.no_grad()
def examples(
    classifier: nn.Linear,
    predict: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
) -> Examples:
    """The classifier's inputs when images are predicted.

    Raises:
        UserError: the prediction is something else than the classifier's output.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    hook = classifier.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    features, labels = [], []
    try:
        for images, classes in batches:
            logits = predict(images)
            if len(seen) != 1 or not torch.equal(seen[0][1], logits):
                raise UserError(
                    "linear_probe needs an algorithm that predicts with one pass of the network's "
                    "classifier: choose another algorithm, or use linear_steps"
                )
            features.append(seen.pop()[0].float())
            labels.append(classes)
    finally:
        hook.remove()
    return Examples(torch.cat(features), torch.cat(labels))
