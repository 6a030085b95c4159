"""The warning about bfloat16: said when it applies, once, and only then."""

import threading
import warnings

import pytest
import torch
from torch import nn

from steppe.optim import FAD, SAM, Bfloat16Warning, precision
from steppe.optim.precision import on_bfloat16
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


def test_bfloat16_that_begins_later_warns_too():
    model = nn.Linear(3, 2)
    opt = SAM(sgd(model.parameters()))
    x = torch.randn(4, 3)

    def closure(enabled):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = model(x).square().mean()
        loss.backward()
        return loss

    opt.step(lambda: closure(False))
    with pytest.warns(Bfloat16Warning):
        opt.step(lambda: closure(True))


def test_autocast_around_the_step_warns():
    model = nn.Linear(3, 2)
    opt = SAM(sgd(model.parameters()))

    def closure():
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    with pytest.warns(Bfloat16Warning), torch.autocast("cpu", dtype=torch.bfloat16):
        opt.step(closure)


def test_a_warning_that_is_an_error_leaves_nothing_behind():
    """Entering the pass fails half-way: what it had set up is undone."""
    plain = torch.autocast.__enter__
    model = nn.Linear(3, 2)
    opt = SAM(sgd(model.parameters()))
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
        warnings.simplefilter("error", Bfloat16Warning)
        with pytest.raises(Bfloat16Warning):
            opt.step(lambda: model(torch.ones(4, 3)).sum().backward())
    assert torch.autocast.__enter__ is plain
    assert not precision._local.listeners


def test_autocast_is_as_it_was_afterwards():
    plain = torch.autocast.__enter__
    with pytest.warns(Bfloat16Warning):
        trainer(torch.bfloat16)()
    assert torch.autocast.__enter__ is plain


def test_watches_that_end_out_of_order_leave_autocast_alone():
    """Two optimizers' phases may overlap, in one thread or in several."""
    plain = torch.autocast.__enter__
    first, second = (on_bfloat16(lambda: None) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert torch.autocast.__enter__ is plain

    threads = [threading.Thread(target=lambda: [trainer(None)() for _ in range(20)]) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.autocast.__enter__ is plain
    with torch.autocast("cpu", torch.float16):
        pass


def test_closures_may_use_torch_func():
    """Per-sample gradients inside the loss: no hook of the watch may stand in their way."""
    w = nn.Parameter(torch.tensor([1.0, -2.0]))
    x = torch.randn(5, 2)
    opt = FAD(sgd([w]))

    def closure():
        per_sample = torch.func.vmap(torch.func.grad(lambda v, s: (v @ s).sin()), (None, 0))(w, x)
        loss = per_sample.square().mean()
        loss.backward()
        return loss

    assert opt.step(closure).isfinite()


def test_a_warning_that_is_an_error_leaves_no_autocast_behind() -> None:
    weight = nn.Parameter(torch.ones(2))
    opt = FAD(torch.optim.SGD([weight], lr=0.1))

    def closure() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = weight.square().sum()
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Bfloat16Warning):
            opt.step(closure)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("method", [SAM, FAD])
def test_a_region_around_the_step_sees_the_weights_move(method):
    """It would keep its casts of the weights from pass to pass, and from the last pass on."""

    def losses(around):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        x, y = torch.randn(32, 8), torch.randint(3, (32,))
        opt = method(torch.optim.SGD(model.parameters(), lr=0.0), rho=0.5)
        found = []

        def closure():
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            found.append(loss.item())
            return loss

        with torch.autocast("cpu", dtype=torch.float16, enabled=around):
            opt.step(closure)
            found.append(nn.functional.cross_entropy(model(x), y).item() if around else found[0])
        return found

    inside, alone = losses(around=True), losses(around=False)
    assert inside == pytest.approx(alone, rel=1e-3)
    assert alone[1] > 1.05 * alone[0]
