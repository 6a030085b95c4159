"""EISNet: puzzles, the momentum network and its memory, and triplets against loops."""

from itertools import combinations
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from steppe.algorithms import Network, build_algorithm
from steppe.algorithms.jigsaw import N_ORDERS, orders, shuffled
from steppe.algorithms.keys import draw_columns
from steppe.training.backbones import build_network
from tests.algorithms.oracles import (
    MEAN,
    N_CLASSES,
    SIZES,
    STD,
    gradients,
    make_batches,
    make_network,
    move,
)

N = sum(SIZES)


def make(network: Network | None = None, **options: Any) -> Any:
    network = make_network() if network is None else network
    return build_algorithm("EISNet", network, len(SIZES), **options).double()


def test_without_puzzles_and_triplets_it_is_erm() -> None:
    eisnet = make(jigsaw=0.0, triplet=0.0, in_order=1.0, gray=0.0)
    erm = build_algorithm("ERM", eisnet.network, len(SIZES))
    prepared = eisnet.prepare(make_batches())  # 4 x 4 pixels, not divisible by 3
    found, expected = eisnet(prepared).total, erm(erm.prepare(make_batches())).total
    assert torch.equal(found, expected)
    network = eisnet.network
    assert all(map(torch.equal, gradients(found, network), gradients(expected, network)))


def test_orders_are_permutations_far_from_each_other() -> None:
    rows = orders().tolist()
    assert len(rows) == N_ORDERS
    assert rows[0] == list(range(9))
    assert all(sorted(row) == rows[0] for row in rows)
    for a, b in combinations(rows, 2):
        assert sum(x == y for x, y in zip(a, b, strict=True)) <= 1


def test_the_inverse_order_restores_the_image() -> None:
    images = torch.randn(N_ORDERS, 3, 8, 7)
    plain = torch.zeros(N_ORDERS, 9, dtype=torch.bool)
    mean, std = torch.zeros(3, 1, 1), torch.ones(3, 1, 1)
    moved = shuffled(images, orders(), plain, mean, std)
    assert torch.equal(moved[0], images[0])
    assert not any(torch.equal(a, b) for a, b in zip(moved[1:], images[1:], strict=True))
    assert torch.equal(moved[:, :, 6:], images[:, :, 6:])  # rows without tiles
    sources = orders()[5]
    assert torch.equal(moved[5, :, 2:4, 4:6], _tile(images[5], sources[5]))
    assert torch.equal(shuffled(moved, orders().argsort(1), plain, mean, std), images)


def _tile(image: torch.Tensor, number: int) -> torch.Tensor:
    row, column = divmod(int(number), 3)
    return image[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]


def test_gray_tiles() -> None:
    mean, std = (torch.tensor(x, dtype=torch.float64).view(3, 1, 1) for x in (MEAN, STD))
    pixels = torch.rand(2, 3, 6, 6, dtype=torch.float64)
    images = (pixels - mean) / std
    gray = torch.zeros(2, 9, dtype=torch.bool)
    gray[1, 4] = True
    found = shuffled(images, orders()[[0, 0]], gray, mean, std)
    luma = (pixels[1] * torch.tensor([0.299, 0.587, 0.114]).double().view(3, 1, 1)).sum(0)
    expected = pixels.clone()
    expected[1, :, 2:4, 2:4] = luma[2:4, 2:4]
    torch.testing.assert_close(found * std + mean, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[0], images[0])


def test_how_often_tiles_move() -> None:
    eisnet = make(in_order=0.5)
    torch.manual_seed(0)
    drawn = torch.cat([eisnet.prepare(make_batches()).draws["order"] for _ in range(50)])
    assert 0.46 < (drawn == 0).double().mean() < 0.58  # 0.5 + 0.5 / 31 of 800
    assert drawn.unique().tolist() == list(range(N_ORDERS))


def test_the_momentum_network_follows() -> None:
    torch.manual_seed(0)
    network = build_network("small-cnn", n_classes=N_CLASSES, image_size=4, freeze_bn=False)
    eisnet = make(network, ema=0.75, in_order=1.0, gray=0.0)
    now = {**network.featurizer.state_dict(), "bias": eisnet.embedding.bias}

    def copied() -> dict[str, torch.Tensor]:
        state = {**eisnet.keys.featurizer.state_dict(), "bias": eisnet.keys.embedding.bias}
        return {name: value.clone() for name, value in state.items()}

    start = copied()
    assert all(map(torch.equal, start.values(), now.values()))
    move(eisnet.network, 1)
    torch.nn.init.constant_(network.featurizer[1].running_mean, 3.0)
    for _ in range(4):
        eisnet.commit(eisnet.prepare(make_batches()), {})
    for name, value in copied().items():
        if value.is_floating_point():
            expected = now[name] + 0.75**4 * (start[name] - now[name])
            torch.testing.assert_close(value, expected, msg=name)
    assert not any(module.training for module in eisnet.keys.featurizer.modules())
    keys = eisnet.prepare(make_batches()).draws["keys"]
    torch.testing.assert_close(keys.norm(dim=1), torch.ones(N).double())
    images = network.normalize(torch.cat([batch.images for batch in make_batches()]))
    direct = F.normalize(eisnet.keys.embedding(eisnet.keys.featurizer(images)))
    assert torch.equal(keys, direct), "of the images in order"


@pytest.mark.parametrize("size", [5, 20])
def test_the_memory_forgets_the_oldest(size: int) -> None:
    keys = make(queue=size).keys
    every = torch.randn(49, 128, dtype=torch.float64)
    for part in (every[:7], every[7:28], every[28:49]):
        keys.remember(part, torch.arange(len(part)))
    order = (keys.pointer + torch.arange(size)) % size
    assert torch.equal(keys.memory[order], every[-size:])
    assert torch.equal(keys.labels[order], torch.arange(21)[-size:])


def test_columns_are_drawn_from_those_allowed() -> None:
    rng = torch.Generator().manual_seed(0)
    allowed = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()
    columns, used = draw_columns(allowed, torch.rand(3, 3000, generator=rng))
    assert used.sum(1).tolist() == [3, 0, 1]
    assert (columns[0].bincount(minlength=5) / 3000).tolist() == pytest.approx(
        [0, 1 / 3, 0, 1 / 3, 1 / 3], abs=0.03
    )
    assert columns[2].eq(0).all()
    top, _ = draw_columns(allowed, torch.full((3, 1), 1 - 2**-24))
    assert top[0].item() == 4


def test_triplets_are_those_of_the_loops() -> None:
    """With a memory partly empty, and each pair's negatives a subset of those allowed."""
    eisnet = make(queue=40, negatives=3, margin=0.3)
    eisnet.commit(eisnet.prepare(make_batches(seed=1)), {})
    move(eisnet.embedding, 2)
    prepared = eisnet.prepare(make_batches())
    first = eisnet(prepared)
    shuffle = prepared.draws["shuffle"].tolist()
    keys, labels = prepared.draws["keys"], prepared.labels
    pool = torch.cat([keys, eisnet.keys.memory[:N]])
    classes = torch.cat([labels, eisnet.keys.labels[:N]])

    def expected() -> torch.Tensor:
        hinges = []
        q = F.normalize(eisnet.embedding(eisnet.network.features(prepared.images)))
        for row, (a, b) in enumerate(combinations(range(N), 2)):
            i, j = shuffle[a], shuffle[b]
            if labels[i] != labels[j]:
                continue
            chosen = first.aux["negatives"][row][first.aux["used"][row]].tolist()
            near = (q[i] - keys[j]).square().sum()
            hinges += [near - (q[i] - pool[n]).square().sum() + 0.3 for n in chosen]
            if at_start:
                gaps = near - (q[i] - pool).square().sum(1) + 0.3
                allowed = ((gaps > 0) & (gaps < 0.3) & (classes != labels[i])).nonzero().flatten()
                assert len(chosen) == min(3, len(allowed))
                assert set(chosen) <= set(allowed.tolist())
        assert len(hinges) > 10
        return torch.stack(hinges).relu().mean()

    at_start = True
    torch.testing.assert_close(first.parts["triplet"], expected())
    at_start = False
    move(eisnet, 3)
    again = eisnet(prepared, first=first.aux)
    torch.testing.assert_close(again.parts["triplet"], expected())
    assert not torch.equal(eisnet(prepared).aux["negatives"], first.aux["negatives"])
    assert again.total.isclose(
        again.parts["risk"] + 0.7 * again.parts["jigsaw"] + 0.5 * again.parts["triplet"]
    )


def test_no_triplets_are_no_loss() -> None:
    eisnet = make(margin=0.0)
    losses = eisnet(eisnet.prepare(make_batches()))
    assert losses.parts["triplet"].item() == 0
    assert all(g.isfinite().all() for g in gradients(losses.total, eisnet.embedding))
