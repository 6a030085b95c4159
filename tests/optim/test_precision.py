"""The warning about bfloat16: said when it applies, once, and only then."""

import warnings

import pytest
import torch
from torch import nn

from steppe.optim import FAD, SAM, Bfloat16Warning
from tests.optim.problems import sgd


def trainer(dtype, api="closure", **options):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x, y = torch.randn(16, 4), torch.randint(2, (16,))
    opt = FAD(sgd(model.parameters()), **options)

    def closure():
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def step():
        if api == "closure":
            return opt.step(closure)
        for phase in opt.phases():
            with phase:
                closure()
        return opt.step()

    return step


@pytest.mark.parametrize("api", ["closure", "phases"])
def test_bfloat16_warns_once(api):
    step = trainer(torch.bfloat16, api)
    with pytest.warns(Bfloat16Warning, match="FAD.*bfloat16.*steppe bench fidelity") as seen:
        step()
        step()
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_other_precisions_do_not_warn(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(dtype)()


def test_a_step_without_flatness_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(torch.bfloat16, beta=0.0)()


def test_watching_changes_nothing():
    """The first step runs under a hook on saved tensors; its gradients must be the same."""
    w = nn.Parameter(torch.tensor([1.0, -2.0]))
    results = []
    for watched in (False, True):
        with torch.no_grad():
            w.copy_(torch.tensor([1.0, -2.0]))
        opt = SAM(torch.optim.SGD([w], lr=0.1))
        opt._watched = watched

        def closure():
            loss = (torch.sin(w) * w).sum()
            loss.backward()
            return loss

        opt.step(closure)
        results.append(w.detach().clone())
    assert torch.equal(*results)
