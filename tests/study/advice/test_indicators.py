"""Each indicator against the obvious computation in float64."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.curvature import GaussNewtonOperator
from steppe.errors import UserError
from steppe.study.advice import indicators as I


def test_noise_scale_is_that_of_the_two_batch_sizes() -> None:
    """McCandlish et al., Appendix A.1, with the batch and all batches together as the two sizes."""
    torch.manual_seed(0)
    rows, b = 3.0 + torch.randn(6, 40, dtype=torch.float64), 8
    small = sum(float(row @ row) for row in rows) / 6
    large = float(rows.mean(0) @ rows.mean(0))
    signal = (6 * b * large - b * small) / (6 * b - b)
    noise = (small - large) / (1 / b - 1 / (6 * b))
    assert I.noise_scale(rows, b) == pytest.approx(noise / signal, rel=1e-12)


def test_noise_scale_finds_the_scale_that_made_the_gradients() -> None:
    torch.manual_seed(0)
    n, b, m = 5000, 4, 200
    truth = torch.full((n,), 0.1)  # |G|^2 = 50, and the trace below is n
    rows = truth + torch.randn(m, n) / math.sqrt(b)
    assert I.noise_scale(rows, b) == pytest.approx(n / 50, rel=0.02)


def test_noise_scale_is_at_most_the_number_of_images() -> None:
    assert I.noise_scale(torch.tensor([[1.0], [-1.0], [0.1]]), 5) == 15.0
    with pytest.raises(UserError, match="needs at least two batches, got 1"):
        I.noise_scale(torch.ones(1, 3), 5)


def test_disagreement_is_the_mean_over_pairs() -> None:
    torch.manual_seed(0)
    rows = torch.randn(4, 9, dtype=torch.float64)
    pairs = [(i, j) for i in range(4) for j in range(i)]
    cosines = [float(F.cosine_similarity(rows[i], rows[j], dim=0)) for i, j in pairs]
    assert I.disagreement(rows) == pytest.approx(1 - sum(cosines) / 6, rel=1e-12)
    assert I.disagreement(torch.tensor([[1.0, 0.0], [-2.0, 0.0]])) == 2.0
    with pytest.raises(UserError, match="at least two, got 1"):
        I.disagreement(rows[:1])


def test_a_domain_without_gradient_is_orthogonal_to_all() -> None:
    assert I.disagreement(torch.tensor([[1.0, 0.0], [0.0, 0.0]])) == 1.0


@pytest.fixture
def fitted() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Tensor]:
    """A softmax regression, its data, and its Gauss-Newton matrix from Jacobians."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x, y = torch.randn(7, 5, dtype=torch.float64), torch.randint(3, (7,))

    def logits(weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    parts = torch.autograd.functional.jacobian(logits, (model.weight, model.bias))
    jacobian = torch.cat([part.reshape(7, 3, -1) for part in parts], 2)
    p = model(x).softmax(1).detach()
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return model, [(x, y)], torch.einsum("nca,ncd,ndb->ab", jacobian, inner, jacobian) / 7


def test_curvature_is_that_of_the_dense_matrix(
    fitted: tuple[nn.Module, list[tuple[Tensor, Tensor]], Tensor],
) -> None:
    model, batches, dense = fitted
    op = GaussNewtonOperator(model, F.cross_entropy, batches)
    top, trace = I.top_eigenvalue(op), I.trace(op)
    assert top == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=I.TOP_TOL)
    assert trace == pytest.approx(float(dense.trace()), rel=3 * I.TRACE_RTOL)
    assert I.anisotropy(top, trace) == top / trace


def test_rise_is_the_loss_at_the_perturbed_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.randint(3, (9,))
    kept = [p.detach().clone() for p in model.parameters()]

    def loss() -> Tensor:
        return F.cross_entropy(model(x), y)

    found = I.rise(loss, list(model.parameters()), rho=0.3)
    for p, was in zip(model.parameters(), kept, strict=True):
        torch.testing.assert_close(p.detach(), was, rtol=0, atol=0)
    flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss(), list(model.parameters()))])
    step, before = 0.3 * flat / flat.norm(), loss().item()
    nn.utils.vector_to_parameters(torch.cat([k.flatten() for k in kept]) + step, model.parameters())
    assert found == pytest.approx(loss().item() - before, rel=1e-12)


def test_weights_survive_a_loss_that_fails() -> None:
    w, calls = torch.tensor([3.0], requires_grad=True), 0

    def loss() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("no")
        return w.square().sum()

    with pytest.raises(ValueError, match="no"):
        I.rise(loss, [w])
    assert w.item() == 3.0


def test_a_flat_loss_neither_rises_nor_curves() -> None:
    w = torch.zeros(3, requires_grad=True)
    assert I.rise(lambda: w.square().sum(), [w]) == 0.0
    assert I.anisotropy(0.0, 0.0) == 0.0


def test_gain_is_paired() -> None:
    assert I.gain([80.0, 60.0, 70.0], [70.0, 66.0, 72.0]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="zip"):
        I.gain([80.0], [70.0, 66.0])


def test_factors_are_fitted_as_logarithms() -> None:
    found = I.as_fitted({"trace": 100.0, "rise": -1.0, "disagreement": 0.5, "left-out": 50.0})
    assert found == {
        "trace": pytest.approx(2),
        "rise": pytest.approx(math.log10(I.TINY)),
        "disagreement": 0.5,
        "left-out": 50.0,
    }
