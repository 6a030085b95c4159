"""The wrapper as others see it: their constructors, the base's own methods, factories."""

import collections
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from steppe.optim import FAD, GAM, SAM
from tests.optim.problems import sgd


class Switching(torch.optim.SGD):
    """A base with methods of its own, as schedule-free ones and Lookahead have."""

    mode = "train"

    def eval(self):
        self.mode = "eval"

    def sync_lookahead(self):
        return [group["lr"] for group in self.param_groups]


def params():
    return nn.Linear(3, 2).parameters()


def test_the_bases_own_methods_are_reached():
    base = Switching(params(), lr=0.1)
    opt = FAD(base)
    assert opt.sync_lookahead() == [0.1]
    opt.eval()
    assert base.mode == opt.mode == "eval"
    assert not hasattr(opt, "train_mode")
    assert not hasattr(FAD(sgd(params())), "eval")
    fused = torch.optim.SGD(params(), lr=0.1, fused=True)
    assert not hasattr(FAD(fused), "_step_supports_amp_scaling")  # GradScaler must not see it
    with pytest.raises(AttributeError, match="'FAD' object has no attribute 'train_mode'"):
        opt.train_mode()


def test_state_can_be_set():
    opt = FAD(torch.optim.Adam(params()))
    fresh = collections.defaultdict(dict)
    opt.state = fresh
    assert opt.state is opt.base.state is fresh


WRITTEN = {
    "davda54": (
        lambda: SAM(params(), torch.optim.SGD, lr=0.1, rho=0.05, momentum=0.9),
        "SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.05, model=model)",
    ),
    "davda54 by name": (
        lambda: SAM(params(), base_optimizer=torch.optim.AdamW, lr=0.1, adaptive=True),
        "SAM(torch.optim.AdamW(model.parameters(), lr=0.1), adaptive=True, model=model)",
    ),
    "params": (
        lambda: FAD(params(), lr=0.1),
        "FAD(torch.optim.SGD(model.parameters(), lr=0.1), model=model)",
    ),
    "params by name": (
        lambda: GAM(params=params(), lr=0.1, weight_decay=1e-4),
        "GAM(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.0001), model=model)",
    ),
    "a class": (
        lambda: FAD(torch.optim.SGD, rho=0.1),
        "FAD(torch.optim.SGD(model.parameters(), lr=0.001), rho=0.1, model=model)",
    ),
    "a class with its learning rate": (
        lambda: FAD(torch.optim.Adam, lr=1e-3),
        "FAD(torch.optim.Adam(model.parameters(), lr=0.001), model=model)",
    ),
    "a class before the parameters": (
        lambda: FAD(torch.optim.Adam, params(), lr=1e-3),
        "FAD(torch.optim.Adam(model.parameters(), lr=0.001), model=model)",
    ),
    "torch by position": (
        lambda: SAM(params(), 0.1, momentum=0.9),
        "SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)",
    ),
    "davda54 by position": (
        lambda: SAM(params(), torch.optim.SGD, 0.05, True, lr=0.1),
        "SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05, adaptive=True, model=model)",
    ),
    "partial": (
        lambda: SAM(params(), partial(torch.optim.SGD, momentum=0.9), lr=0.1),
        "SAM(torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1), model=model)",
    ),
    "instance beside parameters": (
        lambda: SAM(params(), sgd(params()), rho=0.1),
        "SAM(optimizer, rho=0.1, model=model)  # the SGD",
    ),
    "None": (
        lambda: FAD(None, lr=0.1),
        "FAD(torch.optim.SGD(model.parameters(), lr=0.1), model=model)",
    ),
    "foreign class": (
        lambda: SAM([nn.Parameter(torch.zeros(1))], Switching, lr=0.1),
        "SAM(Switching(model.parameters(), lr=0.1), model=model)",
    ),
}


@pytest.mark.parametrize("style", WRITTEN)
def test_constructors_of_other_libraries_are_answered_with_the_line_to_write(style):
    call, line = WRITTEN[style]
    with pytest.raises(TypeError) as error:
        call()
    assert f"\n    {line}\n" in str(error.value)
    assert "wraps an optimizer instance" in str(error.value)


def test_an_option_of_the_base_is_sent_there():
    with pytest.raises(TypeError, match=r"belongs to the base, SGD\(.*, lr=0.2\)"):
        FAD(sgd(params()), lr=0.2)


def test_the_line_to_write_works():
    model = nn.Linear(3, 2)
    SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.05, model=model)


def test_a_tensor_as_radius_is_refused_in_words():
    with pytest.raises(TypeError, match=r"rho must be a Python number.*pass rho\.item\(\)"):
        FAD(sgd(params()), rho=torch.tensor(0.05))


def test_a_factory_has_torchs_signature():
    make = FAD.over(torch.optim.RMSprop, rho=0.2, momentum=0.9)
    model = nn.Linear(3, 2)
    for factory in (make, pickle.loads(pickle.dumps(make))):
        opt = factory(model.parameters(), lr=0.1, alpha=0.25, model=model, ratio=0.5)
        group = opt.param_groups[0]
        assert isinstance(opt.base, torch.optim.RMSprop)
        assert (group["lr"], group["momentum"], group["rho"]) == (0.1, 0.9, 0.2)
        assert group["fad_alpha"] == 0.25  # a name that both have is the wrapper's
        assert group["alpha"] == 0.99
        assert (opt.model, opt.ratio) == (model, 0.5)
    groups = [{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "rho": 0.4}]
    assert [g["lr"] for g in make(groups, lr=0.1).param_groups] == [1.0, 0.1]
    assert [g["rho"] for g in make(groups, lr=0.1).param_groups] == [0.2, 0.4]
    with pytest.raises(TypeError, match="rhoo"):
        make(model.parameters(), lr=0.1, rhoo=1.0)
    assert make(model.parameters(), 0.3).param_groups[0]["lr"] == 0.3
    for wrong in (sgd(model.parameters()), "sgd"):
        with pytest.raises(TypeError, match=r"FAD\.over takes an optimizer class"):
            FAD.over(wrong)


def test_a_subclass_may_have_torchs_signature():
    class Mine(FAD):
        def __init__(self, params, lr=0.1, rho=0.05):
            super().__init__(torch.optim.SGD(params, lr=lr), rho=rho)

    assert Mine(params(), lr=0.2).param_groups[0]["lr"] == 0.2


def test_a_module_in_a_numbers_place_is_told_where_it_goes():
    model = nn.Linear(3, 2)
    with pytest.raises(TypeError, match="rho must be a number, got a module: pass it as model="):
        FAD(sgd(model.parameters()), model)
