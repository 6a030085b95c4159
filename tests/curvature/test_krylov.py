"""What every solver relies on: an orthonormal basis, and what the operator does to it."""

import pytest
import torch

from steppe.curvature.krylov import Krylov, random_signs, random_vector, seeded
from tests.curvature.spectra import SPECTRA, N, symmetric


def space_of(matrix, block, rows, seed=0):
    generator = seeded(matrix, seed)
    start = torch.stack([random_vector(matrix, generator) for _ in range(block)])
    return Krylov(matrix, start, rows, generator)


def check(space, matrix):
    """The relation H V = V T + Q C, seen from outside through the Ritz pairs."""
    ritz, n = space.ritz(), len(matrix)
    rows = space._basis[: space.size + space.block]
    torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)).double(), rtol=0, atol=1e-13)
    vectors = space.vectors(ritz.coordinates).T
    left = matrix @ vectors - vectors * ritz.values
    projected = torch.linalg.eigvalsh(space.basis @ matrix @ space.basis.T)
    torch.testing.assert_close(ritz.values, projected, rtol=0, atol=1e-12)
    torch.testing.assert_close(ritz.residuals, left.norm(dim=0), rtol=0, atol=1e-12)
    # What is left lies in the next block: nothing of it was dropped.
    outside = left - rows[space.size :].T @ (rows[space.size :] @ left)
    torch.testing.assert_close(outside, torch.zeros_like(outside), rtol=0, atol=1e-12)
    assert space.size + space.block <= min(space.rows, n)


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("name", SPECTRA)
def test_the_relation_holds_through_growth_restarts_and_widening(name, block):
    matrix = symmetric(SPECTRA[name])
    space = space_of(matrix, block, rows=20)
    for turn in range(3):
        while not space.is_full:
            space.step()
            check(space, matrix)
        assert space.size + 2 * space.block > space.rows
        ritz = space.ritz()
        kept = torch.tensor([0, 2, 5, 7])
        space.restart(ritz, kept)
        check(space, matrix)
        again = space.ritz()
        torch.testing.assert_close(again.values, ritz.values[kept], rtol=0, atol=1e-13)
        torch.testing.assert_close(again.residuals, ritz.residuals[kept], rtol=0, atol=1e-12)
        if turn < 2:
            width = space.block
            assert space.has_room(1, width + 1)
            assert not space.has_room(20, width + 1)
            assert space.widen()
            assert space.block == width + 1
            check(space, matrix)


@pytest.mark.parametrize("name", SPECTRA)
def test_a_basis_of_everything_is_exhausted_and_exact(name):
    matrix = symmetric(SPECTRA[name])
    space = space_of(matrix, 3, rows=100)
    while not space.is_exhausted:
        assert not space.is_full
        space.step()
        check(space, matrix)
    assert space.size == space.products == N
    assert not space.widen()
    expected = SPECTRA[name].sort().values
    torch.testing.assert_close(space.ritz().values, expected, rtol=0, atol=1e-12)


def test_dependent_starting_vectors_are_replaced():
    matrix = symmetric(SPECTRA["indefinite"])
    vector = random_vector(matrix, seeded(matrix, 3))
    space = Krylov(matrix, torch.stack([vector, 2 * vector]), 20, seeded(matrix, 0))
    assert space.block == 2
    space.step()
    check(space, matrix)


def test_a_rotation_by_chunks_is_the_rotation(monkeypatch):
    matrix = symmetric(SPECTRA["indefinite"])
    spaces = []
    for chunk in (1 << 22, 7):
        monkeypatch.setattr("steppe.curvature.krylov._CHUNK", chunk)
        space = space_of(matrix, 2, rows=16)
        while not space.is_full:
            space.step()
        space.restart(space.ritz(), torch.arange(5))
        check(space, matrix)
        spaces.append(space.basis.clone())
    torch.testing.assert_close(*spaces, rtol=0, atol=1e-14)


def test_a_restart_may_keep_nearly_all():
    """The next block then moves onto rows that overlap its own."""
    matrix = symmetric(SPECTRA["indefinite"])
    space = space_of(matrix, 3, rows=20)
    for _ in range(4):
        space.step()
    space.restart(space.ritz(), torch.arange(1, space.size))
    check(space, matrix)


def test_random_numbers_are_the_solvers_own():
    matrix = torch.eye(1000)
    state = torch.get_rng_state()
    signs = random_signs(matrix, seeded(matrix, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(signs.abs(), torch.ones(1000))
    assert abs(signs.sum()) < 4 * 1000**0.5
    assert torch.equal(signs, random_signs(matrix, seeded(matrix, 1)))
    assert not torch.equal(signs, random_signs(matrix, seeded(matrix, 2)))


@pytest.mark.parametrize("name", SPECTRA)
def test_the_relation_holds_through_partial_steps_of_another_operator(name):
    """A search with one operator continues with another, where residuals are largest."""
    matrix, rough = symmetric(SPECTRA[name]), symmetric(SPECTRA[name], seed=1)
    space = space_of(rough, 2, rows=26)
    while not space.is_full:
        space.step()
    space.restart(space.ritz(), torch.tensor([1, 3, 4, 8, 9]))
    space.reopen(matrix)
    space.step()
    check(space, matrix)
    assert (space.size, space.block) == (5, 5)
    for pairs in ([4], [0, 1], [3, 4, 0]):
        ritz, pairs = space.ritz(), torch.tensor(pairs)
        width = space.focus(ritz, pairs, enough=1e-6)
        check(space, matrix)
        torch.testing.assert_close(space.ritz().residuals, ritz.residuals, rtol=0, atol=1e-12)
        assert 1 <= width <= len(pairs)
        # The rest of the block has next to no part in these residuals.
        assert (space._coupling[width:] @ ritz.coordinates[:, pairs]).norm(dim=0).max() <= 1e-6
        assert space.has_room_for(width)
        space.step(width)
        check(space, matrix)
        assert space.block == 5
    space.restart(space.ritz(), torch.arange(space.size - 4, space.size))
    check(space, matrix)


def test_the_noise_of_products_is_seen():
    matrix = symmetric(SPECTRA["indefinite"])
    clean, noisy = space_of(matrix, 1, rows=20), space_of(matrix, 1, rows=20)
    noisy._op = Noisy(matrix)
    for _ in range(15):
        clean.step()
        noisy.step()
    assert clean.noise < 1e-13
    assert 1e-4 < noisy.noise < 1e-2


class Noisy:
    """Products with an error of length 1e-3."""

    def __init__(self, matrix):
        self._matrix, self._generator = matrix, torch.Generator().manual_seed(0)

    def __matmul__(self, vector):
        noise = torch.randn(len(vector), generator=self._generator, dtype=torch.float64)
        return self._matrix @ vector + 1e-3 * noise / noise.norm()
