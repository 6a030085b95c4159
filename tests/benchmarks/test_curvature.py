"""`benchmarks/curvature.py`: every solver solves the same problem, and is judged alike."""

import curvature
import pytest
import torch
from curvature import Found, Options
from task import prepare

from steppe.errors import UserError

TOP = 4


@pytest.fixture(scope="module")
def task():
    return prepare(Options(device="cpu", steps=30, batch=16))


@pytest.fixture(scope="module")
def result(task):
    return curvature.solve(task, Options(top=TOP, rounds=2), tuple(curvature.RIVALS))


def test_all_find_the_same_eigenvalues_to_the_same_residual(result):
    assert result["residuals checked in"] == "float64"
    rows = {row["solver"]: row for row in result["solvers"]}
    assert list(rows) == ["steppe", "eigsh", "steppe, by magnitude", "pyhessian"]
    for row in rows.values():
        assert row["eigenvalues"] == TOP
        assert row["lambda_max"] == pytest.approx(rows["steppe"]["lambda_max"], rel=1e-3)
        assert 0 < row["worst residual over lambda_max"] <= curvature.RESIDUAL
        assert row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
    assert rows["eigsh"]["smallest"] == pytest.approx(rows["steppe"]["smallest"], rel=1e-2)
    for name, ratio in result["ratios"].items():
        assert ratio["min"] <= ratio["median"] <= ratio["max"], name
    assert len(result["ratios"]) == 2


def test_a_rival_that_is_stopped_gives_a_bound(task):
    result = curvature.solve(task, Options(top=TOP, rounds=1, limit=1e-6), ["eigsh"])
    ours, theirs = result["solvers"]
    assert theirs["stopped"]
    assert "lambda_max" not in theirs
    assert "stopped" not in ours
    assert result["ratios"] == {}  # stopped sooner than we solved: it says nothing


def test_tolerances_are_lowered_until_the_residual_is_reached(task):
    """A made-up rival, whose vectors are as wrong as its tolerance."""
    check = curvature.checker(task, exact=True)
    exact = curvature.steppe(task, TOP, "LA")
    asked = []

    def rival(k, tol):
        asked.append(tol)
        noise = torch.randn(exact.vectors.shape, generator=torch.Generator().manual_seed(0))
        noise *= tol / noise.norm(dim=0)
        return Found(exact.values, exact.vectors + noise, 1.0, None)

    found = curvature.reaching(check, "rival", rival, TOP, 0.5)
    assert 1 < len(asked) < 7
    assert asked == [0.5 / 10**i for i in range(len(asked))]
    assert curvature.worst(check, found) <= curvature.RESIDUAL
    with pytest.raises(UserError, match="rival does not reach a residual of 0.001"):
        curvature.reaching(check, "rival", lambda k, tol: rival(k, 0.5), TOP, 0.5)


def test_bad_input():
    with pytest.raises(UserError, match="unknown precision 'tf23', did you mean 'tf32'"):
        curvature.measure(Options(precision=["tf23"]))
    with pytest.raises(UserError, match="unknown rival 'egish', did you mean 'eigsh'"):
        curvature.measure(Options(rival=["egish"]))
    with pytest.raises(UserError, match="--limit -1"):
        curvature.measure(Options(limit=-1))
