"""Gauss-Newton products are those of J' H J, computed densely and by curvlinops."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steppe.algorithms import build_algorithm
from steppe.curvature import GaussNewtonOperator, HessianOperator
from steppe.errors import UserError
from tests.algorithms.oracles import SIZES, make_batches, make_network
from tests.curvature import nets
from tests.curvature.nets import (
    Case,
    assert_same,
    block,
    cross_entropy,
    curvlinops,
    dense_gauss_newton,
    identity,
)


def squared_error() -> Case:
    case = nets.mlp()
    targets = torch.randn(sum(nets.SIZES), 3, dtype=torch.float64)
    case.whole = (case.whole[0], targets)
    case.batches = list(zip(*(t.split(nets.SIZES) for t in case.whole), strict=True))
    case.loss_fn = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])
    return case


CLASSIFIERS = [
    nets.mlp,
    nets.conv,
    nets.attention,
    nets.transformer,
    nets.tied,
    nets.partial,
    nets.frozen,
    nets.one_layer,
    nets.another_order,
]


@pytest.mark.parametrize("make", [*CLASSIFIERS, squared_error])
def test_products_are_those_of_the_dense_matrix(make: Callable[[], Case]) -> None:
    case = make()
    of_outputs = F.mse_loss if make is squared_error else F.cross_entropy
    expected = dense_gauss_newton(
        case, lambda model, batch: model(batch[0]), lambda z: of_outputs(z, case.whole[1])
    )
    for columns in [(), (3,)]:
        op = GaussNewtonOperator(*case.args())
        v = block(case.size(), *columns)
        assert_same(op @ v, expected @ v)
        assert (op.products, op.passes) == (columns[0] if columns else 1, 1)
    # Both losses are convex in the outputs.
    assert torch.linalg.eigvalsh(op @ identity(op)).min() >= -1e-14 * expected.abs().max()


@pytest.mark.filterwarnings("ignore:`torch.jit")  # which torch's forward mode uses itself
@pytest.mark.parametrize("make", [nets.mlp, nets.conv, squared_error])
def test_products_are_those_of_curvlinops(make: Callable[[], Case]) -> None:
    case = make()
    model = copy.deepcopy(case.model).eval()
    loss = nn.MSELoss() if make is squared_error else nn.CrossEntropyLoss()
    theirs = curvlinops().GGNLinearOperator(model, loss, list(model.parameters()), case.batches)
    v = block(case.size(), 3)
    assert_same(GaussNewtonOperator(*case.args()) @ v, theirs @ v)


def test_a_model_without_curvature_of_its_own() -> None:
    """The outputs are linear in the parameters: what is left out of the Hessian is zero."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    batches, _ = nets.labelled(4)
    v = block(15, 4)
    expected = HessianOperator(model, cross_entropy, batches) @ v
    assert_same(GaussNewtonOperator(model, cross_entropy, batches) @ v, expected)


def test_a_model_with_curvature_of_its_own() -> None:
    case = nets.mlp()
    v = block(case.size())
    gap = GaussNewtonOperator(*case.args()) @ v - HessianOperator(*case.args()) @ v
    assert gap.abs().max() > 0.01


def halves(values: Tensor) -> tuple[Tensor, ...]:
    return values.split((4, 7))


def variance_of_risks(outputs: Iterable[Tensor], labels: Tensor) -> Tensor:
    """A loss that ties the outputs of two domains together."""
    pairs = zip(outputs, halves(labels), strict=True)
    risks = torch.stack([F.cross_entropy(z, y) for z, y in pairs])
    return risks.mean() + risks.var()


def test_a_loss_that_calls_the_model_twice() -> None:
    case = nets.mlp()
    labels = case.whole[1]
    expected = dense_gauss_newton(
        case, lambda model, batch: model(batch[0]), lambda z: variance_of_risks(halves(z), labels)
    )

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return variance_of_risks([model(x) for x in halves(batch[0])], batch[1])

    op = GaussNewtonOperator(case.model, loss_fn, [case.whole])
    v = block(case.size(), 2)
    assert_same(op @ v, expected @ v)


def test_a_call_that_the_loss_does_not_use() -> None:
    """Or uses linearly, or without a gradient: it adds nothing."""
    case = nets.mlp()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        model(batch[0] + 1)
        with torch.no_grad():
            model(batch[0])
        return cross_entropy(model, batch) + model(-batch[0]).mean()

    v = block(case.size(), 2)
    expected = GaussNewtonOperator(*case.args()) @ v
    assert_same(GaussNewtonOperator(case.model, loss_fn, case.batches) @ v, expected)


def test_weight_decay_is_left_out() -> None:
    """It is no function of the outputs."""
    case = nets.mlp()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) + model[0].weight.square().sum()

    v = block(case.size(), 2)
    expected = GaussNewtonOperator(*case.args()) @ v
    assert_same(GaussNewtonOperator(case.model, loss_fn, case.batches) @ v, expected)


@pytest.mark.parametrize("name", ["ERM", "VREx", "CORAL"])
def test_outputs_of_a_module_inside_an_algorithm(name: str) -> None:
    """ERM's logits, and for CORAL the features that it matches, with the classifier in the loss."""
    torch.manual_seed(0)
    algorithm = build_algorithm(name, make_network(), len(SIZES)).double()
    network = algorithm.network
    outputs = network.featurizer if name == "CORAL" else network.classifier
    prepared = algorithm.prepare(make_batches())
    batch = (prepared.images, prepared)
    named = {id(p): n for n, p in algorithm.named_parameters()}
    params = list((network.featurizer if name == "CORAL" else network).parameters())
    case = Case(algorithm, None, [batch], batch, [named[id(p)] for p in params])

    def of_network(model: nn.Module, batch: Any) -> Tensor:
        images = batch[0]
        return model.network.featurizer(images) if name == "CORAL" else model.network(images)

    def loss(z: Tensor) -> Tensor:
        """The algorithm's own loss, with `z` in the place of what the module gives."""
        with outputs.register_forward_hook(lambda module, args, output: z):
            return algorithm(prepared).total

    op = GaussNewtonOperator(
        algorithm, lambda model, batch: model(batch[1]).total, [batch], params, outputs=outputs
    )
    v = block(op.shape[0], 2)
    assert_same(op @ v, dense_gauss_newton(case, of_network, loss) @ v)


def test_what_follows_may_change_the_outputs_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.SiLU(inplace=True)).double()
    batches, whole = nets.labelled(4)
    case = Case(model, cross_entropy, batches, whole)
    expected = dense_gauss_newton(
        case,
        lambda model, batch: model[0](batch[0]),
        lambda z: F.cross_entropy(F.silu(z), whole[1]),
    )
    op = GaussNewtonOperator(model, cross_entropy, batches, outputs=model[0])
    assert_same(op @ identity(op), expected)


class Pair(nn.Module):
    """Returns logits and features, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), x


@pytest.mark.parametrize(
    ("options", "loss_fn", "message"),
    [
        ({}, lambda m, x: m(x)[0].square().mean(), "Pair returns tuple, not a tensor: pass the"),
        (
            {"outputs": nn.Tanh()},
            lambda m, x: m(x)[0].square().mean(),
            "the loss does not call Tanh: pass the module .* as outputs=",
        ),
        (
            {"outputs": "inner"},
            lambda m, x: m.inner(F.pad(m.inner(x), (0, 1))).square().mean(),
            "outputs of Linear are fed back into it",
        ),
    ],
)
def test_outputs_that_are_none(
    options: dict[str, Any], loss_fn: Callable[..., Tensor], message: str
) -> None:
    model = Pair()
    if options.get("outputs") == "inner":
        options = {"outputs": model.inner}
    op = GaussNewtonOperator(model, loss_fn, [torch.ones(4, 3)], **options)
    with pytest.raises(UserError, match=message):
        op @ torch.zeros(8)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_inner_module_instead_of_a_pair() -> None:
    torch.manual_seed(0)
    model, x = Pair().double(), torch.randn(5, 3, dtype=torch.float64)
    op = GaussNewtonOperator(model, lambda m, x: m(x)[0].square().mean(), [x], outputs=model.inner)
    v = block(8)
    expected = HessianOperator(model, lambda m, x: m(x)[0].square().mean(), [x]) @ v
    assert_same(op @ v, expected)
