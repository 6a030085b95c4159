"""Accuracy, cross-entropy and calibration error of a model on a part of a domain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from steppe.domains.batches import Batch

BATCH = 64
"""Images in a batch of an evaluation."""
LARGE_BATCH = 256
"""The same on a GPU, where the algorithm predicts each image by itself."""
BINS = 15
"""Bins of the calibration error, equal in width."""


@dataclass(frozen=True)
class Scores:
    """How well a model does on some images.

    Attributes:
        cross_entropy: the mean, in nats.
        calibration_error: the expected calibration error, over 15 bins of equal width: the mean
            over images of the difference between confidence and accuracy in the image's bin.
        step: after which the weights were saved, where they are a checkpoint's.
        which: the choice that they are, likewise: ``best``, ``last`` or ``step:N``.
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
    """What an ensemble makes of a domain, and what its members make of it alone."""

    ensemble: Scores
    members: tuple[Scores, ...]

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        each = [{"run": n, **m.to_json()} for n, m in zip(names, self.members, strict=True)]
        return {"ensemble": self.ensemble.to_json(), "members": each}


class Tally:
    """Sums over batches, on the device; sums of several processes add up."""

    def __init__(self, device: torch.device) -> None:
        # Rows: images, images that are right, confidence; the last column has no bin: its first
        # entry is the cross-entropy.
        self.sums = torch.zeros(3, BINS + 1, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        logits = logits.float()
        confidence = logits.softmax(1).amax(1)
        right = logits.argmax(1).eq(labels)  # not softmax's: it rounds close ones to equal
        # A bin is (low, high], so that a confidence of 1 is in the last.
        bins = (confidence * BINS).ceil().long().sub_(1).clamp_(0, BINS - 1)
        # One product with a one-hot matrix: a scatter is not repeatable on a GPU.
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
    """The scores of a model over batches; `reduce` adds the sums of several processes."""
    tally = Tally(device)
    for images, labels in batches:
        logits = predict(images.to(device, non_blocking=True))
        tally.add(logits, labels.to(device, non_blocking=True))
    tally.sums = reduce(tally.sums)
    return tally.scores()
