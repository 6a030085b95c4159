"""`benchmarks/optim.py` measures what it says."""

import pytest

pytest.importorskip("pytorch_optimizer")

import optim
import torch
from harness import Still
from torch import nn

from steppe.errors import UserError
from steppe.optim import FAD
from steppe.optim.registry import optimizers
from steppe.training.processes import find_device


def test_every_method_with_arithmetic_of_its_own_is_measured():
    flat = {spec.name for spec in optimizers.entries() if spec.base is not None}
    same = {"disam", "disam-gsam", "disam-sagm", "disam-fad"}  # as sam, gsam, sagm and fad
    other = {"gam-exact", "gam-release"}  # Hessian products; the authors' code, to compare with
    assert set(optim.ELEMENTS) == (flat - same - other) | {"genie"}


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
