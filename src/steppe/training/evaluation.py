"""Accuracy, cross-entropy and calibration error of a model on part of a domain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from steppe.domains.batches import Batch

BATCH = 64
"""Images per evaluation batch."""
LARGE_BATCH = 256
"""Images per evaluation batch on a GPU, if the algorithm predicts each image independently."""
BINS = 15
"""Equal-width bins of the calibration error."""


@dataclass(frozen=True)
class Scores:
    """A model's scores on a set of images.

    Attributes:
        cross_entropy: the mean, in nats.
        calibration_error: expected calibration error over 15 equal-width bins: the mean over images
            of the gap between confidence and accuracy in the image's bin.
        step: the step after which the weights were saved, if they come from a checkpoint.
        which: the choice of checkpoint: ``best``, ``last`` or ``step:N``.
    """

    accuracy: float
    cross_entropy: float
    calibration_error: float
    images: int
    step: int | None = None
    which: str | None = None

    def to_json(self) -> dict[str, float | int | str]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class EnsembleScores:
    """Scores of an ensemble on a domain, and of each member alone."""

    ensemble: Scores
    members: tuple[Scores, ...]

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        each = [{"run": n, **m.to_json()} for n, m in zip(names, self.members, strict=True)]
        return {"ensemble": self.ensemble.to_json(), "members": each}


class Tally:
    """Sums over batches, kept on the device; those of several processes can be added."""

    def __init__(self, device: torch.device) -> None:
        # Rows: images, correct images, confidence. Columns: the bins, and an extra one whose first
        # entry is the cross-entropy.
        self.sums = torch.zeros(3, BINS + 1, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        logits = logits.float()
        confidence = logits.softmax(1).amax(1)
        right = logits.argmax(1).eq(labels)  # softmax rounds close logits to ties
        # A bin is (low, high], so that a confidence of 1 falls into the last.
        bins = (confidence * BINS).ceil().long().sub_(1).clamp_(0, BINS - 1)
        # A product with a one-hot matrix, because scatter is nondeterministic on a GPU.
        rows = torch.stack([torch.ones_like(confidence), right.float(), confidence]).double()
        self.sums[:, :BINS] += rows @ F.one_hot(bins, BINS).double()
        self.sums[0, BINS] += F.cross_entropy(logits, labels, reduction="none").double().sum()

    def scores(self) -> Scores:
        images, right, confidence = self.sums[:, :BINS].cpu()
        n = float(images.sum())
        return Scores(
            accuracy=float(right.sum()) / n,
            cross_entropy=float(self.sums[0, BINS]) / n,
            calibration_error=float((confidence - right).abs().sum()) / n,
            images=round(n),
        )


@torch.no_grad()
def evaluate(
    predict: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    device: torch.device,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Scores:
    """Score a model over batches; `reduce` adds the sums of several processes."""
    tally = Tally(device)
    for images, labels in batches:
        logits = predict(images.to(device, non_blocking=True))
        tally.add(logits, labels.to(device, non_blocking=True))
    tally.sums = reduce(tally.sums)
    return tally.scores()
