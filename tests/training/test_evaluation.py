"""Accuracy, cross-entropy and calibration error against their definitions, image by image."""

import math
import random

import pytest
import torch

from steppe.domains.batches import Batch
from steppe.training.evaluation import BINS, Scores, Tally, evaluate

CPU = torch.device("cpu")


def by_definition(logits, labels):
    """The scores in double precision, one image at a time."""
    bins = {b: [] for b in range(1, BINS + 1)}
    right, entropy = 0, 0.0
    for row, label in zip(logits.double().tolist(), labels.tolist(), strict=True):
        largest = max(row)
        total = sum(math.exp(value - largest) for value in row)
        confidence = 1 / total
        correct = row.index(largest) == label  # of equal ones the first
        right += correct
        entropy += largest + math.log(total) - row[label]
        # Bin b is ((b - 1) / 15, b / 15].
        (b,) = [b for b in bins if (b - 1) / BINS < confidence <= b / BINS]
        bins[b].append((confidence, correct))
    n = len(labels)
    gaps = [
        len(found)
        / n
        * abs(sum(c for c, _ in found) / len(found) - sum(r for _, r in found) / len(found))
        for found in bins.values()
        if found
    ]
    return right / n, entropy / n, sum(gaps)


def problem(n, classes, scale, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, classes, generator=generator)
    return logits, torch.randint(classes, (n,), generator=generator)


def ties():
    logits, labels = problem(60, 4, 2.0)
    logits[:30, 2] = logits[:30].max(1).values  # often two are the largest
    logits[30:40] = 0.0  # all are
    return logits, labels


def near_ties():
    """The largest by one unit in the last place, which softmax cannot tell from the second."""
    logits, labels = problem(60, 4, 2.0)
    logits[:, 3] = logits[:, :3].max(1).values
    return torch.nextafter(logits, logits + torch.tensor([0.0, 0.0, 0.0, 1.0])), labels


def certain():
    logits = torch.zeros(20, 5)
    logits[torch.arange(20), torch.arange(20) % 5] = 1000.0  # softmax gives 1 exactly
    return logits, torch.arange(20) % 4


CASES = {
    "many": problem(500, 7, 3.0),
    "barely better than chance": problem(300, 10, 0.01),
    "over-confident": problem(300, 3, 40.0),
    "two classes": problem(200, 2, 1.0),
    "one image": problem(1, 6, 1.0),
    "ties": ties(),
    "near ties": near_ties(),
    "confidence 1": certain(),
    "half precision": tuple(
        t.bfloat16() if t.is_floating_point() else t for t in problem(99, 5, 2.0)
    ),
}


def score(logits, labels, cuts=()):
    batches = zip(logits.tensor_split(cuts), labels.tensor_split(cuts), strict=True)
    return evaluate(lambda images: images, (Batch(*batch) for batch in batches), CPU)


@pytest.mark.parametrize("case", CASES)
def test_scores_agree_with_their_definitions(case):
    logits, labels = CASES[case]
    scores = score(logits, labels)
    accuracy, cross_entropy, calibration_error = by_definition(logits, labels)
    assert scores.accuracy == accuracy
    assert scores.images == len(labels)
    # Softmax is computed in single precision.
    assert scores.cross_entropy == pytest.approx(cross_entropy, rel=1e-6, abs=1e-7)
    assert scores.calibration_error == pytest.approx(calibration_error, rel=1e-5, abs=1e-6)


def test_scores_worked_out_by_hand():
    # Confidences 0.75 (right), 0.75 (wrong) and 1 (wrong): two bins, of 2 and of 1 image.
    logits = torch.tensor([[3.0, 1.0], [1.0, 3.0], [1.0, 0.0]]).log()
    scores = score(logits, torch.tensor([0, 0, 1]))
    gap = (2 * (0.75 - 0.5) + 1 * (1.0 - 0.0)) / 3
    assert scores == Scores(1 / 3, math.inf, pytest.approx(gap), 3)


def same(scores):
    """The same up to the order of sums in double precision."""
    return Scores(
        scores.accuracy,
        pytest.approx(scores.cross_entropy, rel=1e-13),
        pytest.approx(scores.calibration_error, rel=1e-13),
        scores.images,
    )


def test_how_images_are_cut_into_batches_does_not_matter():
    logits, labels = problem(200, 5, 4.0)
    whole = score(logits, labels)
    rng = random.Random(0)
    for _ in range(5):
        cuts = sorted(rng.sample(range(1, 200), 7))
        assert score(logits, labels, cuts) == same(whole)


def test_the_sums_of_several_processes_add_up():
    # One has no image at all, as the last of many processes may.
    logits, labels = problem(101, 5, 2.0)
    tallies = [Tally(CPU) for _ in range(3)]
    for rank in (0, 1):
        tallies[rank].add(logits[rank::2], labels[rank::2])
    others = tallies[1].sums + tallies[2].sums
    mine = [Batch(logits[::2], labels[::2])]
    reduced = evaluate(lambda images: images, mine, CPU, reduce=lambda sums: sums + others)
    assert reduced == same(score(logits, labels))


def test_a_model_gone_wrong_is_not_hidden():
    logits, labels = problem(10, 3, 1.0)
    logits[4, 1] = math.nan
    scores = score(logits, labels)
    assert math.isnan(scores.cross_entropy)
    assert math.isnan(scores.calibration_error)
