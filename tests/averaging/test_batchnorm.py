"""Statistics estimated anew: torch's own procedure, and nothing else touched."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from steppe.averaging import reestimate, unfrozen


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU(),
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten(),
        nn.Linear(64, 6), nn.BatchNorm1d(6),
    ).double()  # fmt: skip
    with torch.no_grad():
        for norm in unfrozen(model):  # statistics of other weights
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.num_batches_tracked += 7
    return model


def batches():
    generator = torch.Generator().manual_seed(1)
    # Of different sizes: batches weigh the same, not images.
    return [
        torch.randn(n, 3, 8, 8, dtype=torch.float64, generator=generator) + n for n in (4, 9, 5)
    ]


def test_as_torch_does():
    model, other = network(), network()
    reestimate(model, model, batches())
    update_bn(batches(), other)
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert not torch.equal(model[1].running_mean, network()[1].running_mean)
    assert [model[i].momentum for i in (1, 4, 7)] == [0.3, None, 0.1]


def test_by_hand():
    norm = nn.BatchNorm1d(1).double()
    xs = [torch.tensor([[1.0], [3.0]]).double(), torch.tensor([[5.0], [9.0], [10.0]]).double()]
    reestimate(norm, norm, xs)
    assert norm.running_mean.item() == (2 + 8) / 2
    assert norm.running_var.item() == (2 + 7) / 2


def test_what_is_frozen_or_no_batch_norm_stays():
    model = network().append(nn.Dropout(0.5)).append(nn.InstanceNorm1d(6, track_running_stats=True))
    model[4].eval()
    model[8].eval()
    model[9].eval()
    before = copy.deepcopy(dict(model.state_dict()))
    modes = [module.training for module in model.modules()]
    gradients = []

    def forward(x):
        gradients.append(torch.is_grad_enabled())
        return model[:8](x)

    assert unfrozen(model) == [model[1], model[7]]
    reestimate(model, forward, batches())
    changed = {
        name for name, value in before.items() if not torch.equal(model.state_dict()[name], value)
    }
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert changed == {f"{i}.{name}" for i in (1, 7) for name in names}
    assert model[1].num_batches_tracked == 3
    assert [module.training for module in model.modules()] == modes
    assert gradients == [False] * 3


def test_momentum_comes_back_after_a_failure():
    model = network()

    def forward(x):
        assert all(norm.momentum is None for norm in unfrozen(model))
        raise KeyError

    with pytest.raises(KeyError):
        reestimate(model, forward, batches())
    assert [model[i].momentum for i in (1, 4, 7)] == [0.3, None, 0.1]


def test_batches_are_read_only_where_they_are_needed():
    norm = nn.BatchNorm1d(2, track_running_stats=False)  # has no statistics to estimate
    for model in (network().eval(), nn.Linear(2, 2), norm):
        assert unfrozen(model) == []
        rest = iter(batches())
        reestimate(model, model, rest)
        assert len(list(rest)) == 3
    with pytest.raises(ValueError, match="no batches"):
        reestimate(network(), print, [])
