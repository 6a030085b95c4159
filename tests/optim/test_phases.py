"""The phase API: after the last phase everything is ordinary PyTorch."""

import contextlib

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from steppe.optim import FAD
from tests.optim.problems import METHODS, PROBLEMS, sgd, train

every_method = pytest.mark.parametrize("name", METHODS)
every_base = pytest.mark.parametrize("fused", [None, True], ids=["plain", "fused"])
"""A fused base unscales gradients in its own kernel, which does nothing if one is not finite."""


def setup(name, problem_name="dropout", fused=None, **options):
    problem = PROBLEMS[problem_name]()
    base = sgd(problem.groups(), fused=fused)
    return problem, METHODS[name](base, model=problem.model, **options)


def walk(problem, opt, scale=lambda loss: loss, scaler=None):
    for phase in opt.phases(scaler):
        with phase:
            scale(problem.loss()).backward(create_graph=opt.needs_graph)


@every_method
def test_phases_equal_the_closure(name):
    (problem, opt), (other, opt2) = setup(name), setup(name)
    train(problem, opt, 3)
    for t in range(3):
        torch.manual_seed(t)
        walk(other, opt2)
        opt2.step()
    assert torch.equal(problem.weights(), other.weights())
    assert opt.steps == opt2.steps == 3


@every_method
def test_weights_are_back_and_the_direction_is_in_grad(name):
    problem, opt = setup(name)
    before = problem.weights()
    torch.manual_seed(0)
    walk(problem, opt)
    assert torch.equal(problem.weights(), before)
    grad = torch.cat([p.grad.reshape(-1) for p in problem.model.parameters()])
    memory = {"shapes": [p.shape for p in problem.model.parameters()]}
    here = lambda point: problem.gradient(point, seed=0)  # noqa: E731
    expected = METHODS[name].direction(here, before, memory=memory)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


def test_a_phase_knows_its_place():
    problem, opt = setup("fad")
    seen = []
    for phase in opt.phases():
        with phase as entered:
            problem.loss().backward()
            seen.append((entered.index, entered.total, entered.loss))
    assert seen == [(i, 4, "main") for i in range(4)]


@pytest.mark.parametrize("fail_at", range(4))
def test_an_exception_in_a_phase_restores_the_weights(fail_at):
    problem, opt = setup("fad")
    before = problem.weights()
    with pytest.raises(KeyError):
        for phase in opt.phases():
            with phase:
                problem.loss().backward()
                if phase.index == fail_at:
                    raise KeyError
    assert torch.equal(problem.weights(), before)
    with pytest.raises(RuntimeError, match="closure"):
        opt.step()


@pytest.mark.parametrize("fail_at", range(4))
def test_a_swallowed_exception_does_not_arm_the_step(fail_at):
    problem, opt = setup("fad")
    before = problem.weights()
    with pytest.raises(RuntimeError, match=f"Phase {fail_at} of 4 was skipped or failed"):
        for phase in opt.phases():
            with contextlib.suppress(KeyError), phase:
                problem.loss().backward()
                if phase.index == fail_at:
                    raise KeyError
    assert torch.equal(problem.weights(), before)
    with pytest.raises(RuntimeError, match="closure"):
        opt.step()


def test_a_phase_is_entered_once():
    problem, opt = setup("sam")
    with pytest.raises(RuntimeError, match="Phase 0 cannot be entered"):
        for phase in opt.phases():
            for _ in range(2):
                with phase:
                    problem.loss().backward()


def test_a_step_inside_a_phase_ends_the_outer_one():
    problem, opt = setup("sam")
    with pytest.raises(RuntimeError, match="Another step began inside phase"):
        for phase in opt.phases():
            with phase:
                problem.loss().backward()
                train(problem, opt, 1)
    with pytest.raises(RuntimeError, match="closure"):
        opt.step()
    other, opt2 = setup("sam")
    train(other, opt2, 1)
    assert torch.equal(problem.weights(), other.weights())  # the inner step, and nothing more


def test_an_abandoned_loop_that_is_still_held():
    """Its weights come back when the next step begins, and it cannot spoil them later."""
    problem, opt = setup("fad")
    other, opt2 = setup("fad")
    held = opt.phases()
    for phase in held:
        with phase:
            problem.loss().backward()
        break
    train(problem, opt, 2)
    train(other, opt2, 2)
    assert torch.equal(problem.weights(), other.weights())
    held.close()
    assert torch.equal(problem.weights(), other.weights())


def test_leaving_the_loop_early_restores_the_weights():
    problem, opt = setup("fad")
    before = problem.weights()
    for phase in opt.phases():
        with phase:
            problem.loss().backward()
        if phase.index == 1:
            assert not torch.equal(problem.weights(), before)
            break
    assert torch.equal(problem.weights(), before)


def test_a_phase_that_is_not_entered_is_an_error():
    _, opt = setup("fad")
    with pytest.raises(RuntimeError, match="Phase 0 of 4 was skipped.*with phase"):
        for _ in opt.phases():
            pass


def test_step_works_once_per_walk():
    problem, opt = setup("sam")
    walk(problem, opt)
    opt.step()
    with pytest.raises(RuntimeError, match="closure"):
        opt.step()


@every_method
def test_micro_batches_accumulate(name):
    """Two halves inside one closure, or one phase, are the whole batch."""
    problem, opt = setup(name, "mlp")
    train(problem, opt, 3)
    for style in ("closure", "phase"):
        halves, opt2 = setup(name, "mlp")
        parts = list(zip(halves.x.chunk(2), halves.y.chunk(2), strict=True))

        def accumulate(halves=halves, parts=parts, opt2=opt2):
            total = 0.0
            for x, y in parts:
                loss = nn.functional.cross_entropy(halves.model(x), y) / len(parts)
                loss.backward(create_graph=opt2.needs_graph)
                total += loss.detach()
            return total

        for t in range(3):
            torch.manual_seed(t)
            if style == "closure":
                opt2.step(accumulate)
            else:
                for phase in opt2.phases():
                    with phase:
                        accumulate()
                opt2.step()
        torch.testing.assert_close(halves.weights(), problem.weights(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_max_norm_clips_the_direction(max_norm):
    (problem, opt), (other, opt2) = setup("fad", max_norm=max_norm), setup("fad")
    train(problem, opt, 1)
    torch.manual_seed(0)
    walk(other, opt2)
    length = nn.utils.clip_grad_norm_(other.model.parameters(), max_norm)
    opt2.step()
    assert torch.equal(problem.weights(), other.weights())
    assert (length > max_norm) == (max_norm < 1)


# ---- mixed precision ------------------------------------------------------------------------


def scaler(**options):
    return GradScaler("cpu", **{"init_scale": 2.0**12, **options})


def scaled_closure(problem, opt, scale, break_in=None):
    calls = 0

    def closure():
        nonlocal calls
        loss = problem.loss()
        bad = float("inf") if calls == break_in else 1.0
        (scale.scale(loss) * bad).backward(create_graph=opt.needs_graph)
        calls += 1
        return loss

    return closure


@pytest.mark.parametrize("update", ["by the loop", "left to the optimizer"])
@every_base
@every_method
def test_a_loss_scale_cancels(name, fused, update):
    problem, opt = setup(name)
    other, opt2 = setup(name, fused=fused)
    losses = train(problem, opt, 4)
    scale = scaler(growth_interval=2)
    for t in range(4):
        torch.manual_seed(t)
        loss = opt2.step(scaled_closure(other, opt2, scale), scaler=scale)
        assert loss.item() == pytest.approx(losses[t], rel=1e-12)
        if update == "by the loop":
            scale.update()
    torch.testing.assert_close(other.weights(), problem.weights(), rtol=0, atol=1e-12)
    assert scale.get_scale() > 2.0**12  # it grew, so it was updated


@pytest.mark.parametrize("break_in", range(4))
@every_base
@every_method
def test_overflow_in_any_pass_skips_the_step(name, fused, break_in):
    if break_in >= METHODS[name].passes_at(1):
        pytest.skip("fewer passes than that")
    problem, opt = setup(name, fused=fused)
    scale = scaler()
    opt.step(scaled_closure(problem, opt, scale), scaler=scale)
    scale.update()
    before = problem.weights()
    state = {k: v["momentum_buffer"].clone() for k, v in opt.state.items()}

    opt.step(scaled_closure(problem, opt, scale, break_in), scaler=scale)
    scale.update()
    assert torch.equal(problem.weights(), before)
    assert all(torch.equal(opt.state[k]["momentum_buffer"], v) for k, v in state.items())
    assert scale.get_scale() == 2.0**11
    assert opt.steps == (2 if fused else 1)  # a kernel that skips does not tell
    with pytest.raises(RuntimeError, match="closure"):
        opt.step()  # the direction that was refused is not lying about

    opt.step(scaled_closure(problem, opt, scale), scaler=scale)
    assert not torch.equal(problem.weights(), before)
    assert opt.steps == (3 if fused else 2)


@every_method
def test_a_first_step_that_is_skipped_leaves_no_momentum(name):
    """Torch makes a fused SGD's buffers of whatever is in memory, here of what is no number."""
    problem, opt = setup(name, fused=True, max_norm=0.05)
    other, opt2 = setup(name, max_norm=0.05)
    opt2.seed = opt.seed = 3
    before, scale = problem.weights(), scaler()
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote to is filled with NaN
    try:
        opt.step(scaled_closure(problem, opt, scale, break_in=0), scaler=scale)
        scale.update()
        assert torch.equal(problem.weights(), before)
        assert len(opt.state) == len(opt.parameters())
        assert not any(opt.state[p]["momentum_buffer"].any() for p in opt.parameters())
        torch.manual_seed(0)
        opt.step(scaled_closure(problem, opt, scale), scaler=scale)
    finally:
        torch.use_deterministic_algorithms(False)
    opt2.steps = 1 if opt2.draws else 0  # noise goes by the counter, which a fused base advances
    train(other, opt2, 1)  # as if there had been no step before
    torch.testing.assert_close(problem.weights(), other.weights(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{"momentum": 0.0}, {}, {"dampening": 0.5}, {"nesterov": True}], ids=str
)
@every_method
def test_fused_kernels_round_as_float32_does(name, options):
    if name == "msam" and not options.get("momentum", 0.9):
        pytest.skip("needs momentum")

    def trained(fused):
        problem = PROBLEMS["mlp"]()
        problem.model.float()
        problem.x = problem.x.float()
        base = sgd(problem.groups(lr=0.02), fused=fused, **options)
        opt, scale = METHODS[name](base, max_norm=0.5), scaler()
        for _ in range(10):
            opt.step(scaled_closure(problem, opt, scale), scaler=scale)
            scale.update()
        kept = any("momentum_buffer" in state for state in opt.state.values())
        assert kept == (opt.param_groups[0]["momentum"] > 0)
        return problem.weights()

    # Weights are below 1, of which 2^-24 is half a unit in the last place; ten steps add up.
    torch.testing.assert_close(trained(True), trained(None), rtol=0, atol=64 * 2**-24)


@every_base
def test_max_norm_clips_what_is_unscaled(fused):
    """Of the direction itself: scaled by 4096, any of these would be too long."""
    for max_norm in (1e-3, 1e3):
        problem, opt = setup("fad", max_norm=max_norm)
        other, opt2 = setup("fad", fused=fused, max_norm=max_norm)
        scale = scaler(init_scale=2.0**16)
        train(problem, opt, 2)
        for t in range(2):
            torch.manual_seed(t)
            opt2.step(scaled_closure(other, opt2, scale), scaler=scale)
            scale.update()
        torch.testing.assert_close(other.weights(), problem.weights(), rtol=0, atol=1e-12)


def test_adam_with_fused_kernels_as_base():
    def trained(fused, scale):
        problem = PROBLEMS["mlp"]()
        opt = FAD(torch.optim.Adam(problem.groups(), lr=1e-2, fused=fused))
        for break_in in (None, 2, None):
            if scale is None and break_in is not None:
                continue
            closure = problem.closure(opt) if scale is None else None
            opt.step(closure or scaled_closure(problem, opt, scale, break_in), scaler=scale)
        return problem.weights()

    torch.testing.assert_close(trained(True, scaler()), trained(None, None), rtol=0, atol=1e-12)


@every_base
@pytest.mark.parametrize("break_in", [None, 1])
def test_hooks_fire_once_with_a_scaler(fused, break_in):
    problem, opt = setup("fad", fused=fused)
    fired, scale = [], scaler()
    opt.register_step_pre_hook(lambda *_: fired.append("pre"))
    opt.register_step_post_hook(lambda *_: fired.append("post"))
    opt.step(scaled_closure(problem, opt, scale, break_in), scaler=scale)
    # Without fused kernels the host knows that there is no step; with them it launches one anyway.
    assert fired == ([] if break_in is not None and not fused else ["pre", "post"])


def test_overflow_of_a_gradient_the_direction_does_not_contain():
    """SAM's direction is g1 alone; an infinite g0 must still skip the step, not vanish."""
    w = nn.Parameter(torch.tensor([1.0, 2.0]))
    opt, scale = METHODS["sam"](torch.optim.SGD([w], lr=0.1)), scaler()
    calls = 0

    def closure():
        nonlocal calls
        loss = w[1] ** 2
        scale.scale(loss).backward()
        if calls == 0:
            w.grad[0] = float("inf")  # and nothing at the next point depends on w[0]
        calls += 1
        return loss

    opt.step(closure, scaler=scale)
    scale.update()
    assert w.tolist() == [1.0, 2.0]
    assert scale.get_scale() == 2.0**11


def test_a_disabled_scaler_is_no_scaler():
    (problem, opt), (other, opt2) = setup("fad"), setup("fad")
    off = GradScaler("cpu", enabled=False)
    train(problem, opt, 1)
    torch.manual_seed(0)
    opt2.step(scaled_closure(other, opt2, off), scaler=off)
    off.update()
    assert torch.equal(problem.weights(), other.weights())


@every_base
@every_method
def test_phases_with_a_scaler_by_hand(name, fused):
    """unscale_, clip, scaler.step(opt), update: the code of torch's AMP examples."""
    problem, opt = setup(name, max_norm=0.05)
    other, opt2 = setup(name, fused=fused)
    train(problem, opt, 3)
    scale = scaler()
    for t in range(3):
        torch.manual_seed(t)
        walk(other, opt2, scale.scale, scale)
        scale.unscale_(opt2)
        nn.utils.clip_grad_norm_(other.model.parameters(), 0.05)
        scale.step(opt2)
        scale.update()
    torch.testing.assert_close(other.weights(), problem.weights(), rtol=0, atol=1e-12)
    assert opt2.steps == 3


def test_a_skipped_step_of_phases_does_not_count():
    problem, opt = setup("fad")
    before, scale = problem.weights(), scaler()
    walk(problem, opt, lambda loss: scale.scale(loss) * float("nan"))
    scale.step(opt)
    scale.update()
    assert torch.equal(problem.weights(), before)
    assert opt.steps == 0


def test_half_precision_autocast_trains():
    """fp16 autocast with a scaler on the CPU: FAD lowers the loss of a float32 model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    x, y = torch.randn(64, 8), torch.randint(4, (64,))
    opt, scale = FAD(sgd(model.parameters()), model=model), scaler()

    def closure():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scale.scale(loss).backward()
        return loss

    first = opt.step(closure, scaler=scale).item()
    for _ in range(20):
        scale.update()
        last = opt.step(closure, scaler=scale).item()
    assert last < 0.9 * first
