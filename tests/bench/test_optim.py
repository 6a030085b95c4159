"""`steppe bench optim` measures what it says."""

import json

import pytest

pytest.importorskip("pytorch_optimizer")

import torch
from torch import nn

from steppe.bench import optim
from steppe.bench.still import Still
from steppe.cli import app
from steppe.errors import UserError
from steppe.optim import FAD
from steppe.training.processes import find_device


def test_resnet50_has_161_shapes():
    shapes = optim.shapes()
    assert len(shapes) == 161
    assert sum(s.numel() for s in shapes) == 23_522_375  # seven classes


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(optim, "shapes", lambda: [torch.Size([40, 30]), torch.Size([7])])


@pytest.mark.usefixtures("small")
def test_every_contender_is_measured():
    result = optim.measure(torch.device("cpu"), rounds=3)
    part = result["arithmetic"]
    assert part["parameters"] == 1207
    assert part["ratios"].keys() == {"fad / floor", "sam / pytorch_optimizer's sam"}
    assert all(value["median"] > 0 for value in part["ms"].values())
    json.dumps(result)


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


@pytest.mark.usefixtures("small")
def test_the_command_prints_json_and_saves_it(tmp_path, capsys, monkeypatch):
    path = tmp_path / "deep" / "result.json"
    arguments = ["bench", "optim", "--rounds", "2", "--json", "--save", str(path)]
    monkeypatch.setattr("sys.argv", ["steppe", *arguments])
    app(arguments, standalone_mode=False)
    printed = json.loads(capsys.readouterr().out)
    assert json.loads(path.read_text()) == printed
    assert printed["environment"]["command"] == "steppe bench optim --rounds 2 --json"
    assert printed["environment"]["torch"] == torch.__version__.partition("+")[0]


def test_a_device_that_is_not_there():
    with pytest.raises(UserError, match="device 'cuda:99' cannot be used"):
        find_device("cuda:99")
    with pytest.raises(UserError, match="device 'gpu' cannot be used"):
        find_device("gpu")
