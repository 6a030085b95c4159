"""An average is where its module is, and following it leaves the host of a GPU free."""

import pytest
import torch
from torch import nn

from steppe.averaging import SMA, SWAD
from tests.devices import never_waiting


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 2))


BUILT = {
    "sma": lambda model: SMA(model, start=2),
    "swad, reference": lambda model: SWAD(model, every=2, n_converge=2, n_tolerance=3),
    "swad, paper": lambda model: SWAD(model, 2, n_converge=2, n_tolerance=3, counting="paper"),
}
LOSSES = [3.0, 2.0, 1.0, 1.1, 1.1, 1.0, 1.0]


@pytest.mark.parametrize("name", BUILT)
def test_no_synchronization(name, device):
    """Nor in `observe`, whose loss is already a number, nor in `applied`."""
    model = network().to(device)
    averaging = BUILT[name](model)
    with never_waiting(device):
        for step in range(13):
            averaging.update()
            if averaging.due(step, step == 12):
                averaging.observe(step, LOSSES[step // 2])
        averaging.finish()
        with averaging.applied():
            pass
    assert averaging.serving


def follow(averaging, model, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        averaging.update()
        if averaging.due(step, step == 12):
            averaging.observe(step, LOSSES[step // 2])


@pytest.mark.parametrize("name", BUILT)
def test_goes_on_from_a_state_of_the_cpu(name, device):
    model, other = network(), network().to(device)
    averaging, resumed = BUILT[name](model), BUILT[name](other)
    follow(averaging, model, range(7))
    resumed.load_state_dict(averaging.state_dict())
    follow(averaging, model, range(7, 13))
    follow(resumed, other, range(7, 13))
    averaging.finish()
    resumed.finish()
    expected = averaging.state_dict()["served"]
    for key, x in resumed.state_dict()["served"].items():
        assert x.device.type == device.type
        torch.testing.assert_close(x.cpu(), expected[key], rtol=1e-5, atol=1e-6)


def test_mixed_devices(device):
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2).to(device)])
    averaging = SMA(model, 0)
    for value in (1.0, 2.0, 6.0):
        for p in model.parameters():
            nn.init.constant_(p, value)
        averaging.update()
    with averaging.applied():
        assert [p.device.type for p in model.parameters()] == 2 * ["cpu"] + 2 * [device.type]
        for p in model.parameters():
            torch.testing.assert_close(p.detach().cpu(), torch.full(p.shape, 3.0))
