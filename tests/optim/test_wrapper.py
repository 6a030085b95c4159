"""The wrapper as others see it: their constructors, the base's own methods, factories."""

import collections
import pickle
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steppe.optim import FAD, GAM, GSAM, SAM, WSAM, FollowLR, FriendlySAM, LookSAM
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
    assert not getattr(FAD(fused), "_step_supports_amp_scaling", False)  # for GradScaler
    with pytest.raises(AttributeError, match="'FAD' object has no attribute 'train_mode'"):
        opt.train_mode()


def test_state_can_be_set():
    opt = FAD(torch.optim.Adam(params()))
    fresh = collections.defaultdict(dict)
    opt.state = fresh
    assert opt.state is opt.base.state is fresh


PROPORTION = SimpleNamespace(max_value=0.6, min_value=0.1, max_lr=0.1, min_lr=0.0)
"""What GSAM's other implementations take as `rho_scheduler`."""

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
    "pytorch_optimizer's SAM by position": (
        lambda: SAM(params(), torch.optim.SGD, 0.1, False, False, 1e-8, lr=0.1),
        "SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, adaptive=False, xi=1e-08, "
        "model=model)",
    ),
    "its GSAM": (
        lambda: GSAM(params(), sgd(params()), nn.Linear(3, 2), PROPORTION),
        "GSAM(optimizer, rho=FollowLR(high=0.6, low=0.1, lr_high=0.1, lr_low=0.0), alpha=0.4, "
        "model=model)  # the SGD",
    ),
    "juntang-zhuang's GSAM": (
        lambda: GSAM(
            params=params(),
            base_optimizer=sgd(params()),
            model=nn.Linear(3, 2),
            gsam_alpha=0.3,
            rho_scheduler=SimpleNamespace(**vars(PROPORTION) | {"min_value": 0.6}),
            adaptive=False,
        ),
        "GSAM(optimizer, rho=0.6, alpha=0.3, model=model)  # the SGD",
    ),
    "its WSAM, the model first": (
        lambda: WSAM(nn.Linear(3, 2), params(), torch.optim.Adam, eps=1e-10, lr=0.1),
        "WSAM(torch.optim.Adam(model.parameters(), lr=0.1), xi=1e-10, model=model)",
    ),
    "its WSAM by position": (
        lambda: WSAM(nn.Linear(3, 2), params(), torch.optim.SGD, 0.1, 0.8, False, False, None),
        "WSAM(torch.optim.SGD(model.parameters(), lr=0.001), rho=0.1, gamma=0.8, decouple=False, "
        "max_norm=None, model=model)",
    ),
    "its LookSAM, which has other defaults": (
        lambda: LookSAM(params(), torch.optim.SGD, lr=0.1, use_gc=False),
        "LookSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, k=10, model=model)",
    ),
    "its FriendlySAM": (
        lambda: FriendlySAM(params(), torch.optim.SGD, lmbda=0.5, sigma=1.0, perturb_eps=1e-8),
        "FriendlySAM(torch.optim.SGD(model.parameters(), lr=0.001), sigma=1.0, lam=0.5, xi=1e-08, "
        "model=model)",
    ),
    "its FriendlySAM, whose sigma weighs an older mean": (
        lambda: FriendlySAM(params(), torch.optim.SGD, 0.1, 0.5, 0.5, lr=0.1),
        f"FriendlySAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, sigma={0.5 / 0.75}, "
        "lam=0.5, model=model)",
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
    model = nn.Linear(3, 2)
    names = {c.__name__: c for c in (FAD, GAM, SAM, GSAM, WSAM, FollowLR, FriendlySAM, LookSAM)}
    names |= {"torch": torch, "Switching": Switching, "model": model}
    eval(line, {**names, "optimizer": sgd(model.parameters())})


def test_an_option_without_a_counterpart_is_named():
    with pytest.raises(TypeError, match=r"LookSAM has no equivalent of adaptive=True, use_gc=True"):
        LookSAM(params(), torch.optim.SGD, lr=0.1, adaptive=True, use_gc=True)


@pytest.mark.parametrize(
    ("cls", "theirs", "ours"),
    [
        (FriendlySAM, {"lmbda": 0.8}, "lam=0.8"),
        (SAM, {"perturb_eps": 1e-8}, "xi=1e-08"),
        (GSAM, {"gsam_alpha": 0.3}, "alpha=0.3"),
        (GSAM, {"rho_scheduler": PROPORTION}, "rho=FollowLR(high=0.6, low=0.1"),
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(cls, theirs, ours):
    with pytest.raises(TypeError, match=re.escape(f"{next(iter(theirs))!r}: write {ours}")):
        cls(sgd(params()), **theirs)


def test_an_option_of_the_base_is_sent_there():
    with pytest.raises(TypeError, match=r"belongs to the base, SGD\(.*, lr=0.2\)"):
        FAD(sgd(params()), lr=0.2)


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
