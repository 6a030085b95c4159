"""EISNet against its formulas, image by image: puzzles, keys, triplets and the memory."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steppe.algorithms import Losses, Network, Prepared, build_algorithm
from steppe.algorithms.jigsaw import orders, shuffled
from tests.algorithms.oracles import (
    MEAN,
    N_CLASSES,
    SIDE,
    SIZES,
    STD,
    Image,
    assert_equal_losses,
    cross_entropy,
    features,
    images_of,
    logits,
    make_batches,
    make_network,
    mean,
    move,
)

N = sum(SIZES)
PAIRS = [(i, j) for i in range(N) for j in range(i + 1, N)]
OPTIONS = {
    "jigsaw": 0.3,
    "triplet": 0.9,
    "in_order": 0.3,
    "gray": 0.5,
    "margin": 0.6,
    "negatives": 5,
    "queue": 20,
    "ema": 0.8,
}
Triplet = tuple[int, int, Tensor]
"""The places of an anchor and its positive, and the negative key."""


def make(dropout: float = 0.0, **options: Any) -> Any:
    eisnet = build_algorithm("EISNet", make_network(dropout), 3, **{**OPTIONS, **options})
    move(eisnet.double(), 1)  # the momentum network, too
    return eisnet


def make_prepared(eisnet: Any, seed: int = 0) -> tuple[Prepared, list[Image], list[Image]]:
    """A step's, with no image of classes 1 and 4; its images with tiles moved, and as they were."""
    batches = [b._replace(labels=b.labels * (b.labels % 3 != 1)) for b in make_batches(seed=seed)]
    torch.manual_seed(seed)
    prepared = eisnet.prepare(batches)
    originals = list(chain(*images_of(batches, prepared.keep)))
    pairs = zip(prepared.images, originals, strict=True)
    return prepared, [image._replace(pixels=x) for x, image in pairs], originals


def grayed(pixels: Tensor) -> Tensor:
    """A normalized image whose colors are its luma."""
    raw = [c * s + m for c, s, m in zip(pixels, STD, MEAN, strict=True)]
    luma = 0.299 * raw[0] + 0.587 * raw[1] + 0.114 * raw[2]
    return torch.stack([(luma - m) / s for s, m in zip(STD, MEAN, strict=True)])


def assert_tiles(found: Tensor, original: Tensor, order: list[int], gray: list[bool]) -> None:
    """Tile `order[place]` of the original is at each place, in gray if its own flag says so."""
    height, width = found.shape[1] // 3, found.shape[2] // 3
    expected, gray_image = original.clone(), grayed(original)
    for place, tile in enumerate(order):
        (y, x), (y0, x0) = divmod(place, 3), divmod(tile, 3)
        part = (gray_image if gray[tile] else original)[
            :, y0 * height : (y0 + 1) * height, x0 * width : (x0 + 1) * width
        ]
        expected[:, y * height : (y + 1) * height, x * width : (x + 1) * width] = part
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("size", [(9, 12), (7, 11)])
def test_puzzles(size):
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(40, 3, *size, generator=rng, dtype=torch.float64)
    sources = orders()[torch.randint(31, (40,), generator=rng)]
    gray = torch.rand(40, 9, generator=rng) < 0.3
    mean_, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (MEAN, STD))
    found = shuffled(images, sources, gray, mean_, std)
    for rows in zip(found, images, sources.tolist(), gray.tolist(), strict=True):
        assert_tiles(*rows)


def test_the_orders_are_far_apart():
    rows = orders().tolist()
    assert len(rows) == 31
    assert rows[0] == list(range(9))
    assert all(sorted(row) == rows[0] for row in rows)
    for k, row in enumerate(rows):
        for other in rows[:k]:
            assert sum(a == b for a, b in zip(row, other, strict=True)) <= 1


@pytest.mark.parametrize("gray", [0.0, 1.0])
def test_a_step_sees_puzzles_and_its_keys_the_images(gray):
    eisnet = make(gray=gray)
    prepared, images, originals = make_prepared(eisnet)
    drawn = prepared.draws["order"]
    assert 0 < (drawn == 0).sum() < N
    for image, original, o in zip(images, originals, drawn.tolist(), strict=True):
        assert_tiles(image.pixels, original.pixels, orders()[o].tolist(), [gray == 1] * 9)


def test_the_draws():
    eisnet = make(in_order=0.7, gray=0.2)
    steps = [eisnet.prepare(make_batches()) for _ in range(100)]
    order = torch.cat([step.draws["order"] for step in steps])
    # Five deviations: those that move draw the order in place, too.
    assert (order == 0).double().mean() == pytest.approx(0.7 + 0.3 / 31, abs=0.058)
    moved = order[order != 0].double()
    assert {*moved.tolist()} == {*range(1, 31)}
    assert moved.mean() == pytest.approx(15.5, abs=2.1)
    uniforms = torch.stack([step.draws["uniforms"] for step in steps])
    assert uniforms.shape == (100, len(PAIRS), 5)
    assert uniforms.mean() == pytest.approx(0.5, abs=0.006)
    colors = torch.stack([step.images for step in steps])[:, :, :, 0, 0]  # a tile of one pixel
    raw = colors * torch.tensor(STD) + torch.tensor(MEAN)
    share = (raw.amax(2) - raw.amin(2) < 1e-9).double().mean()
    assert share == pytest.approx(0.2, abs=0.05)


def embedded(weight: Tensor, bias: Tensor, phi: Tensor) -> Tensor:
    z = weight @ phi + bias
    return z / (z**2).sum() ** 0.5


def keys_by_hand(eisnet: Any, originals: list[Image]) -> list[Tensor]:
    """By the momentum network, without dropout."""
    weight, bias = eisnet.keys.featurizer[1].weight, eisnet.keys.featurizer[1].bias
    head = eisnet.keys.embedding.weight, eisnet.keys.embedding.bias
    return [embedded(*head, torch.tanh(weight @ x.pixels.flatten() + bias)) for x in originals]


def queries(eisnet: Any, images: list[Image]) -> list[Tensor]:
    head = eisnet.embedding.weight, eisnet.embedding.bias
    return [embedded(*head, features(eisnet.network, image)) for image in images]


def distance(a: Tensor, b: Tensor) -> Tensor:
    return ((a - b) ** 2).sum()


def pairs(prepared: Prepared) -> list[tuple[int, int]]:
    """Positions in the batch of each anchor and positive, in the order that was drawn."""
    place = prepared.draws["shuffle"].tolist()
    assert sorted(place) == list(range(len(place)))
    return [(place[a], place[b]) for a, b in PAIRS]


def choose(
    eisnet: Any, prepared: Prepared, images: list[Image], keys: list[Tensor], past: list[Any]
) -> list[Triplet]:
    """Triplets with negatives from this step's keys and the `past` ones, which have classes."""
    now = queries(eisnet, images)
    pool = [(k, image.label) for k, image in zip(keys, images, strict=True)] + past
    chosen = []
    for (i, j), row in zip(pairs(prepared), prepared.draws["uniforms"], strict=True):
        if images[i].label != images[j].label:
            continue
        to_positive = distance(now[i], keys[j])
        near = [
            k
            for k, label in pool
            if label != images[i].label
            and to_positive < distance(now[i], k) < to_positive + eisnet.margin
        ]
        drawn = row.tolist()[: len(near)]
        chosen += [(i, j, near[int(u * len(near))]) for u in drawn]
    return chosen


def expected_losses(
    eisnet: Any, prepared: Prepared, images: list[Image], keys: list[Tensor], chosen: list[Triplet]
) -> Losses:
    network, head = eisnet.network, eisnet.order_classifier
    now = queries(eisnet, images)
    risk = mean(cross_entropy(logits(network, x), x.label) for x in images)
    puzzle = mean(
        cross_entropy(head.weight @ features(network, x) + head.bias, o)
        for x, o in zip(images, prepared.draws["order"].tolist(), strict=True)
    )
    gaps = [distance(now[i], keys[j]) - distance(now[i], k) + eisnet.margin for i, j, k in chosen]
    triplet = mean(torch.where(gap > 0, gap, 0) for gap in gaps)
    total = risk + eisnet.jigsaw * puzzle + eisnet.triplet * triplet
    return Losses(total, {"risk": risk, "jigsaw": puzzle, "triplet": triplet})


def learned(eisnet: Any) -> Any:
    modules = eisnet.network, eisnet.order_classifier, eisnet.embedding
    (objective,) = eisnet.objectives()
    assert {*objective.parameters} == {p for module in modules for p in module.parameters()}
    return nn.ModuleList(modules)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_steps(dropout):
    """Three of them: a memory of 20 keys takes 16 at a time."""
    eisnet = make(dropout)
    history: list[Any] = []
    for step in range(3):
        prepared, images, originals = make_prepared(eisnet, step)
        keys, past = keys_by_hand(eisnet, originals), memory_rows(history, 20)
        torch.testing.assert_close(
            prepared.draws["keys"], torch.stack(keys), rtol=1e-12, atol=1e-15
        )

        def check(
            found: Losses,
            chosen: list[Triplet],
            prepared: Prepared = prepared,
            images: list[Image] = images,
            keys: list[Tensor] = keys,
        ) -> None:
            expected = expected_losses(eisnet, prepared, images, keys, chosen)
            assert_equal_losses(learned(eisnet), found, expected)

        first, chosen = eisnet(prepared), choose(eisnet, prepared, images, keys, past)
        of_pairs = [sum((i, j) == pair for i, j, _ in chosen) for pair in pairs(prepared)]
        assert {0, 5} < {*of_pairs} <= {*range(6)}  # as many as there are, but no more than five
        check(first, chosen)

        # Later passes, at other weights: the same negatives. Keys do not follow.
        move(learned(eisnet), step)
        fresh = choose(eisnet, prepared, images, keys, past)
        assert len(fresh) != len(chosen) or any(
            a[2] is not b[2] for a, b in zip(fresh, chosen, strict=True)
        )
        check(eisnet(prepared), fresh)
        check(eisnet(prepared, first=first.aux), chosen)
        assert_memory(eisnet, past)

        before = [p.clone() for p in key_tensors(eisnet)]
        eisnet.commit(prepared, {"main": first})
        for old, p, now in zip(before, key_tensors(eisnet), query_tensors(eisnet), strict=True):
            torch.testing.assert_close(p, 0.8 * old + 0.2 * now, rtol=1e-12, atol=1e-15)
        history += [(k.detach(), image.label) for k, image in zip(keys, images, strict=True)]
        assert_memory(eisnet, memory_rows(history, 20))


def key_tensors(eisnet: Any) -> list[Tensor]:
    return [*eisnet.keys.featurizer.parameters(), *eisnet.keys.embedding.parameters()]


def query_tensors(eisnet: Any) -> list[Tensor]:
    return [*eisnet.network.featurizer.parameters(), *eisnet.embedding.parameters()]


def memory_rows(history: list[Any], size: int) -> list[Any]:
    """The key of time t is in row t modulo `size`, where later ones replace it."""
    rows = {t % size: entry for t, entry in enumerate(history)}
    return [rows[row] for row in sorted(rows)]


def assert_memory(eisnet: Any, rows: list[Any]) -> None:
    labels = [label for _, label in rows]
    assert eisnet.keys.labels.tolist() == labels + [-1] * (20 - len(rows))
    for found, (key, _) in zip(eisnet.keys.memory, rows, strict=False):
        torch.testing.assert_close(found, key, rtol=1e-12, atol=1e-15)


def test_a_memory_smaller_than_a_step_has_its_last_keys():
    eisnet = make(queue=10)
    for step in range(2):
        prepared, _, originals = make_prepared(eisnet, step)
        keys = keys_by_hand(eisnet, originals)[-10:]
        eisnet.commit(prepared, {"main": eisnet(prepared)})
        rows = {tuple(key.tolist()) for key in eisnet.keys.memory.detach().round(decimals=9)}
        assert rows == {tuple(key.detach().round(decimals=9).tolist()) for key in keys}


def test_without_triplets_there_is_no_loss():
    eisnet = make(margin=1e-9)
    prepared, images, originals = make_prepared(eisnet)
    assert not choose(eisnet, prepared, images, keys_by_hand(eisnet, originals), [])
    losses = eisnet(prepared)
    assert losses.parts["triplet"] == 0
    assert losses.total == losses.parts["risk"] + 0.3 * losses.parts["jigsaw"]


def test_the_momentum_network_starts_as_a_copy_and_sees_its_own_statistics():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6)
    featurizer = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 6), norm)
    network = Network(featurizer, 6, N_CLASSES, MEAN, STD, freeze_bn=False).double()
    eisnet: Any = build_algorithm("EISNet", network, 3, ema=0.9).double()
    twins = zip(key_tensors(eisnet), query_tensors(eisnet), strict=True)
    assert all(torch.equal(a, b) and a is not b and not a.requires_grad for a, b in twins)
    average = eisnet.keys.featurizer[2]
    assert norm.training
    for mode in (True, False):
        assert not eisnet.train(mode).keys.featurizer.training
        assert not average.training
    eisnet.train()
    means, variances = norm.running_mean.clone(), norm.running_var.clone()
    for step in range(3):
        kept = average.running_mean.clone()
        prepared = eisnet.prepare(make_batches(seed=step))
        assert torch.equal(average.running_mean, kept)  # keys left them alone
        eisnet.commit(prepared, {"main": eisnet(prepared)})
        means = 0.9 * means + 0.1 * norm.running_mean
        variances = 0.9 * variances + 0.1 * norm.running_var
        torch.testing.assert_close(average.running_mean, means, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(average.running_var, variances, rtol=1e-12, atol=1e-15)
        ((image, *_), *_) = images_of(make_batches(seed=step), None)
        phi = eisnet.keys.featurizer[1](image.pixels.flatten()) - means
        phi = average.weight * phi / (variances + 1e-5) ** 0.5 + average.bias
        key = embedded(eisnet.keys.embedding.weight, eisnet.keys.embedding.bias, phi)
        again = eisnet.prepare(make_batches(seed=step)).draws["keys"]
        torch.testing.assert_close(again[0], key, rtol=1e-11, atol=1e-14)
