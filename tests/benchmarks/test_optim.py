"""`benchmarks/optim.py` measures what it says."""

import pytest

pytest.importorskip("pytorch_optimizer")

import optim
import torch
from harness import Still
from torch import nn

from steppe.errors import UserError
from steppe.optim import FAD
from steppe.training.processes import find_device


def test_resnet50_has_161_shapes():
    shapes = optim.shapes()
    assert len(shapes) == 161
    assert sum(s.numel() for s in shapes) == 23_522_375  # seven classes


def test_the_gradients_are_such_as_autograd_gives():
    """Nothing else refers to them, so that adoption and recycling happen as in training."""
    params = [nn.Parameter(torch.randn(50)), nn.Parameter(torch.randn(3, 4))]
    gradients = optim.Gradients(params)
    opt = FAD(Still(params))
    opt.step(gradients)
    assert gradients.calls == 4
    assert gradients.seconds > 0
    memory = params[0].grad.data_ptr()
    for phase in opt.phases():
        with phase:
            gradients()
        if phase.index == 0:
            assert phase._excursion.walk.backup[0].data_ptr() == memory


def test_a_device_that_is_not_there():
    with pytest.raises(UserError, match="device 'cuda:99' cannot be used"):
        find_device("cuda:99")
    with pytest.raises(UserError, match="device 'gpu' cannot be used"):
        find_device("gpu")
