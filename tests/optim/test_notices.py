"""Warnings of the first step: said when they apply, once, at the user's line, and only then."""

import warnings

import pytest
import torch
from torch import nn

from steppe.optim import FAD, SAM, BatchNormWarning, Bfloat16Warning
from tests.optim.problems import sgd


def trainer(dtype, **options):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x, y = torch.randn(16, 4), torch.randint(2, (16,))
    opt = FAD(sgd(model.parameters()), **options)

    def closure():
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return lambda: opt.step(closure)


@pytest.mark.parametrize("compiled", [False, True])
def test_bfloat16_warns_once_at_the_users_line(compiled):
    step = trainer(torch.bfloat16)
    if compiled:
        step = torch.compile(step, backend="eager")
    with pytest.warns(Bfloat16Warning, match="FAD.*bfloat16.*Prefer .*float16") as seen:
        step()
        step()
    (warning,) = (w for w in seen if w.category is Bfloat16Warning)  # torch may have its own
    assert warning.filename == __file__


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_other_precisions_do_not_warn(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(dtype)()


def test_a_step_without_flatness_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(torch.bfloat16, beta=0.0)()


def test_autocast_around_the_step_warns():
    model = nn.Linear(3, 2)
    opt = SAM(sgd(model.parameters()))

    def closure():
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    with pytest.warns(Bfloat16Warning), torch.autocast("cpu", dtype=torch.bfloat16):
        opt.step(closure)


def test_nothing_of_torch_is_replaced():
    plain = torch.autocast.__enter__
    step = trainer(torch.bfloat16)

    def closure():
        assert torch.autocast.__enter__ is plain
        return torch.zeros(())

    with pytest.warns(Bfloat16Warning):
        step()
    SAM(sgd(nn.Linear(2, 1).parameters())).step(closure)


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


def test_a_warning_that_is_an_error_leaves_the_weights_where_they_were():
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    opt = SAM(sgd(model.parameters()))

    def closure():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(4, 3)).sum()
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Bfloat16Warning):
            opt.step(closure)
    assert torch.equal(model.weight, before)


NORMS = {
    "batch norm": (nn.BatchNorm1d(4), True),
    "batch norm that evaluates": (nn.BatchNorm1d(4).eval(), False),
    "batch norm without statistics": (nn.BatchNorm1d(4, track_running_stats=False), False),
    "instance norm": (nn.InstanceNorm1d(4), False),
    "layer norm": (nn.LayerNorm(5), False),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_batch_norm_without_the_model_warns_once(kind, given):
    norm, counts = NORMS[kind]
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(20, 2))
    opt = SAM(sgd(model[2].parameters()), model=model if given else None)
    x = torch.randn(8, 4, 5)

    def closure():
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        opt.step(closure)
        opt.step(closure)
    expected = [BatchNormWarning] if counts and not given else []
    assert [one.category for one in seen] == expected
    assert all("Pass model=model to SAM" in str(one.message) for one in seen)
    assert all(one.filename == __file__ for one in seen)


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


def test_a_long_recurrence_is_looked_at_in_part():
    """Handles of a hundred thousand nodes would overflow the stack when they are freed."""
    cell, xs = nn.LSTMCell(4, 4), torch.randn(8000, 1, 4)
    opt = SAM(torch.optim.SGD(cell.parameters(), lr=0.1), model=cell)

    def closure():
        state = None
        for x in xs:
            state = cell(x, state)
        loss = state[0].sum()
        loss.backward()
        return loss

    assert opt.step(closure).isfinite()
