"""Spectral densities against those of dense matrices, probe by probe and in the mean."""

import math
from functools import partial

import pytest
import torch

from steppe.curvature import spectral_density
from steppe.curvature.krylov import random_vector, seeded
from steppe.errors import UserError
from tests.curvature.spectra import SPECTRA, Counted, N, small_net, symmetric


def probes_of(matrix, probes, seed):
    """The normalized random vectors behind a density."""
    generator = seeded(matrix, seed)
    drawn = [random_vector(matrix, generator) for _ in range(probes)]
    return [v / v.norm() for v in drawn]


def gauss(x, width):
    return torch.exp(-0.5 * (x / width) ** 2) / (width * math.sqrt(2 * math.pi))


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_the_quadrature_of_a_probe_is_exact_for_polynomials(steps):
    op = Counted(symmetric(SPECTRA["indefinite"]) / 4)  # within [-1, 1]: powers stay small
    found = spectral_density(op, probes=3, steps=steps, seed=2)
    assert found.nodes.shape == found.weights.shape == (3, steps)
    assert found.products == op.products == 3 * steps
    for v, nodes, weights in zip(probes_of(op, 3, seed=2), found.nodes, found.weights, strict=True):
        image, errors = v, []
        for degree in range(2 * steps + 1):
            errors.append(abs(float(weights @ nodes**degree) - float(v @ image)))
            image = op.matrix @ image
        assert max(errors[:-1]) < 1e-13
        assert errors[-1] > 1e-9  # one degree more is one too many


def test_with_all_steps_the_density_of_a_probe_is_exact():
    op, dense = small_net()
    values, vectors = torch.linalg.eigh(dense)
    found = spectral_density(op, probes=2, steps=10**6, seed=4)
    assert found.nodes.shape == (2, len(dense))
    points = torch.linspace(float(values[0]) - 0.1, float(values[-1]) + 0.1, 60).double()
    shares = torch.stack([(vectors.T @ v) ** 2 for v in probes_of(dense, 2, seed=4)]).mean(0)
    expected = (shares * gauss(points[:, None] - values, 0.05)).sum(1)
    torch.testing.assert_close(found.at(points, width=0.05), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["indefinite", "five times", "geometric", "net"])
def test_many_probes_agree_with_the_matrix(name):
    matrix = small_net()[1] if name == "net" else symmetric(SPECTRA[name])
    values = torch.linalg.eigvalsh(matrix)
    extent, probes = float(values[-1] - values[0]), 100
    found = spectral_density(matrix, probes=probes, steps=25)
    for degree in (1, 2, 3):
        mean, stderr = found.mean(partial(torch.pow, exponent=degree))
        assert abs(mean - float((values**degree).mean())) < 4 * stderr
        rows = (found.weights * found.nodes**degree).sum(1)
        assert stderr == pytest.approx(float(rows.var() / probes) ** 0.5)
    width = extent / 10  # wide enough for 25 nodes to be as good as all
    for point in torch.linspace(float(values[0]), float(values[-1]), 5).tolist():
        mean, stderr = found.mean(lambda x, point=point: gauss(point - x, width))
        assert abs(mean - float(gauss(point - values, width).mean())) < 4 * stderr
        at = float(found.at(torch.tensor(point, dtype=torch.float64), width))
        assert at == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("name", SPECTRA)
def test_weights_are_a_distribution_and_the_density_integrates_to_one(name):
    """Also where the Krylov space ends early: what is added then weighs nothing."""
    matrix = symmetric(SPECTRA[name])
    found = spectral_density(matrix, probes=3, steps=30)
    assert (found.weights >= 0).all()
    torch.testing.assert_close(found.weights.sum(1), torch.ones(3).double(), rtol=0, atol=1e-12)
    width = max(float(found.nodes.max() - found.nodes.min()) / 100, 1e-3)
    low, high = float(found.nodes.min()) - 9 * width, float(found.nodes.max()) + 9 * width
    points = torch.linspace(low, high, 4000, dtype=torch.float64)
    area = torch.trapezoid(found.at(points, width), points)
    torch.testing.assert_close(float(area), 1.0, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["plateau", "rank one", "identity", "zero"])
def test_repeated_eigenvalues_have_the_weight_of_their_space(name):
    """In every probe, and not one of them lost or counted twice."""
    matrix = symmetric(SPECTRA[name])
    values, vectors = torch.linalg.eigh(matrix)
    found = spectral_density(matrix, probes=1, steps=N, seed=1)
    (v,) = probes_of(matrix, 1, seed=1)
    top = float(values[-1])
    expected = float(((vectors.T @ v)[(values - top).abs() < 1e-9] ** 2).sum())
    weight = float(found.weights[(found.nodes - top).abs() < 1e-9].sum())
    assert weight == pytest.approx(expected, abs=1e-12)


def test_the_default_width_is_a_hundredth_of_the_extent():
    found = spectral_density(symmetric(SPECTRA["indefinite"]), probes=2, steps=8)
    points = torch.linspace(-5, 5, 11)
    width = float(found.nodes.max() - found.nodes.min()) / 100
    assert torch.equal(found.at(points), found.at(points, width))
    assert spectral_density(torch.eye(4), probes=1).mean(torch.ones_like) == (
        pytest.approx(1.0),
        math.inf,
    )


def test_the_seed_decides():
    matrix = symmetric(SPECTRA["indefinite"])
    first, same, other = (spectral_density(matrix, steps=5, seed=s) for s in (1, 1, 2))
    assert torch.equal(first.nodes, same.nodes)
    assert not torch.equal(first.nodes, other.nodes)


def test_progress_is_told_after_each_product():
    reports = []
    spectral_density(torch.eye(20), probes=3, steps=5, progress=reports.append)
    assert [r.products for r in reports] == list(range(1, 16))
    assert [r.share for r in reports] == pytest.approx([i / 15 for i in range(1, 16)])
    assert reports[-1].note == "probe 3 of 3"


def test_bad_input():
    for options in ({"probes": 0}, {"steps": 0}):
        with pytest.raises(UserError, match="probes and steps must be at least 1, got probes="):
            spectral_density(torch.eye(3), **options)
    found = spectral_density(torch.eye(3), probes=1)
    with pytest.raises(UserError, match="width must be positive, got 0.0"):
        found.at(torch.zeros(1), width=0.0)
