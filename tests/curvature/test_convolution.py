"""Convolutions inside a product: torch's own, to any order of differentiation."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steppe.curvature.convolution import FastConvolutions, _Convolution, _pointwise

CASES = {
    "plain": (F.conv2d, (2, 3, 4, 5), (2, 3, 3, 3), {}),
    "stride and padding": (F.conv2d, (2, 2, 5, 4), (3, 2, 3, 3), {"stride": 2, "padding": (1, 0)}),
    "dilation": (F.conv2d, (1, 2, 6, 5), (2, 2, 3, 2), {"dilation": (2, 1), "padding": 1}),
    "depthwise": (F.conv2d, (2, 3, 4, 4), (3, 1, 3, 3), {"groups": 3, "padding": 1}),
    "groups": (F.conv2d, (1, 4, 3, 3), (6, 2, 2, 2), {"groups": 2}),
    "one dimension": (F.conv1d, (2, 2, 6), (3, 2, 3), {"stride": (2,), "padding": "valid"}),
    "three dimensions": (F.conv3d, (1, 2, 3, 3, 3), (2, 2, 2, 2, 2), {"padding": 1}),
    "transposed": (
        F.conv_transpose2d,
        (2, 2, 3, 3),
        (2, 2, 3, 3),
        {"stride": 2, "padding": 1, "output_padding": 1},
    ),
    "transposed, groups": (F.conv_transpose1d, (1, 4, 4), (4, 1, 3), {"groups": 2, "dilation": 2}),
}
LEFT_ALONE = {
    "same": (F.conv2d, (1, 2, 4, 4), (2, 2, 3, 3), {"padding": "same"}),
    "no batch": (F.conv2d, (2, 4, 4), (2, 2, 3, 3), {}),
}


@pytest.fixture(params=[*CASES, *LEFT_ALONE])
def case(request):
    function, of_input, of_weight, options = {**CASES, **LEFT_ALONE}[request.param]
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in (of_input, of_weight)
    )
    channels = function(x, w, **options).shape[-len(of_weight) + 1]
    b = torch.randn(channels, generator=generator, dtype=torch.float64, requires_grad=True)

    def fast(*tensors):
        with FastConvolutions():
            return function(*tensors, **options)

    return request.param, fast, lambda *tensors: function(*tensors, **options), (x, w, b)


def test_values_are_torchs(case):
    _, fast, slow, (x, w, b) = case
    for tensors in ((x, w), (x, w, b)):
        torch.testing.assert_close(fast(*tensors), slow(*tensors), rtol=1e-12, atol=1e-12)


def test_first_second_and_third_derivatives_are_torchs(case):
    name, fast, slow, tensors = case
    orders = 2 if name == "transposed" else 3  # torch's own fails at the third, for output_padding

    def derivatives(function):
        # The square makes each derivative depend on everything.
        value, found = function(*tensors).square().sum(), []
        for _ in range(orders):
            first = torch.autograd.grad(value, tensors, create_graph=True)
            found += first
            value = sum((part * part.detach().cos()).sum() for part in first)
        return found

    for ours, theirs in zip(derivatives(fast), derivatives(slow), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_second_derivatives_are_those_of_the_values(case):
    name, fast, _, tensors = case
    if name in LEFT_ALONE:
        pytest.skip("torch's own")
    assert torch.autograd.gradgradcheck(fast, tensors)


def test_takes_over_what_it_knows_and_leaves_the_rest(case):
    name, fast, _, tensors = case
    own = fast(*tensors[:2]).grad_fn.name()
    assert (own == f"{_Convolution.__name__}Backward") == (name in CASES)


def test_modules_use_it_only_inside():
    layer, x = nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5)
    outside = layer(x).grad_fn.name()
    with FastConvolutions():
        inside = layer(x).grad_fn.name()
    assert outside == layer(x).grad_fn.name() == "ConvolutionBackward0"
    assert inside == "AddBackward0"


def test_only_what_is_needed_is_computed():
    x, w = torch.randn(1, 1, 3, 3), torch.randn(1, 1, 2, 2, requires_grad=True)
    with FastConvolutions():
        y = F.conv2d(x, w)
    assert y.grad_fn.next_functions[0][0] is None  # the images need no gradient
    y.sum().backward()
    torch.testing.assert_close(w.grad, x.unfold(2, 2, 1).unfold(3, 2, 1).sum((2, 3)))


def test_inside_transforms_torchs_own_are_used():
    x, w = torch.randn(4, 1, 2, 5, 5), torch.randn(3, 2, 3, 3)

    def loss(w, x):
        return F.conv2d(x, w).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
    with FastConvolutions():
        inside = per_sample(w, x)
    torch.testing.assert_close(inside, per_sample(w, x))


def test_single_pixels_as_matrix_products():
    """Chosen on GPUs only; the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 4, 5), (6, 3, 1, 1))
    )

    def product(x, w):
        return _Convolution.apply(_pointwise, 2, (), x, w, None)

    torch.testing.assert_close(product(x, w), F.conv2d(x, w), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(product, (x, w))
    assert torch.autograd.gradgradcheck(product, (x, w))


def normalized(convolution, bias=True, affine=True, **options):
    """A convolution and a batch norm with statistics of its own, in float64."""
    torch.manual_seed(0)
    kind = {3: nn.Conv2d, 2: nn.Conv1d}[convolution]
    norm = {3: nn.BatchNorm2d, 2: nn.BatchNorm1d}[convolution](4, affine=affine)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return nn.Sequential(kind(2, 4, 3, bias=bias, **options), norm).double().eval()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dims", [2, 3])
def test_a_batch_norm_is_folded_with_all_its_derivatives(dims, bias, affine):
    model = normalized(dims, bias, affine, groups=2)
    x = torch.randn(5, 2, *[7] * (dims - 1), dtype=torch.float64, requires_grad=True)
    inputs = [x, *model.parameters()]

    def derivatives():
        y = model(x)
        value, found = y.square().sum() + y.cos().sum(), [y]
        for _ in range(2):
            first = torch.autograd.grad(value, inputs, create_graph=True)
            found += first
            value = sum((part * part.detach().cos()).sum() for part in first)
        return found

    expected = derivatives()
    with FastConvolutions():
        found = derivatives()
    assert "Batch" not in found[0].grad_fn.name()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def changed_in_place(model, x):
    return model[1](model[0](x).mul_(2))


def another_input(model, x):
    y = model[0](x)
    return model[1](y.roll(1, dims=0)) + y


def its_own_statistics(model, x):
    return model.train()(x)


def a_large_kernel(model, x):
    return model(x[:1, :, :3, :3])


def used_twice(model, x):
    y = model[0](x)
    return model[1](y) + model[1](y) + y


@pytest.mark.parametrize(
    "function", [changed_in_place, another_input, its_own_statistics, a_large_kernel, used_twice]
)
def test_what_cannot_be_folded_is_left_alone(function):
    model, x = normalized(3), torch.randn(5, 2, 7, 7, dtype=torch.float64)
    expected = torch.autograd.grad(function(model, x).square().sum(), list(model.parameters()))
    model = normalized(3)
    with FastConvolutions():
        y = function(model, x)
    found = torch.autograd.grad(y.square().sum(), list(model.parameters()))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
