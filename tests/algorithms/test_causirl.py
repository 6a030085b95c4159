"""CausIRL: where it cuts the images, and that its distances are CORAL's and MMD's."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from steppe.algorithms import Prepared, build_algorithm
from steppe.algorithms.algorithm import domain_risks
from tests.algorithms.oracles import SIZES, gradients, make_batches, make_network

METHODS = pytest.mark.parametrize("name", ["CORAL", "MMD"])


def with_first(prepared: Prepared, first: Tensor) -> Prepared:
    return replace(prepared, draws={"first part": first})


@METHODS
def test_the_distance_is_that_of_two_domains(name: str):
    """The images before the cuts as one domain, all others as another."""
    network = make_network()
    causal, plain = (
        build_algorithm(n, network, 3, penalty=0.3).double() for n in (f"CausIRL-{name}", name)
    )
    batches = make_batches()
    prepared = causal.prepare(batches)
    first = torch.tensor(
        [d < cut for n, cut in zip(SIZES, (2, 5, 0), strict=True) for d in range(n)]
    )
    found = causal(with_first(prepared, first)).parts["penalty"]
    order = torch.cat([first.nonzero()[:, 0], (~first).nonzero()[:, 0]])
    two = Prepared(prepared.images[order], prepared.labels[order], (7, 9))
    expected = plain(two).parts["penalty"]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    for a, b in zip(gradients(found, causal), gradients(expected, causal), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-13)


@METHODS
@pytest.mark.parametrize("images", [0, 1])
def test_a_part_without_two_images_is_not_compared(name: str, images: int):
    algorithm = build_algorithm(f"CausIRL-{name}", make_network(), 3).double()
    prepared = algorithm.prepare(make_batches())
    first = torch.arange(sum(SIZES)) < images
    for mask in (first, ~first):
        found = algorithm(with_first(prepared, mask))
        assert found.parts["penalty"] == 0
        expected = domain_risks(algorithm.network(prepared.images), prepared).mean()
        assert torch.equal(found.total, expected)
        for a, b in zip(
            gradients(found.total, algorithm), gradients(expected, algorithm), strict=True
        ):
            assert torch.equal(a, b)


@METHODS
def test_every_domain_is_cut_by_itself_and_at_every_place_alike(name: str):
    algorithm = build_algorithm(f"CausIRL-{name}", make_network(), 3)
    torch.manual_seed(0)
    batches, found = make_batches(), []
    for _ in range(700):
        first = algorithm.prepare(batches).draws["first part"]
        cuts = tuple(int(part.sum()) for part in first.split(SIZES))
        assert first.tolist() == [
            place < cut for n, cut in zip(SIZES, cuts, strict=True) for place in range(n)
        ]
        found.append(cuts)
    for n, cuts in zip(SIZES, zip(*found, strict=True), strict=True):
        counts = Counter(cuts)  # DomainBed never puts a whole domain before its cut
        assert sorted(counts) == list(range(n))
        assert all(abs(count - 700 / n) < 5 * (700 / n) ** 0.5 for count in counts.values())
    assert len(set(found)) > 100  # of 5 * 7 * 4
