"""Convolutions inside a product: torch's own, to any order of differentiation."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from steppe.curvature.convolution import FastConvolutions, _Convolution

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
